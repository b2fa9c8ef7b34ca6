"""Decoding over latent keys, whose first columns are the values (DeepSeek-V2, section 2.1)."""
