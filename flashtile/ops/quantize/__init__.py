"""Tensors of 16 or 32 bits converted to float8."""
