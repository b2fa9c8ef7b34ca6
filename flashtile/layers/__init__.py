"""Layers around attention, under the same import paths as in ``flash_attn.layers``."""
