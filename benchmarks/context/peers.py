"""Who computes attention over ranks: each peer makes a call of this rank's part of a case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashtile as flashtile_package
from flashtile.distributed import ContextParallel, Layout

from ..measure import default_device
from .cases import ContextCase
from .together import Unsupported
from .zigzag_ring import zigzag_ring


class Ready(NamedTuple):
    """A peer, ready to run a case on this rank."""

    call: Callable[[Tensor, Tensor, Tensor], Tensor]  # this rank's shards, in `layout`'s order
    layout: Layout | None  # None for all tokens
    way: str = ""  # what flashtile chose
    around: Callable[[], AbstractContextManager[object]] = nullcontext  # each run


def flashtile(case: ContextCase, lengths: list[int]) -> Ready:
    """`ContextParallel` with the strategy that it selects."""
    return _flashtile(ContextParallel(), case, lengths)


def gather(case: ContextCase, lengths: list[int]) -> Ready:
    """Keys are gathered."""
    return _flashtile(ContextParallel(ulysses=1, stages=1), case, lengths)


def ulysses(case: ContextCase, lengths: list[int]) -> Ready:
    """Tokens are exchanged for heads."""
    return _flashtile(ContextParallel(ulysses=dist.get_world_size()), case, lengths)


def plain_ring(case: ContextCase, lengths: list[int]) -> Ready:
    """A plain zigzag ring."""
    return Ready(zigzag_ring, _zigzag(case))


def torch_cudnn(case: ContextCase, lengths: list[int]) -> Ready:
    """PyTorch's ring over the attention of cuDNN."""
    return _torch_ring(case, SDPBackend.CUDNN_ATTENTION)


def torch_flash(case: ContextCase, lengths: list[int]) -> Ready:
    """PyTorch's ring over its FlashAttention-2."""
    return _torch_ring(case, SDPBackend.FLASH_ATTENTION)


def alone(case: ContextCase, lengths: list[int]) -> Callable[..., Tensor]:
    """Attention of the whole in one process."""
    if case.variant != "packed":
        return lambda q, k, v: flashtile_package.attention(q, k, v, **case.options)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    ends = ends.cuda() if torch.cuda.is_available() else ends
    most = max(lengths)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile_package.attention_varlen(q, k, v, ends, ends, most, most, **case.options)

    return call


def _torch_ring(case: ContextCase, backend: SDPBackend) -> Ready:
    """`torch.distributed.tensor.experimental.context_parallel`, which shards in zigzag, too."""
    from torch.distributed.tensor.experimental import context_parallel

    layout = _zigzag(case)
    if not torch.cuda.is_available():
        raise Unsupported("PyTorch's context parallelism has no CPU kernels")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    groups = case.heads_q // case.heads_kv

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # It knows no grouped heads.
        k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # The context replaces this attribute of the module.
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    @contextmanager
    def around() -> Iterator[None]:
        # It wants something to shard; the shards of q, k and v are there already.
        buffer = torch.zeros(1, case.tokens * dist.get_world_size(), device="cuda")
        with (
            sdpa_kernel(backend),
            context_parallel(
                mesh, buffers=[buffer], buffer_seq_dims=[1], no_restore_buffers={buffer}
            ),
        ):
            yield

    return Ready(call, layout, around=around)


def _flashtile(parallel: ContextParallel, case: ContextCase, lengths: list[int]) -> Ready:
    if case.variant == "packed":
        ends = torch.tensor([0, *lengths]).cumsum(0)
        layout = parallel.layout(ends)
    else:
        way = "contiguous" if case.window else "auto"
        layout = parallel.layout(seq_len=lengths[0], way=way)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = parallel.attention(q, k, v, layout, **case.options)
        assert isinstance(out, Tensor)
        return out

    rows = layout.local_tokens
    device = default_device()
    dtype = getattr(torch, case.dtype)
    batch = () if case.variant == "packed" else (1,)
    q, k = (
        torch.empty(*batch, rows, heads, case.head_dim, dtype=dtype, device=device)
        for heads in (case.heads_q, case.heads_kv)
    )
    plan = parallel.explain(layout, q, k, k, **case.options)
    _, _, strategy = plan.partition("strategy: ")  # "" of versions that name it differently
    return Ready(call, layout, strategy.partition(": ")[0])


def _zigzag(case: ContextCase) -> Layout:
    """Parts r and 2 ranks - 1 - r of the sequence.

    Raises:
        Unsupported: the case is not one causal sequence.
    """
    if case.variant != "dense":
        raise Unsupported(f"one causal sequence only, not {case.variant}")
    whole = case.tokens * dist.get_world_size()
    return ContextParallel(ulysses=1, stages=1).layout(seq_len=whole, way="zigzag")


PEERS: dict[str, Callable[[ContextCase, list[int]], Ready]] = {
    "flashtile": flashtile,
    "flashtile-gather": gather,
    "flashtile-ulysses": ulysses,
    "zigzag-ring": plain_ring,
    "torch-cudnn": torch_cudnn,
    "torch-flash": torch_flash,
}
