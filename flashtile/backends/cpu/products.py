"""Products of the matrices of tiles.

PyTorch multiplies float32 by MKL, which uses half of the width of AMD's AVX-512 units. oneDNN,
which PyTorch has as well, uses all of it. It multiplies one pair of matrices at a time and compiles
a kernel for each shape, so small products stay with MKL.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_MULTIPLICATIONS = 1 << 21  # of one pair of matrices
HAS_ONEDNN = (
    torch.backends.mkl.is_available()
    and torch.backends.mkldnn.is_available()
    and torch.cpu._is_avx512_supported()
)


def product(A: Tensor, B: Tensor) -> Tensor:
    """A @ B of matrices (batch, heads, rows, columns)."""
    is_large = A.shape[-2] * A.shape[-1] * B.shape[-1] >= MIN_MULTIPLICATIONS
    if not (is_large and HAS_ONEDNN and A.dtype == torch.float32 and A.device.type == "cpu"):
        return A @ B
    # PyTorch cannot differentiate it, and modes do not count its operations.
    is_seen = torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack()
    if is_seen or A.requires_grad or B.requires_grad:
        return A @ B
    pairs = zip(_dense(A).flatten(0, 1), _dense(B).mT.flatten(0, 1), strict=True)
    linear = torch.ops.mkldnn._linear_pointwise.default  # a times the transpose of b
    results = [linear(a, b, None, "none", [], "") for a, b in pairs]
    return torch.stack(results).unflatten(0, A.shape[:2])


def _dense(x: Tensor) -> Tensor:
    """`x` with matrices whose rows, or columns, are adjacent: others are very slow."""
    m, n = x.shape[-2:]
    return x if x.stride()[-2:] in ((n, 1), (1, m)) else x.contiguous()
