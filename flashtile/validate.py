"""The only place that rejects user input.

Every message names the argument, what came and what is wanted. Nothing is written before the last
check has passed. Checks that read tensor values need the host to wait for the device, so they run
only with ``FLASHTILE_CHECK=1``.
"""

from __future__ import annotations

import math
import os
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .backends.triton.splits import MAX_SPLITS, workspace_size
from .problem import (
    DIFFERENTIABLE,
    FLOAT8,
    FLOAT8_KEY_BLOCK,
    FLOAT8_QUERY_BLOCK,
    Operands,
    Options,
    batch_size,
    default_scale,
    output_dtype,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8[:1])
HALF_DTYPES = (torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)


def shape_of(x: Tensor) -> str:
    """Shape as messages print it."""
    return str(tuple(x.shape))


def tensor(name: str, x: Any) -> None:
    """Raise TypeError unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, want a torch.Tensor")


def shape(name: str, x: Tensor, wanted: tuple[int, ...], meaning: str) -> None:
    """Raise ValueError unless `x` has the shape `wanted`, which reads `meaning`."""
    if tuple(x.shape) != wanted:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want {wanted}, {meaning}")


def rank(name: str, x: Any, meaning: str) -> None:
    """Raise unless `x` is a tensor with one dimension for each name in `meaning`."""
    tensor(name, x)
    wanted = meaning.count(",") + 1
    if x.dim() != wanted:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want {wanted} dimensions ({meaning})")


def index_tensor(name: str, x: Any, like: Tensor) -> None:
    """Raise unless `x` is an int32 or int64 tensor on the device of `like`."""
    tensor(name, x)
    if x.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: got dtype {x.dtype}, want torch.int32")
    same_device(name, x, like)


def same_device(name: str, x: Tensor, like: Tensor) -> None:
    """Raise ValueError unless `x` is on the device of `like` (the queries)."""
    if x.device != like.device:
        raise ValueError(f"{name}: is on {x.device}, but q is on {like.device}; move one of them")


def qkv(
    q: Any,
    k: Any,
    v: Any,
    layout_q: str,
    layout_k: str,
    names: str = "q k v",
    takes_float8_keys: bool = False,
) -> None:
    """Ranks, dtypes, devices, heads and head dims of the three main tensors.

    `takes_float8_keys`: under queries of 16 bits keys and values may both be float8.
    """
    name_q, name_k, name_v = names.split()
    rank(name_q, q, layout_q)
    rank(name_k, k, layout_k)
    rank(name_v, v, layout_k)
    for name, x in ((name_q, q), (name_k, k), (name_v, v)):
        if x.dtype not in DTYPES:
            wanted = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise TypeError(f"{name}: got dtype {x.dtype}, want one of {wanted}")
        mixed = takes_float8_keys and x is not q and q.dtype in HALF_DTYPES
        if x.dtype != q.dtype and not (mixed and x.dtype == k.dtype == torch.float8_e4m3fn):
            also = " (or float8_e4m3fn, as both caches)" if mixed else ""
            raise TypeError(
                f"{name}: got dtype {x.dtype}, want {q.dtype}, the dtype of {name_q}{also}"
            )
        same_device(name, x, q)
        if x.shape[-1] < 1 or x.shape[-2] < 1:
            raise ValueError(
                f"{name}: got shape {shape_of(x)}, want at least one head and head dim"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{name_k}: got head dim {k.shape[-1]}, want {q.shape[-1]}, the head dim of {name_q}"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"{name_v}: got shape {shape_of(v)}, want {shape_of(k)[:-1].rsplit(',', 1)[0]}, any "
            "head "
            f"dim): all but the last dimension as {name_k}"
        )
    if q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(
            f"{name_k}: got {k.shape[-2]} heads, which do not divide the {q.shape[-2]} heads of "
            f"{name_q}"
        )


def dense(q: Any, k: Any, v: Any) -> None:
    """q (batch, seq_q, heads, head_dim); k, v (batch, seq_k, kv_heads, head_dim)."""
    qkv(q, k, v, "batch, seq_q, heads, head_dim", "batch, seq_k, kv_heads, head_dim")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: got batch {k.shape[0]}, want {q.shape[0]}, the batch of q")


def packed(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, page_table: Any) -> None:
    """q (total_q, heads, head_dim); k, v (total_k, kv_heads, head_dim), or pages of tokens."""
    keys = "total_k, kv_heads, head_dim"
    qkv(q, k, v, "total_q, heads, head_dim", PAGES if page_table is not None else keys)
    cumulative("cu_seqlens_q", cu_seqlens_q, q)
    cumulative("cu_seqlens_k", cu_seqlens_k, q)
    shape(
        "cu_seqlens_k",
        cu_seqlens_k,
        tuple(cu_seqlens_q.shape),
        "one longer than the batch, as cu_seqlens_q",
    )
    if page_table is not None:
        paged(page_table, k, cu_seqlens_q.shape[0] - 1)


PAGES = "num_pages, page_size, kv_heads, head_dim"


def cumulative(name: str, x: Any, q: Tensor) -> None:
    """Cumulative lengths: (batch + 1,) integers."""
    index_tensor(name, x, q)
    if x.dim() != 1 or x.shape[0] < 1:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want (batch + 1,), starting with 0")


def paged(page_table: Any, k: Tensor, batch: int) -> None:
    """page_table (batch, pages per sequence) of integers; page size a power of two."""
    index_tensor("page_table", page_table, k)
    if page_table.dim() != 2 or page_table.shape[0] != batch:
        raise ValueError(
            f"page_table: got shape {shape_of(page_table)}, want ({batch}, pages per sequence)"
        )
    page_size = k.shape[1]
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page size (k.shape[1]): got {page_size}, want a power of two from 1 up")


def per_sequence(name: str, x: Any, q: Tensor, batch: int) -> None:
    """(batch,) integers."""
    if x is not None:
        index_tensor(name, x, q)
        shape(name, x, (batch,), "one number for each sequence")


def length(name: str, x: Any) -> Any:
    """A non-negative length given as an integer."""
    if isinstance(x, (Tensor, bool)) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{name}: got {type(x).__name__}, want an int")
    if x < 0:
        raise ValueError(f"{name}: got {x}, want a length of at least 0")
    return x


def number(name: str, x: Any, wanted: str) -> Any:
    """A finite real number."""
    if isinstance(x, bool) or not isinstance(x, (Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: got {type(x).__name__}, want {wanted}")
    value: Any = x
    if not -math.inf < value < math.inf:  # False for NaN as well
        raise ValueError(f"{name}: got {x}, want {wanted}")
    return float(value)


def splits(num_splits: Any) -> None:
    """How many programs share a sequence's keys."""
    if length("num_splits", num_splits) > MAX_SPLITS:
        raise ValueError(f"num_splits: got {num_splits}, want 0 (chosen for you) to {MAX_SPLITS}")


def options(
    *,
    head_dim: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: Any,
    causal: bool,
    window_size: Any,
    attention_chunk: Any,
    softcap: Any,
    dropout_p: Any = 0.0,
    num_splits: Any = 0,
    deterministic: bool = False,
) -> Options:
    """The plain numbers of a call, checked and normalised."""
    if softmax_scale is None:
        softmax_scale = default_scale(head_dim)
    else:
        softmax_scale = number("softmax_scale", softmax_scale, "a finite number, or None")
    softcap = 0.0 if softcap is None else number("softcap", softcap, "a number >= 0 (0: off)")
    if softcap < 0:
        raise ValueError(f"softcap: got {softcap}, want a number >= 0 (0: off)")
    dropout_p = number("dropout_p", dropout_p, "a probability in [0, 1)")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: got {dropout_p}, want a probability in [0, 1)")
    chunk = length("attention_chunk", 0 if attention_chunk is None else attention_chunk)
    splits(num_splits)
    left, right = window(window_size)
    return Options(
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        window_left=left,
        window_right=0 if causal else right,
        attention_chunk=chunk,
        softcap=softcap,
        dropout_p=dropout_p,
        num_splits=num_splits,
        deterministic=bool(deterministic) or torch.are_deterministic_algorithms_enabled(),
    )


def window(window_size: Any) -> tuple[Any, Any]:
    """(left, right), each -1 where unbounded."""
    wanted = "a pair (left, right) of ints >= 0, with -1 or None for an unbounded side"
    if window_size is None:
        return -1, -1
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size: got {window_size!r}, want {wanted}")
    sides = []
    for side in window_size:
        if side is None:
            side = -1
        if isinstance(side, (bool, Tensor)) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"window_size: got {window_size!r}, want {wanted}")
        if side < -1:
            raise ValueError(f"window_size: got {window_size!r}, want {wanted}")
        sides.append(side)
    return sides[0], sides[1]


def extras(operands: Operands, M: int, N: int) -> None:
    """Shapes, dtypes and devices of the optional tensors; `M`, `N` are the longest lengths."""
    q, k = operands.q, operands.k
    B, Hq, Hk = batch_size(operands), q.shape[-2], k.shape[-2]
    per_sequence("seqused_q", operands.seqused_q, q, B)
    per_sequence("seqused_k", operands.seqused_k, q, B)
    _floating("bias", operands.bias, q)
    _floating("sink", operands.sink, q)
    _floating("alibi_slopes", operands.alibi_slopes, q)
    if operands.sink is not None:
        shape("sink", operands.sink, (Hq,), "one logit for each query head")
    if operands.alibi_slopes is not None:
        _alibi(operands.alibi_slopes, B, Hq)
    if operands.bias is not None:
        for size, full in zip(operands.bias.shape, (B, Hq, M, N), strict=True):
            if size not in (1, full):
                raise ValueError(
                    f"bias: got shape {shape_of(operands.bias)}, want one that broadcasts to "
                    f"(batch, heads, seq_q, seq_k) = {(B, Hq, M, N)}"
                )
    if operands.tile_kinds is not None:
        _block_mask(operands, B, Hq, M, N)
    _descales(operands, B, Hk, M, N)


def _floating(name: str, x: Any, q: Tensor) -> None:
    if x is None:
        return
    tensor(name, x)
    if not x.is_floating_point() or x.dtype in FLOAT8:
        raise TypeError(f"{name}: got dtype {x.dtype}, want a floating dtype, float16 to float64")
    same_device(name, x, q)


def _alibi(slopes: Tensor, B: int, Hq: int) -> None:
    if tuple(slopes.shape) not in ((Hq,), (B, Hq)):
        raise ValueError(
            f"alibi_slopes: got shape {shape_of(slopes)}, want ({Hq},) or ({B}, {Hq}): a slope for "
            "each query head, or for each batch and query head"
        )
    if slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "alibi_slopes: requires grad, but has no gradient; detach() it, or pass the same "
            "numbers as "
            "`bias`, which has one"
        )


def _block_mask(operands: Operands, B: int, Hq: int, M: int, N: int) -> None:
    kinds, tiles = operands.tile_kinds, operands.partial_tiles
    assert kinds is not None and tiles is not None
    same_device("block_mask", kinds, operands.q)
    batch, heads, rows, columns = kinds.shape
    BM, BN = tiles.shape[1:]
    if batch not in (1, B) or heads not in (1, Hq):
        raise ValueError(
            f"block_mask: is for batch {batch} and {heads} heads, want 1 or {B}, and 1 or {Hq} "
            "(query heads)"
        )
    if rows * BM < M or columns * BN < N:
        raise ValueError(
            f"block_mask: {rows} x {columns} tiles of {BM} x {BN} cover {rows * BM} queries and "
            f"{columns * BN} keys, want at least {M} and {N}"
        )


def _descales(operands: Operands, B: int, Hk: int, M: int, N: int) -> None:
    for name in ("q_descale", "k_descale", "v_descale"):
        x = getattr(operands, name)
        if x is None:
            continue
        _floating(name, x, operands.q)
        scaled = operands.q if name == "q_descale" else operands.k
        if scaled.dtype not in FLOAT8:
            raise ValueError(
                f"{name}: scales float8 inputs, but {name[0]} is {scaled.dtype}; multiply the "
                "inputs instead"
            )
        if x.dim() == 3 and operands.q.dtype in FLOAT8:
            _block_descale(name, x, operands, B, M, N)
        else:
            shape(name, x, (B, Hk), "a factor for each batch and key head")


def _block_descale(name: str, x: Tensor, operands: Operands, B: int, M: int, N: int) -> None:
    """A factor for each block of rows; all three tensors have them, or none."""
    of_queries = name == "q_descale"
    block = FLOAT8_QUERY_BLOCK if of_queries else FLOAT8_KEY_BLOCK
    heads, length = (operands.q.shape[-2], M) if of_queries else (operands.k.shape[-2], N)
    meaning = f"a factor for each batch, head and {block} rows"
    shape(name, x, (B, heads, -(-length // block)), meaning)
    for other in ("q_descale", "k_descale", "v_descale"):
        y = getattr(operands, other)
        if y is None or y.dim() != 3:
            raise ValueError(
                f"{other}: got {'None' if y is None else 'shape ' + shape_of(y)}, want a factor "
                f"for each block of rows as {name} has"
            )


def float8_forward_only(operands: Operands) -> None:
    """float8 inputs have no backward."""
    if operands.q.dtype in FLOAT8 and any(
        x is not None and x.requires_grad for x in (operands.bias, operands.sink)
    ):
        raise NotImplementedError("q: float8 attention has no backward; use bfloat16 to train")


def output(out: Any, operands: Operands) -> None:
    """A tensor to write the result to."""
    if out is None:
        return
    tensor("out", out)
    q = operands.q
    shape("out", out, (*q.shape[:-1], operands.v.shape[-1]), "q's shape with v's head dim")
    same_device("out", out, q)
    if out.dtype != output_dtype(q.dtype):
        raise TypeError(f"out: got dtype {out.dtype}, want {output_dtype(q.dtype)}")
    if not torch.compiler.is_compiling() and torch._debug_has_internal_overlap(out) == 1:
        raise ValueError(
            f"out: got strides {out.stride()}, want elements that do not share memory (expanded?)"
        )
    _not_recording("out", (out, *operands[:DIFFERENTIABLE]))


def workspace(operands: Operands, options: Options) -> None:
    """Memory to work in: bytes in a row, enough of them for the call."""
    given, q = operands.workspace, operands.q
    if given is None:
        return
    rank("workspace", given, "bytes")
    if given.dtype != torch.uint8:
        raise TypeError(f"workspace: got dtype {given.dtype}, want torch.uint8, bytes")
    same_device("workspace", given, q)
    _not_recording("workspace", operands[:DIFFERENTIABLE])
    if torch.compiler.is_compiling():  # which asks for neither an offset nor a GPU
        return
    if not given.is_contiguous() or given.storage_offset() % 16:
        raise ValueError(
            f"workspace: got stride {given.stride(0)} and offset {given.storage_offset()}, want "
            "contiguous bytes whose offset is a multiple of 16"
        )
    tokens, heads, value_head_dim = q.shape[:-2].numel(), q.shape[-2], operands.v.shape[-1]
    wanted = workspace_size(tokens, heads, value_head_dim, options.num_splits, q.device)
    if given.numel() < wanted:
        raise ValueError(
            f"workspace: got {given.numel()} bytes, want at least {wanted} (see workspace_size)"
        )


def _not_recording(name: str, tensors: tuple[Tensor | None, ...]) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            f"{name}: cannot be used while recording gradients; wrap the call in torch.no_grad()"
        )


def checking_values() -> bool:
    """Whether to make the checks that read tensor values and so wait for the device."""
    if torch.compiler.is_compiling():
        return False
    return os.environ.get("FLASHTILE_CHECK", "0") not in ("", "0")


def values(operands: Operands, options: Options) -> None:
    """Checks that read tensor values; only with ``FLASHTILE_CHECK=1`` in the environment."""
    if not checking_values():
        return
    limits = (
        ("q", operands.cu_seqlens_q, operands.seqused_q, operands.q, options.max_seqlen_q),
        ("k", operands.cu_seqlens_k, operands.seqused_k, operands.k, options.max_seqlen_k),
    )
    for side, cu_seqlens, used, x, longest in limits:
        if cu_seqlens is not None:
            cumulative_values(f"cu_seqlens_{side}", cu_seqlens, x.shape[0], longest, side)
        if used is not None:
            bounds = cu_seqlens.diff() if cu_seqlens is not None else torch.full_like(used, longest)
            if bool((used < 0).any()) or bool((used > bounds).any()):
                raise ValueError(
                    f"seqused_{side}: got {used.tolist()}, want between 0 and the lengths "
                    f"{bounds.tolist()}"
                )
    for name in ("q_descale", "k_descale", "v_descale"):
        x = getattr(operands, name)
        if x is not None and not bool(((x > 0) & x.isfinite()).all()):
            raise ValueError(
                f"{name}: got factors from {float(x.min())} to {float(x.max())}, want finite ones "
                "above zero"
            )
    if operands.leftpad_k is not None:
        _within("cache_leftpad", operands.leftpad_k, options.max_seqlen_k + 1)
    if operands.cache_batch_idx is not None:
        _within("cache_batch_idx", operands.cache_batch_idx, operands.k.shape[0])
    if operands.page_table is not None:
        _page_values(operands)


def _within(name: str, x: Tensor, size: int) -> None:
    if x.numel() and (int(x.min()) < 0 or int(x.max()) >= size):
        raise ValueError(
            f"{name}: got values from {int(x.min())} to {int(x.max())}, want 0 to {size - 1}"
        )


def _page_values(operands: Operands) -> None:
    table, k = operands.page_table, operands.k
    assert table is not None and operands.seqused_k is not None
    pages_used = (operands.seqused_k + k.shape[1] - 1) // k.shape[1]
    slots = torch.arange(table.shape[1], device=table.device)
    _within("page_table", table[slots < pages_used[:, None]], k.shape[0])


def cumulative_values(name: str, cu_seqlens: Tensor, total: int, longest: int, side: str) -> None:
    """The values of cumulative lengths: 0 first, no decrease, inside the tensor, none too long."""
    lengths = cu_seqlens.diff()
    if int(cu_seqlens[0]) != 0 or bool((lengths < 0).any()):
        raise ValueError(f"{name}: got {cu_seqlens.tolist()}, want 0 first and no decrease")
    if int(cu_seqlens[-1]) > total:
        raise ValueError(f"{name}: ends at {int(cu_seqlens[-1])}, but {side} has {total} tokens")
    if lengths.numel() and int(lengths.max()) > longest:
        raise ValueError(
            f"max_seqlen_{side}: got {longest}, but {name} has a sequence of {int(lengths.max())} "
            "tokens"
        )


def unpacked(name: str, x: Any, count: int, layout: str) -> tuple[Tensor, ...]:
    """The `count` tensors that stand side by side in the third dimension from the end of `x`."""
    rank(name, x, layout)
    if x.shape[-3] != count:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want ({layout})")
    return x.unbind(-3)


def one_page_table(block_table: Tensor | None, page_table: Tensor | None) -> Tensor | None:
    """The page table, whichever of its two names the caller used."""
    if block_table is not None and page_table is not None:
        raise ValueError("block_table: is another name of page_table; pass one of them")
    return page_table if block_table is None else block_table
