"""Quantise 16-bit and 32-bit tensors to float8."""
