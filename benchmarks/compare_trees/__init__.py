"""Several versions of flashtile, measured side by side in one run; see `__main__.py`."""
