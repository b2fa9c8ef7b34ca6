"""Building blocks of transformers, with the names that ``flash_attn.modules`` gives them."""
