"""The 16-bit backward."""
