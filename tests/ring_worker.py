"""One process of `test_ring_flash_attention`: zhuzilin's ring-flash-attention on flashtile.

Run as ``python ring_worker.py rank world_size rendezvous-file``; exits with 0 when every variant
agrees with attention over the whole sequence.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch
import torch.distributed as dist

from flashtile.integrations import flash_attn
from flashtile.testing import (
    assert_close,
    attention_reference,
    attention_varlen_reference,
    floor_of,
    rounding_variance,
)

# Its adapter for transformers imports a name that newer versions no longer have.
ADAPTERS = ("substitute_hf_flash_attn", "update_ring_flash_attn_params")
sys.modules["ring_flash_attn.adapters"] = ModuleType("ring_flash_attn.adapters")
for name in ADAPTERS:
    setattr(sys.modules["ring_flash_attn.adapters"], name, None)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
LENGTHS = (24, 8, 16)  # of packed sequences; multiples of twice the number of processes


def whole_inputs(*leading: int) -> list[torch.Tensor]:
    """q, k, v and dout of the whole sequence, the same in all processes."""
    torch.manual_seed(0)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(*leading, H, HEAD_DIM, dtype=torch.bfloat16) for H in heads]


def share(x: torch.Tensor, rank: int, world: int, layout: str, dim: int) -> torch.Tensor:
    """The rows of the whole sequence that a process holds."""
    if layout == "contiguous":
        return x.chunk(world, dim)[rank]
    if layout == "stripe":
        return x.unflatten(dim, (-1, world)).select(dim + 1, rank)
    parts = x.chunk(2 * world, dim)  # zigzag: one from the front and one from the back
    return torch.cat([parts[rank], parts[2 * world - 1 - rank]], dim)


def packed_share(x: torch.Tensor, rank: int, world: int, layout: str) -> torch.Tensor:
    """The share of each packed sequence, packed again."""
    return torch.cat([share(part, rank, world, layout, 0) for part in x.split(LENGTHS)])


def results(whole, leaves, dout, dtype, **how):
    """Output and gradients of attention over the whole sequence."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
    out = whole(*leaves, causal=True, compute_dtype=dtype, **how).out
    return [out, *torch.autograd.grad(out, leaves, dout.to(dtype))]


def check(name, function, q, k, v, dout, whole, own, *lengths, **options):
    """Compare a ring's output and gradients with attention over the whole sequence."""
    leaves = [own(x).detach().clone().requires_grad_() for x in (q, k, v)]
    out = function(*leaves, *lengths, causal=True, **options)
    got = [out, *torch.autograd.grad(out, leaves, own(dout))]
    given = whole, (q, k, v), dout
    truth, plain = results(*given, torch.float64), results(*given, torch.bfloat16)
    variance = results(*given, torch.float64, attend=rounding_variance(torch.bfloat16))
    for part, mine, *theirs in zip(
        ("out", "dq", "dk", "dv"), got, truth, plain, variance, strict=True
    ):
        wanted, low, spread = (own(x) for x in theirs)
        assert_close(f"{name} {part}", mine, wanted, low, floor=floor_of(spread))


def main(rank: int, world: int, rendezvous: str) -> None:
    """All variants that run on a CPU."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world)
    flash_attn.install()
    import ring_flash_attn as ring

    q, k, v, dout = whole_inputs(2, 48)
    for name, layout in (("ring", "contiguous"), ("zigzag_ring", "zigzag"), ("stripe", "stripe")):
        function = getattr(ring, f"{name}_flash_attn_func")

        def own(x, layout=layout):
            return share(x, rank, world, layout, 1).contiguous()

        check(name, function, q, k, v, dout, attention_reference, own)

    q, k, v, dout = whole_inputs(sum(LENGTHS))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    for name, layout in (("ring", "contiguous"), ("zigzag_ring", "zigzag")):
        function = getattr(ring, f"{name}_flash_attn_varlen_func")

        def own(x, layout=layout):
            return packed_share(x, rank, world, layout).contiguous()

        def whole(q, k, v, **how):
            longest = max(LENGTHS)
            return attention_varlen_reference(q, k, v, offsets, offsets, longest, longest, **how)

        own_lengths = (offsets // world, max(LENGTHS) // world)
        check(f"{name} varlen", function, q, k, v, dout, whole, own, *own_lengths)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
