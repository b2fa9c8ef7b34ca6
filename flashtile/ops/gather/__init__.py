"""Copy the pages of a cache into contiguous rows."""
