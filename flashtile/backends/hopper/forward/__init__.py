"""The 16-bit forward."""
