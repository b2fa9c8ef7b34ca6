"""Append new tokens to a key-value cache."""
