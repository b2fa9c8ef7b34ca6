"""Attention in 8 bits: bring tensors to float8, and attend to them."""

from .attend import attention_fp8
from .rotation import rotation
from .tensors import Quantized, quantize_qkv

__all__ = ["Quantized", "attention_fp8", "quantize_qkv", "rotation"]
