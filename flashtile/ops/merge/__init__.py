"""Partial attention results merged by their log-sum-exp."""
