"""New tokens written into a key-value cache."""
