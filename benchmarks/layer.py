"""A transformer layer like GPT-2's around a peer's attention, as it is trained in practice.

Layer norm, one product for q, k and v, attention, a product, and the MLP after another layer norm,
with both residual connections; no biases, no dropout. The layer is the same for every peer; a peer
whose layout has the heads first gets a view, as in models.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .prepared import Prepared, Skip, refuse
from .shapes import Case


def in_layer(prepared: Prepared, case: Case) -> Prepared:
    """The layer with this peer's attention in it; its leaves are the input and the weights.

    Raises:
        Skip: the peer is not set up for it.
    """
    refuse(case, documents="a layer takes no packed sequences", cached="a layer takes no cache")
    attend = prepared.attend
    if attend is None:
        raise Skip("not set up for a layer")
    width, device = case.heads_q * case.head_dim, prepared.dout.device
    random = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(shape, generator=random, device=device) * scale
        return made.to(case.torch_dtype)

    shapes = {"qkv": (3, 1), "proj": (1, 1), "up": (4, 1), "down": (1, 4)}  # in widths
    leaves = {"x": normal(case.batch, case.seqlen_q, width)}
    for name, (rows, columns) in shapes.items():
        leaves[name] = normal(rows * width, columns * width, scale=(columns * width) ** -0.5)
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    x = leaves["x"]

    def forward() -> Tensor:
        qkv = F.linear(F.layer_norm(x, (width,)), leaves["qkv"])
        q, k, v = qkv.unflatten(-1, (3, case.heads_q, case.head_dim)).unbind(2)
        if prepared.heads_first:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = attend(q, k, v)
        out = out.transpose(1, 2) if prepared.heads_first else out
        y = x + F.linear(out.flatten(2), leaves["proj"])
        inner = F.linear(F.layer_norm(y, (width,)), leaves["up"])
        return y + F.linear(F.gelu(inner, approximate="tanh"), leaves["down"])

    return Prepared(forward, leaves, normal(*x.shape), backend=prepared.backend)
