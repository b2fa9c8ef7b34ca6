"""Attention in 8 bits: quantise tensors to float8, and attend to them."""

from ..ops.quantize.formula import Quantized, rotation
from .attend import attention_fp8
from .tensors import quantize_qkv

__all__ = ["Quantized", "attention_fp8", "quantize_qkv", "rotation"]
