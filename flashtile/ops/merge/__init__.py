"""Merge partial attention results by their log-sum-exp."""
