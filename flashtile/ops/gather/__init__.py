"""Pages of a cache copied into contiguous rows."""
