"""The checks that reject invalid user input.

Every message names the argument, the given value and the expected one. A call writes nothing before
the last check has passed. Checks that read tensor values make the host wait for the GPU, so for
tensors on a GPU they run only with ``FLASHTILE_CHECK=1``.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from ..cache_formats import CacheFormat
from ..gpu.memory import MAX_SPLITS, workspace_size
from ..invariance_check import checks_everything
from ..masks import MAX_INTERVALS, BlockMask, Spans, Window
from ..problem import (
    DIFFERENTIABLE,
    FLOAT8,
    FLOAT8_KEY_BLOCK,
    FLOAT8_QUERY_BLOCK,
    Operands,
    Options,
    output_dtype,
)
from .layouts import Cached, Layout, Packed

_hints = logging.getLogger("flashtile.hints")

# One tensor: its type, dtype, rank, shape and device.

INDICES = (torch.int32, torch.int64)
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (int, torch.SymInt)


def shape_of(x: Tensor) -> str:
    """The shape as text for messages."""
    return str(tuple(x.shape))


def tensor(
    name: str,
    x: Any,
    *,
    dims: str = "",
    dtypes: tuple[torch.dtype, ...] = (),
    wanted: Any = None,
    like: Tensor | None = None,
    shape: tuple[int, ...] | None = None,
    meaning: str = "",
) -> None:
    """Raise unless `x` is a tensor that has a shape and strides, and all that is asked of it.

    Args:
        dims: it has one dimension for each of these names.
        dtypes: its dtype is one of these, as `wanted` says; by default the first one is wanted.
        like: it is on the device of this tensor, the queries.
        shape: it has this shape, which `meaning` explains.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, want a torch.Tensor")
    if x.is_nested:
        raise TypeError(
            f"{name}: got a nested tensor, want a plain tensor; for jagged tensors call "
            "attention_varlen(q.values(), k.values(), v.values(), q.offsets(), k.offsets(), ...), "
            "or integrations.sdpa.scaled_dot_product_attention"
        )
    if x.layout != torch.strided:
        raise TypeError(f"{name}: got layout {x.layout}, want torch.strided")
    if dims and x.dim() != dims.count(",") + 1:
        count = dims.count(",") + 1
        raise ValueError(f"{name}: got shape {shape_of(x)}, want {count} dimensions ({dims})")
    if dtypes and x.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {x.dtype}, want {wanted or dtypes[0]}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name}: got device {x.device}, want {like.device}, the device of q")
    if shape is not None and tuple(x.shape) != shape:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want {shape}, {meaning}")


def no_shared_elements(name: str, x: Tensor) -> None:
    """Raise ValueError if elements of `x`, which a call writes to, share memory, as after
    ``expand``.
    """
    if not torch.compiler.is_compiling() and torch._debug_has_internal_overlap(x) == 1:
        raise ValueError(
            f"{name}: got strides {x.stride()}, want a tensor whose elements do not share memory"
        )


def per_sequence(name: str, x: Any, q: Tensor, batch: int) -> None:
    """Check an optional tensor of (batch,) integers."""
    if x is not None:
        meaning = "one number for each sequence"
        tensor(name, x, dtypes=INDICES, like=q, shape=(batch,), meaning=meaning)


def unpacked(name: str, x: Any, count: int, layout: str) -> tuple[Tensor, ...]:
    """Split `x` along its third dimension from the end, which must have size `count`."""
    tensor(name, x, dims=layout)
    if x.shape[-3] != count:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want ({layout})")
    return x.unbind(-3)


def is_readable(x: Tensor) -> bool:
    """Whether `x` has values that the host can read now."""
    return not (torch.compiler.is_compiling() or isinstance(x, FakeTensor) or x.is_meta)


def as_python(name: str, x: Any) -> Any:
    """The values of a tensor or NumPy object as Python numbers; any other object unchanged. For a
    tensor on a GPU the host waits.
    """
    if isinstance(x, Tensor) and not is_readable(x):
        raise TypeError(
            f"{name}: got a tensor whose values cannot be read here (torch.compile, a fake or a "
            "meta tensor), want plain ints"
        )
    return x.tolist() if hasattr(x, "tolist") else x


# Plain numbers and performance hints.


def integer(name: str, x: Any) -> Any:
    """An integer, given as an int or as a tensor or NumPy object that holds one."""
    number = x if isinstance(x, INTEGERS) else as_python(name, x)
    if isinstance(number, bool) or not isinstance(number, INTEGERS):
        raise TypeError(f"{name}: got {x!r}, want an int")
    return number


def length(name: str, x: Any) -> Any:
    """Check and return a non-negative length, given as an integer."""
    if isinstance(x, (Tensor, bool)) or not isinstance(x, (int, torch.SymInt, Integral)):
        raise TypeError(f"{name}: got {type(x).__name__}, want an int")
    if x < 0:
        raise ValueError(f"{name}: got {x}, want a length of at least 0")
    return x if isinstance(x, (int, torch.SymInt)) else int(x)


def number(
    name: str, x: Any, wanted: str, least: float = -math.inf, below: float = math.inf
) -> Any:
    """Check and return a finite real number of at least `least` and below `below`."""
    if isinstance(x, bool) or not isinstance(x, (Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: got {type(x).__name__}, want {wanted}")
    try:
        value = float(x)
    except OverflowError:  # an int larger than every float
        value = math.inf
    if not -math.inf < value < math.inf:  # False for NaN as well
        raise ValueError(f"{name}: got {x}, want {wanted}")
    if not least <= value < below:
        raise ValueError(f"{name}: got {value}, want {wanted}")
    return value


def flag(name: str, x: Any) -> bool:
    """`x` as a bool: itself, 0 or 1.

    Raises:
        TypeError, ValueError: `x` is anything else. Its truth value may not be what the caller
            meant ("no" is true), and reading a tensor on a GPU makes the host wait.
    """
    if type(x) is bool:
        return x
    if isinstance(x, torch.SymBool):
        return bool(x)
    if not isinstance(x, int):
        raise TypeError(f"{name}: got {type(x).__name__}, want True or False")
    if x not in (0, 1):
        raise ValueError(f"{name}: got {x}, want True or False")
    return x == 1


def generator(x: Any, device: torch.device) -> None:
    """Check the generator from which a call on `device` draws."""
    if not isinstance(x, torch.Generator):
        raise TypeError(f"generator: got {type(x).__name__}, want a torch.Generator")
    if x.device.type != device.type:
        raise ValueError(f"generator: got one of {x.device}, want one of {device}, as q")


def splits(name: str, x: Any) -> Any:
    """Check and return the number of programs that share a sequence's keys."""
    count = length(name, x)
    if count > MAX_SPLITS:
        raise ValueError(f"{name}: got {x}, want 0 (the backend chooses) to {MAX_SPLITS}")
    return count


_PAIR = "a pair (left, right) of ints, with -1 or None for an unbounded side"


def window(window_size: Any) -> Window:
    """Check `window_size` and return its two sides, None for unbounded.

    In a `Window` only None is unbounded; -1 is an offset of one position, as in
    FlashAttention-4.
    """
    if window_size is None:
        return Window(None, None)
    is_plain = isinstance(window_size, (tuple, list))
    sides = window_size if is_plain else as_python("window_size", window_size)
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise ValueError(f"window_size: got {window_size!r}, want {_PAIR}")
    integers: list[Any] = [
        x if isinstance(x, INTEGERS) else as_python("window_size", x) for x in sides
    ]
    if any(isinstance(x, bool) or not isinstance(x, (*INTEGERS, type(None))) for x in integers):
        raise TypeError(f"window_size: got {window_size!r}, want {_PAIR}")
    if not isinstance(window_size, Window):
        integers = [None if x == -1 else x for x in integers]
    return Window(*integers)


def performance_hints(pack_gqa: Any, sm_margin: Any, scheduler_metadata: Any, q: Tensor) -> None:
    """Check the hints of FlashAttention-3 and -4 except `num_splits`, which `scalars` checks."""
    if pack_gqa is not None and not isinstance(pack_gqa, bool):
        raise TypeError(f"pack_gqa: got {type(pack_gqa).__name__}, want True, False or None")
    if isinstance(sm_margin, bool) or not isinstance(sm_margin, (int, torch.SymInt)):
        raise TypeError(f"sm_margin: got {type(sm_margin).__name__}, want an int")
    if sm_margin < 0:
        raise ValueError(f"sm_margin: got {sm_margin}, want at least 0 multiprocessors")
    if scheduler_metadata is not None:
        tensor("scheduler_metadata", scheduler_metadata, dtypes=(torch.int32,), like=q)


def ignored(owner: str, **arguments: object) -> None:
    """Name the arguments that were given, that is all but False, 0 and None, in the log
    ``flashtile.hints``. They select a kernel of flash_attn or xFormers, or what is kept for the
    backward: they change no result, and nothing reads them.

    ::

        logging.getLogger("flashtile.hints").setLevel(logging.INFO)
    """
    given = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value)
    if given:
        _hints.info("%s: ignored %s, which selects a kernel", owner, given)


# Queries, keys and values together: dense, packed or paged.

DTYPES = (*FLOATING, torch.float8_e4m3fn)
DEVICES = ("cpu", "cuda", "meta")  # meta tensors: only sizes and dtypes are computed
PAGES = "num_pages, page_size, kv_heads, head_dim"


def qkv(
    q: Any,
    k: Any,
    v: Any,
    layout_q: str,
    layout_k: str,
    names: str = "q k v",
    takes_float8_keys: bool = False,
) -> None:
    """Check ranks, dtypes, devices, heads and head dims of the three main tensors.

    `takes_float8_keys`: keys and values may both be float8 if queries are 16-bit.
    """
    name_q, name_k, name_v = names.split()
    tensor(name_q, q, dims=layout_q)
    tensor(name_k, k, dims=layout_k)
    tensor(name_v, v, dims=layout_k)
    if q.device.type not in DEVICES:
        raise NotImplementedError(f"{name_q}: is on {q.device}, want a cpu or cuda device")
    for name, x in ((name_q, q), (name_k, k), (name_v, v)):
        if x.dtype not in DTYPES:
            wanted = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise TypeError(f"{name}: got dtype {x.dtype}, want one of {wanted}")
        mixed = takes_float8_keys and x is not q and q.dtype in (torch.float16, torch.bfloat16)
        if x.dtype != q.dtype and not (mixed and x.dtype == torch.float8_e4m3fn):
            also = " (or float8_e4m3fn for both caches)" if mixed else ""
            raise TypeError(
                f"{name}: got dtype {x.dtype}, want {q.dtype}, the dtype of {name_q}{also}"
            )
        tensor(name, x, like=q)
        if x.shape[-1] < 1 or x.shape[-2] < 1:
            raise ValueError(
                f"{name}: got shape {shape_of(x)}, want at least one head and head dim"
            )
    if v.dtype != k.dtype:
        raise TypeError(
            f"{name_k}, {name_v}: got dtypes {k.dtype} and {v.dtype}, want both {q.dtype} or both "
            "float8_e4m3fn"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{name_k}: got head dim {k.shape[-1]}, want {q.shape[-1]}, the head dim of {name_q}"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"{name_v}: got shape {shape_of(v)}, want {shape_of(k)[:-1].rsplit(',', 1)[0]}, any "
            f"head dim): the shape of {name_k} except for the last dimension"
        )
    if q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(
            f"{name_k}: got {k.shape[-2]} heads, want a divisor of {q.shape[-2]}, the heads of "
            f"{name_q}"
        )


def dense(q: Any, k: Any, v: Any) -> None:
    """Check q (batch, seq_q, heads, head_dim) and k, v (batch, seq_k, kv_heads, head_dim)."""
    qkv(q, k, v, "batch, seq_q, heads, head_dim", "batch, seq_k, kv_heads, head_dim")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: got batch {k.shape[0]}, want {q.shape[0]}, the batch of q")


def packed(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, page_table: Any) -> None:
    """Check q (total_q, heads, head_dim) and k, v (total_k, kv_heads, head_dim), or pages."""
    keys = "total_k, kv_heads, head_dim"
    qkv(q, k, v, "total_q, heads, head_dim", PAGES if page_table is not None else keys)
    cumulative("cu_seqlens_q", cu_seqlens_q, q)
    cumulative("cu_seqlens_k", cu_seqlens_k, q)
    tensor(
        "cu_seqlens_k",
        cu_seqlens_k,
        shape=tuple(cu_seqlens_q.shape),
        meaning="one longer than the batch, like cu_seqlens_q",
    )
    if page_table is not None:
        paged(page_table, k, cu_seqlens_q.shape[0] - 1, has_rows=False)


def cumulative(name: str, x: Any, q: Tensor) -> None:
    """Check cumulative lengths: (batch + 1,) integers."""
    tensor(name, x, dtypes=INDICES, like=q)
    if x.dim() != 1 or x.shape[0] < 1:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want (batch + 1,), starting with 0")


def paged(page_table: Any, k: Tensor, batch: int, has_rows: bool) -> None:
    """Check page_table, (batch, pages per sequence) integers, and that pages have tokens. With
    `has_rows` the table may have any number of rows, because each sequence has a row index.
    """
    tensor("page_table", page_table, dtypes=INDICES, like=k)
    rows = "rows" if has_rows else batch
    enough = page_table.dim() == 2 and (page_table.shape[0] > 0 or batch == 0)
    if not enough or (not has_rows and page_table.shape[0] != batch):
        raise ValueError(
            f"page_table: got shape {shape_of(page_table)}, want ({rows}, pages per sequence)"
        )
    if k.shape[1] < 1:
        raise ValueError(f"page size (k.shape[1]): got {k.shape[1]}, want at least 1")


def one_page_table(block_table: Tensor | None, page_table: Tensor | None) -> Tensor | None:
    """The page table, which the caller may pass under either of two names."""
    if block_table is not None and page_table is not None:
        raise ValueError("block_table: got it and page_table, another name of it; want only one")
    return page_table if block_table is None else block_table


def padded(
    q: Any, k: Any, v: Any, qv: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, page_table: Any
) -> int:
    """The batch size of a packed call whose queries or keys have no cumulative lengths."""
    batches = {}
    if cu_seqlens_q is None:
        _padded_side("q", q, "batch, seq_q, heads, head_dim")
        if qv is not None:
            tensor("qv", qv)
            tensor(
                "qv",
                qv,
                shape=(*q.shape[:-1], qv.shape[-1]),
                meaning="the shape of q except for the head dim",
            )
        batches["q"] = q.shape[0]
    else:
        tensor("q", q, dims="total_q, heads, head_dim")
        cumulative("cu_seqlens_q", cu_seqlens_q, q)
        batches["cu_seqlens_q"] = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is not None:
        cumulative("cu_seqlens_k", cu_seqlens_k, q)
        batches["cu_seqlens_k"] = cu_seqlens_k.shape[0] - 1
    elif page_table is None:
        _padded_side("k", k, "batch, seq_k, kv_heads, head_dim")
        tensor("v", v, dims="batch, seq_k, kv_heads, value_head_dim")
        tensor(
            "v",
            v,
            shape=(*k.shape[:-1], v.shape[-1]),
            meaning="the shape of k except for the head dim",
        )
        batches["k"] = k.shape[0]
    else:
        tensor("k", k, dims=PAGES)
        tensor("page_table", page_table, dims="batch, pages per sequence")
        batches["page_table"] = page_table.shape[0]
    (first, batch), (second, other) = batches.items()
    if batch != other:
        raise ValueError(f"{second}: got a batch of {other}, want {batch}, the batch of {first}")
    return batch


def _padded_side(name: str, x: Any, meaning: str) -> None:
    """Raise unless `x` is padded, with the dimensions that `meaning` lists."""
    if isinstance(x, Tensor) and x.dim() == 3:
        raise ValueError(
            f"cu_seqlens_{name}: got None with {name} of shape {shape_of(x)}, want cumulative "
            f"lengths (batch + 1,), or {name} padded ({meaning})"
        )
    tensor(name, x, dims=meaning)


# A key-value cache: queries, cache, new tokens and rotary tables.


def cache_format(given: Any) -> tuple[CacheFormat, CacheFormat]:
    """The formats of keys and values, from one for both or one for each."""
    formats = given if isinstance(given, (tuple, list)) else (given, given)
    if len(formats) != 2 or not all(isinstance(x, CacheFormat) for x in formats):
        raise TypeError(
            f"cache_format: got {given!r}, want a flashtile.CacheFormat, or one for the keys and "
            "one for the values"
        )
    return formats[0], formats[1]


def cached(q: Any, k_cache: Any, v_cache: Any, layout: Cached) -> None:
    """Check that queries, cache, new tokens and rotary tables fit together."""
    caches = k_cache, v_cache
    if layout.formats is not None:
        k_cache, v_cache = _unpacked_caches(q, caches, layout.formats)
    for name, x in (("k", layout.k_new), ("v", layout.v_new)):
        if x is not None:
            tensor(name, x)
    if (layout.k_new is None) != (layout.v_new is None):
        missing, present = ("k", "v") if layout.k_new is None else ("v", "k")
        raise ValueError(f"{missing}: got None with {present} given, want both or neither")
    is_packed = layout.cu_seqlens_q is not None
    of_queries = "total_q, heads, head_dim" if is_packed else "batch, seq_q, heads, head_dim"
    of_keys = "cache_rows, capacity, kv_heads, head_dim" if layout.page_table is None else PAGES
    names = "q k_cache v_cache"
    qkv(q, k_cache, v_cache, of_queries, of_keys, names, takes_float8_keys=True)
    if is_packed:
        cumulative("cu_seqlens_q", layout.cu_seqlens_q, q)
        length("max_seqlen_q", layout.max_seqlen_q)
    batch, rows = layout.batch(q), layout.cache_batch_idx
    per_sequence("cache_batch_idx", rows, q, batch)
    per_sequence("cache_leftpad", layout.cache_leftpad, q, batch)
    if layout.page_table is not None:
        paged(layout.page_table, k_cache, batch, has_rows=rows is not None)
    elif rows is not None and k_cache.shape[0] == 0 < batch:
        raise ValueError("k_cache: got no rows, want the rows in cache_batch_idx")
    elif rows is None and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache: got {k_cache.shape[0]} rows, want {batch}, the batch of q; or pass "
            "cache_batch_idx to choose rows"
        )
    lengths = layout.cache_seqlens
    if lengths is None and layout.k_new is not None:
        raise ValueError(
            "cache_seqlens: got None, want the position to append k and v at, an int or "
            "(batch,) int32"
        )
    if isinstance(lengths, Tensor) and lengths.dim() > 0:
        per_sequence("cache_seqlens", lengths, k_cache, batch)
    elif isinstance(lengths, Tensor):
        tensor("cache_seqlens", lengths, dtypes=INDICES, like=k_cache)
    length_on_host(k_cache, layout)
    if layout.k_new is not None:
        _new_tokens(q, k_cache, v_cache, layout, batch)
        for name, x in zip(("k_cache", "v_cache"), caches, strict=True):
            no_shared_elements(name, x)
    flag("rotary_interleaved", layout.rotary_interleaved)
    if layout.rotary_cos is not None or layout.rotary_sin is not None:
        _rotary(q, layout, batch)


def _unpacked_caches(
    q: Any, caches: tuple[Any, Any], formats: tuple[CacheFormat, CacheFormat]
) -> list[Tensor]:
    """Stand-ins, without memory, for the unpacked caches, after a check of the packed ones."""
    tensor("q", q, dtypes=FLOATING, wanted="a floating dtype of 16 bits or more")
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise NotImplementedError(
            "cache_format: got a transform of torch.func or dual numbers, want a call without: it "
            "has no derivative"
        )
    if formats[0].head_dim not in (None, q.shape[-1]):
        raise ValueError(
            f"cache_format: got a format of {formats[0].head_dim} elements for the keys, want "
            f"{q.shape[-1]}, the head dim of q"
        )
    found = []
    for name, x, cache_format in zip(("k_cache", "v_cache"), caches, formats, strict=True):
        size, head_dim = cache_format.bytes_per_row, cache_format.head_dim or q.shape[-1]
        cache_format.check_reads(head_dim)
        wanted = "torch.uint8, the bytes of a cache_format"
        tensor(name, x, dtypes=(torch.uint8,), wanted=wanted, like=q)
        if x.shape[-1:] != (size,):
            raise ValueError(f"{name}: got shape {shape_of(x)}, want (..., {size}), bytes of a row")
        found.append(q.new_empty(()).expand(*x.shape[:-1], head_dim))
    return found


def length_on_host(k_cache: Tensor, layout: Cached) -> None:
    """Check `cache_seqlens` if it is a number: it must leave room for the new tokens."""
    lengths, new = layout.cache_seqlens, layout.k_new
    if lengths is None or isinstance(lengths, Tensor):
        return
    count, capacity = length("cache_seqlens", lengths), layout.capacity(k_cache)
    is_dense = new is not None and layout.cu_seqlens_k_new is None and new.dim() == 4
    added = new.shape[1] if new is not None and is_dense else 0
    if count + added > capacity:
        raise ValueError(
            f"cache_seqlens: got {count} and {added} new tokens, want at most {capacity} "
            "together, the capacity of the cache"
        )


def _new_tokens(q: Tensor, k_cache: Tensor, v_cache: Tensor, layout: Cached, batch: int) -> None:
    k, v, cu_seqlens = layout.k_new, layout.v_new, layout.cu_seqlens_k_new
    packed = cu_seqlens is not None
    dimensions = "total_new, kv_heads, head_dim" if packed else "batch, seq_new, kv_heads, head_dim"
    for name, x, row in (("k", k, k_cache), ("v", v, v_cache)):
        tensor(name, x, dims=dimensions)
        assert x is not None
        if x.shape[-2:] != row.shape[-2:]:
            raise ValueError(
                f"{name}: got (heads, head_dim) {tuple(x.shape[-2:])}, want "
                f"{tuple(row.shape[-2:])}, as in {name}_cache"
            )
        # This is also the dtype of the cache, unless that is float8.
        tensor(name, x, dtypes=(q.dtype,), wanted=f"{q.dtype}, the dtype of q", like=q)
    assert k is not None and v is not None
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"v: got shape {shape_of(v)}, want as many tokens as k, which has shape {shape_of(k)}"
        )
    if cu_seqlens is not None:
        cumulative("cu_seqlens_k_new", cu_seqlens, q)
        tensor(
            "cu_seqlens_k_new", cu_seqlens, shape=(batch + 1,), meaning="one longer than the batch"
        )
    elif k.shape[0] != batch:
        raise ValueError(f"k: got batch {k.shape[0]}, want {batch}, the batch of q")


def _rotary(q: Tensor, layout: Cached, batch: int) -> None:
    """Check that the rotary tables fit the queries, and that there are new tokens to rotate."""
    cos, sin = layout.rotary_cos, layout.rotary_sin
    if layout.k_new is None:
        raise ValueError(
            "rotary_cos: got a table without new tokens to rotate, want k and v, the new keys and "
            "values"
        )
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        dtypes = (*FLOATING, *FLOAT8)
        dims, wanted = "positions, rotary_dim / 2", "a floating dtype"
        tensor(name, x, dims=dims, dtypes=dtypes, wanted=wanted, like=q)
    assert cos is not None and sin is not None
    tensor("rotary_sin", sin, shape=tuple(cos.shape), meaning="the shape of rotary_cos")
    if cos.shape[0] < 1 or 2 * cos.shape[1] > q.shape[-1]:
        raise ValueError(
            f"rotary_cos: got shape {shape_of(cos)}, want at least one position and at most "
            f"head_dim / 2 = {q.shape[-1] // 2} columns"
        )
    per_sequence("rotary_seqlens", layout.rotary_seqlens, q, batch)


# Optional tensors: all except queries, keys and values.

_FLOATING = "a floating dtype, float16 to float64"
DESCALES = ("q_descale", "k_descale", "v_descale")


# For each optional tensor of floating numbers: whether a shape fits batch and heads, and the shape.
_SHAPES: dict[str, tuple[Callable[[tuple[int, ...], int, int], bool], str]] = {
    "sink": (
        lambda shape, _, heads: shape == (heads,),
        "({heads},), one logit for each query head",
    ),
    "alibi_slopes": (
        lambda shape, batch, heads: shape in ((heads,), (batch, heads)),
        "({heads},) or ({batch}, {heads}): a slope for each query head, or for each batch and "
        "query head",
    ),
    "relative_bias": (
        lambda shape, _, heads: len(shape) == 2 and shape[0] == heads and shape[1] % 2 == 1,
        "({heads}, 2 R + 1): for each query head, a number for each distance from -R to R",
    ),
}


def optional_tensors(operands: Operands, B: int, M: int, N: int) -> None:
    """Check shapes, dtypes and devices of the optional tensors; `M`, `N`: the longest lengths."""
    q, k = operands.q, operands.k
    Hq, Hk = q.shape[-2], k.shape[-2]
    per_sequence("seqused_q", operands.seqused_q, q, B)
    per_sequence("seqused_k", operands.seqused_k, q, B)
    for name, (fits, wanted) in _SHAPES.items():
        x = getattr(operands, name)
        if x is None:
            continue
        tensor(name, x, dtypes=FLOATING, wanted=_FLOATING, like=q)
        if not fits(tuple(x.shape), B, Hq):
            wanted = wanted.format(batch=B, heads=Hq)
            raise ValueError(f"{name}: got shape {shape_of(x)}, want {wanted}")
    if operands.bias is not None:
        broadcastable("bias", operands.bias, q, (B, Hq, M, N))
    if operands.tile_kinds is not None:
        block_mask_kinds(operands.tile_kinds, q, B)
    for name in DESCALES:
        x = getattr(operands, name)
        if x is None:
            continue
        tensor(name, x, dtypes=FLOATING, wanted=_FLOATING, like=q)
        scaled = q if name == "q_descale" else k
        if scaled.dtype not in FLOAT8:
            raise ValueError(
                f"{name}: scales float8 inputs, but {name[0]} is {scaled.dtype}; multiply the "
                "inputs instead"
            )
        if x.dim() == 3 and q.dtype in FLOAT8:
            _block_descale(name, x, operands, B, M, N)
        else:
            tensor(name, x, shape=(B, Hk), meaning="a scale for each batch and key head")
    records = q.dtype in FLOAT8 and torch.is_grad_enabled()
    if records and any(x is not None and x.requires_grad for x in operands[3:DIFFERENTIABLE]):
        raise NotImplementedError("q: float8 attention has no backward; use bfloat16 to train")


def broadcasts_to(sizes: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether each size is 1 or the wanted one. While `torch.compile` traces, `size in (1, n)` is
    False for a constant size that equals the symbol `n`: it does not look at symbols.
    """
    return all(size == 1 or size == n for size, n in zip(sizes, wanted, strict=True))


def broadcastable(
    name: str,
    x: Any,
    q: Tensor,
    sizes: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] = FLOATING,
    wanted: str = _FLOATING,
) -> None:
    """Check a tensor that broadcasts to `sizes`, (batch, heads, seq_q, seq_k)."""
    tensor(name, x, dtypes=dtypes, wanted=wanted, like=q)
    aligned = sizes[max(0, len(sizes) - x.dim()) :]
    if x.dim() > 4 or not broadcasts_to(x.shape, aligned):
        raise ValueError(
            f"{name}: got shape {shape_of(x)}, want one that broadcasts to (batch, heads, seq_q, "
            f"seq_k) = {sizes}"
        )


def attn_mask(x: Any, q: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Check a bool or floating mask that broadcasts to `sizes`; return it with four dimensions."""
    wanted = "torch.bool (True: the query sees the key) or a floating dtype (added to the scores)"
    broadcastable("attn_mask", x, q, sizes, (torch.bool, *FLOATING), wanted)
    return x[(None,) * (4 - x.dim())]


def key_padding_mask(x: Any, q: Tensor, sizes: tuple[int, int]) -> None:
    """Check a bool tensor (batch, seq_k)."""
    wanted = "torch.bool, True for the keys that are not padding"
    tensor(
        "key_padding_mask",
        x,
        dtypes=(torch.bool,),
        wanted=wanted,
        like=q,
        shape=sizes,
        meaning="(batch, seq_k)",
    )


def folded_qv(qv: Any, q: Tensor, v: Tensor) -> None:
    """Check that qv has the shape of q with the head dim of v."""
    tensor("qv", qv)
    if v.dtype == torch.uint8:
        raise NotImplementedError(
            "qv: cannot be combined with cache_format; want keys that hold the values, too"
        )
    if q.dtype in FLOAT8 or v.dtype in FLOAT8:
        raise NotImplementedError(
            "qv: cannot be combined with float8, whose keys and values have separate scales; "
            "convert q, k, v and qv to bfloat16"
        )
    tensor(
        "qv",
        qv,
        dtypes=(q.dtype,),
        wanted=f"{q.dtype}, the dtype of q",
        like=q,
        shape=(*q.shape[:-1], v.shape[-1]),
        meaning="q's shape with v's head dim",
    )


def block_mask_kinds(kinds: Tensor, q: Tensor, B: int) -> None:
    """Check the kinds of tiles, (batch or 1, heads or 1, ...), of a mask for `B` sequences of `q`
    (..., heads, head_dim)."""
    Hq = q.shape[-2]
    tensor("block_mask", kinds, like=q)
    batch, heads = kinds.shape[:2]
    if not broadcasts_to((batch, heads), (B, Hq)):
        raise ValueError(
            f"block_mask: got a mask for batch {batch} and {heads} heads, want batch 1 or {B}, and "
            f"1 or {Hq} (query) heads"
        )


def block_mask_lengths(block_mask: BlockMask, M: int, N: int) -> None:
    """Check that a block mask covers at least `M` queries and `N` keys."""
    queries, keys = block_mask.lengths
    if queries < M or keys < N:
        raise ValueError(
            f"block_mask: got a mask for {queries} queries and {keys} keys, want at least {M} and "
            f"{N}"
        )


def flex_mask(block_mask: Any) -> None:
    """Check that `block_mask` is a FlexAttention `BlockMask`, and that it can be converted now."""
    if not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(
            f"block_mask: got {type(block_mask).__name__}, want flashtile.BlockMask or "
            "FlexAttention's BlockMask"
        )
    if torch.compiler.is_compiling():
        raise TypeError(
            "block_mask: got a FlexAttention BlockMask under torch.compile, which cannot convert "
            "it; call BlockMask.from_flex(...) outside of torch.compile and pass the result"
        )


def flex_mask_lengths(block_mask: Any, M: int, N: int) -> None:
    """Check that a FlexAttention `BlockMask` is for exactly `M` queries and `N` keys.

    Its function may count from the last key, so the upper left corner of the mask can be wrong for
    a shorter call.
    """
    lengths = getattr(block_mask, "seq_lengths", (M, N))
    if lengths[0] != M or lengths[1] != N:
        raise ValueError(
            f"block_mask: got a mask for {lengths[0]} queries and {lengths[1]} keys, want {M} and "
            f"{N}; for its upper left corner pass BlockMask.from_flex(block_mask)"
        )


def _block_descale(name: str, x: Tensor, operands: Operands, B: int, M: int, N: int) -> None:
    """Check a per-block scale; either all three tensors have per-block scales, or none."""
    of_queries = name == "q_descale"
    block = FLOAT8_QUERY_BLOCK if of_queries else FLOAT8_KEY_BLOCK
    heads, length = (operands.q.shape[-2], M) if of_queries else (operands.k.shape[-2], N)
    meaning = f"a scale for each batch, head and {block} rows"
    tensor(name, x, shape=(B, heads, -(-length // block)), meaning=meaning)
    if operands.leftpad_k is not None:
        raise ValueError(
            f"{name}: got per-block scales with a left pad, which shifts the blocks; want a scale "
            "for each batch and key head"
        )
    for other in DESCALES:
        y = getattr(operands, other)
        if y is None or y.dim() != 3:
            raise ValueError(
                f"{other}: got {'None' if y is None else 'shape ' + shape_of(y)}, want per-block "
                f"scales because {name} has them"
            )


def key_list(
    name: str, x: Any, q: Tensor, dims: str, sizes: tuple[tuple[int, ...] | None, ...]
) -> None:
    """Check lists of keys, or of blocks of them.

    Args:
        sizes: what each of the first three sizes of `x` may be; None for anything.
    """
    tensor(name, x, dims=dims, dtypes=(torch.int32,), like=q)
    pairs = list(zip(x.shape, sizes, strict=False))
    if any(allowed is not None and all(size != n for n in allowed) for size, allowed in pairs):
        texts = ("any" if s is None else " or ".join(map(str, dict.fromkeys(s))) for s in sizes)
        raise ValueError(
            f"{name}: got shape {shape_of(x)}, want ({', '.join(texts)}, any): ({dims})"
        )


def number_of_lists(name: str, x: Tensor, count: int) -> None:
    """Check that packed sequences have `count` lists in all."""
    if x.shape[2] != count:
        raise ValueError(
            f"{name}: got {x.shape[2]} lists, want {count}, one for each block of each sequence"
        )


def key_list_values(name: str, x: Tensor, size: int) -> None:
    """Check that lists of indices below `size`, -1 for none, have no index twice."""
    if x.numel() == 0:
        return
    if int(x.min()) < -1 or int(x.max()) >= size:
        raise ValueError(
            f"{name}: got values from {int(x.min())} to {int(x.max())}, want -1 (none) to "
            f"{size - 1}"
        )
    sorted_lists = x.sort(-1).values
    twice = (sorted_lists.diff() == 0) & (sorted_lists[..., 1:] >= 0)
    if bool(twice.any()):
        index = int(sorted_lists[..., 1:][twice][0])
        raise ValueError(f"{name}: got {index} twice in one list, want each index once")


# Masks of other kinds, and the arguments that take them.
_ADVICE = {
    BlockMask: "; pass a BlockMask as block_mask",
    Tensor: "; pass a dense mask as attn_mask, or as BlockMask.from_dense(...) in block_mask",
}


def spans(mask: Any, q: Tensor) -> None:
    """Check a mask for queries (batch, seq_q, heads, head_dim) or (total_q, heads, head_dim)."""
    if not isinstance(mask, Spans):
        advice = _ADVICE.get(type(mask), "")
        raise TypeError(f"mask: got {type(mask).__name__}, want flashtile.Spans{advice}")
    is_packed = q.dim() == 3
    batch, rows, heads = 1 if is_packed else q.shape[0], q.shape[-3], q.shape[-2]
    for name, x in zip(Spans._fields, mask, strict=True):
        tensor(f"mask.{name}", x, dtypes=(torch.int32,), like=q)
        if (
            x.dim() != 4
            or not broadcasts_to(x.shape[:2], (batch, heads))
            or x.shape[2] != rows
            or not 1 <= x.shape[3] <= MAX_INTERVALS
        ):
            first = "1" if is_packed else f"1 or {batch}"
            names = "1, heads or 1, total_q" if is_packed else "batch or 1, heads or 1, seq_q"
            raise ValueError(
                f"mask.{name}: got shape {shape_of(x)}, want ({first}, 1 or {heads}, {rows}, 1 to "
                f"{MAX_INTERVALS}): ({names}, intervals)"
            )
    if mask.starts.shape != mask.stops.shape:
        raise ValueError(
            f"mask: got starts of shape {shape_of(mask.starts)} and stops of shape "
            f"{shape_of(mask.stops)}, want the same shape"
        )


# The tensors that a call writes to, and the values of tensors.


def memory_and_values(
    layout: Layout, operands: Operands, options: Options, out: Tensor | None, used: Tensor | None
) -> None:
    """The checks that every call must pass, even if an equal call has passed them.

    Args:
        out: the tensor to write the result to, if the caller gives one.
        used: the lengths of keys that the caller gives.
    """
    if out is not None:
        output(out, operands, options)
    if operands.workspace is not None:
        workspace(operands.workspace, operands, options)
    # Only the tensors of a cached layout are not all operands.
    tensors = (*operands, *layout) if isinstance(layout, Cached) else operands
    if not checking_values(tensors):
        return
    if isinstance(layout, Packed) and layout.page_table is not None:
        page_lengths(layout, operands.k, used)
    if isinstance(layout, Cached):
        cache_values(layout, operands, options)
        # Only left pads and pages are compared with the lengths after the append.
        has_more = layout.cache_leftpad is not None or layout.page_table is not None
        if has_more and layout.k_new is not None and operands.seqused_k is not None:
            operands = operands._replace(seqused_k=operands.seqused_k + layout.added)
    values(operands, options)


def output(out: Any, operands: Operands, options: Options) -> None:
    """Check the tensor to write the result to."""
    q = operands.q
    tensor(
        "out",
        out,
        shape=(*q.shape[:-1], options.value_head_dim or operands.v.shape[-1]),
        meaning="q's shape with v's head dim",
    )
    tensor("out", out, dtypes=(output_dtype(q.dtype),), like=q)
    no_shared_elements("out", out)
    _not_recording("out", (out, *operands[:DIFFERENTIABLE]))


def workspace(buffer: Any, operands: Operands, options: Options) -> None:
    """Check that a workspace consists of contiguous bytes and is large enough for the call."""
    q = operands.q
    tensor("workspace", buffer, dims="bytes", dtypes=(torch.uint8,), like=q)
    _not_recording("workspace", operands[:DIFFERENTIABLE])
    if torch.compiler.is_compiling():  # a tracer knows neither the offset nor the GPU
        return
    if not buffer.is_contiguous() or buffer.storage_offset() % 16:
        raise ValueError(
            f"workspace: got stride {buffer.stride(0)} and offset {buffer.storage_offset()}, want "
            "contiguous bytes with an offset that is a multiple of 16"
        )
    tokens, heads = q.shape[:-2].numel(), q.shape[-2]
    value_head_dim = options.value_head_dim or operands.v.shape[-1]
    needed = workspace_size(tokens, heads, value_head_dim, options.num_splits, q.device)
    if buffer.numel() < needed:
        raise ValueError(
            f"workspace: got {buffer.numel()} bytes, want at least {needed} (see workspace_size)"
        )


def _not_recording(name: str, tensors: tuple[Tensor | None, ...]) -> None:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError(
            f"{name}: cannot be used while recording gradients; wrap the call in torch.no_grad()"
        )


# Values of tensors, for which the host waits for the GPU.

_PLAIN = (Tensor, torch.nn.Parameter)


def longest(name: str, length: Any, name_of_starts: str, cu_seqlens: Any, q: Any) -> Any:
    """The longest length: as given, or read from cumulative lengths, which waits for the GPU."""
    if type(length) is int:
        return length
    if length is not None:
        return integer(name, length)
    tensor("q", q)
    cumulative(name_of_starts, cu_seqlens, q)
    if not is_readable(cu_seqlens):
        raise TypeError(
            f"{name}: got None, want an int because {name_of_starts} cannot be read "
            "(torch.compile, fake or meta tensors)"
        )
    return max(cu_seqlens.diff().tolist(), default=0)


def checking_values(arguments: Iterable[Any]) -> bool:
    """Whether to check the values of the tensors among `arguments`.

    ``FLASHTILE_CHECK=1`` enables the checks everywhere, and ``FLASHTILE_CHECK=0`` disables them. By
    default, and while a CUDA graph records, they run only for CPU tensors, for which nothing waits.
    They never run if there are no values: under a tracer, on fake and meta tensors, in a transform
    of torch.func.
    """
    if torch.compiler.is_compiling():
        return False
    setting = os.environ.get("FLASHTILE_CHECK")
    if setting == "0" or torch._C._are_functorch_transforms_active():
        return False
    if torch._C._len_torch_dispatch_stack() > 0 or torch.jit.is_tracing():
        return False
    devices = ("cpu", "cuda") if setting and checks_everything() else ("cpu",)
    tensors = (x for x in arguments if isinstance(x, Tensor))  # on a GPU the first one is enough
    return all(type(x) in _PLAIN and x.device.type in devices for x in tensors)


def values(operands: Operands, options: Options) -> None:
    """Check that lengths, rows and pages stay inside their tensors, and that scales are valid; see
    `checking_values`.
    """
    limits = (
        ("q", operands.cu_seqlens_q, operands.seqused_q, operands.q, options.max_seqlen_q),
        ("k", operands.cu_seqlens_k, operands.seqused_k, operands.k, options.max_seqlen_k),
    )
    for side, cu_seqlens, used, x, longest in limits:
        if cu_seqlens is not None:
            packed_lengths(side, cu_seqlens, used, x.shape[0], longest)
        elif used is not None:
            used_lengths(f"seqused_{side}", used, [longest] * used.shape[0])
    for name in DESCALES:
        x = getattr(operands, name)
        if x is not None and not bool(((x > 0) & x.isfinite()).all()):
            raise ValueError(
                f"{name}: got scales from {float(x.min())} to {float(x.max())}, want finite scales "
                "above zero"
            )
    if operands.cache_batch_idx is not None:
        within("cache_batch_idx", operands.cache_batch_idx, operands.k.shape[0])
    table, k, used = operands.page_table, operands.k, operands.seqused_k
    if operands.leftpad_k is not None:
        if used is None:
            assert operands.cu_seqlens_k is not None
            used = operands.cu_seqlens_k.diff()
        pads, lengths = operands.leftpad_k.tolist(), used.tolist()
        if any(not 0 <= pad <= n for pad, n in zip(pads, lengths, strict=True)):
            raise ValueError(
                f"cache_leftpad (leftpad_k): got {pads}, want between 0 and the lengths {lengths}"
            )
    if table is not None:
        assert used is not None
        pages_used = (used + k.shape[1] - 1) // k.shape[1]
        slots = torch.arange(table.shape[1], device=table.device)
        within("page_table (block_table)", table[slots < pages_used[:, None]], k.shape[0])


def within(name: str, x: Tensor, size: int) -> None:
    """Check that indices of rows or pages are from 0 to `size` - 1."""
    if x.numel() and (int(x.min()) < 0 or int(x.max()) >= size):
        raise ValueError(
            f"{name}: got values from {int(x.min())} to {int(x.max())}, want 0 to {size - 1}"
        )


def page_lengths(layout: Packed, k: Tensor, used: Tensor | None) -> None:
    """Check that the pages have room for the keys of each sequence."""
    assert layout.page_table is not None
    counts = packed_lengths("k", layout.cu_seqlens_k, used, None, layout.max_seqlen_k)
    name = "cu_seqlens_k" if used is None else "seqused_k"
    lengths_in_pages(name, counts, layout.page_table, k.shape[1])


def lengths_in_pages(name: str, lengths: list[int], page_table: Tensor, page_size: int) -> None:
    """Check that each row of the page table has room for the length of its sequence."""
    capacity = page_table.shape[1] * page_size
    if max(lengths, default=0) > capacity:
        raise RuntimeError(
            f"page_table (block_table): got lengths {lengths} in {name}, want at most {capacity} "
            f"in {page_table.shape[1]} pages of {page_size}"
        )


def packed_lengths(
    side: str, cu_seqlens: Tensor, used: Tensor | None, total: int | None, longest: int
) -> list[int]:
    """Check and return the lengths of all sequences, or the `used` lengths if given.

    Args:
        side: "q" for queries or "k" for keys.
        total: number of tokens in the packed tensor; None for pages.
        longest: `max_seqlen` of the side, which no length may exceed.
    """
    name = f"cu_seqlens_{side}"
    lengths = cumulative_values(name, cu_seqlens, total, side)
    if used is not None:
        name = f"seqused_{side}"
        lengths = used_lengths(name, used, lengths)
    if max(lengths, default=0) > longest:
        raise ValueError(
            f"max_seqlen_{side}: got {longest}, want at least {max(lengths)}, the longest sequence "
            f"of {name}"
        )
    return lengths


def used_lengths(name: str, used: Tensor, bounds: list[int]) -> list[int]:
    """The used lengths, after a check that each is between 0 and its bound."""
    lengths: list[int] = used.tolist()
    if any(not 0 <= n <= most for n, most in zip(lengths, bounds, strict=True)):
        raise ValueError(f"{name}: got {lengths}, want between 0 and the lengths {bounds}")
    return lengths


def cumulative_values(name: str, cu_seqlens: Tensor, total: int | None, side: str) -> list[int]:
    """The lengths, after a check that `cu_seqlens` starts with 0, never decreases, and ends inside
    the tensor.
    """
    starts = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(starts)]
    if starts[0] != 0 or min(lengths, default=0) < 0:
        raise ValueError(
            f"{name}: got {starts}, want cumulative lengths that start with 0 and never decrease"
        )
    if total is not None and starts[-1] > total:
        raise ValueError(
            f"{name}: got {starts[-1]} at the end, want at most {total}, the tokens of {side}"
        )
    return lengths


def cache_values(layout: Cached, operands: Operands, options: Options) -> None:
    """Check the values of rows, lengths and positions; see `checks.checking_values`.

    Args:
        operands: the operands with the lengths before the append.
    """
    k_cache, lengths = operands.k, operands.seqused_k
    table, capacity = layout.page_table, layout.capacity(k_cache)
    if layout.cache_batch_idx is not None:
        rows = k_cache if table is None else table
        within("cache_batch_idx", layout.cache_batch_idx, rows.shape[0])
    if layout.cache_seqlens is None or lengths is None:
        return
    if layout.k_new is not None and layout.cu_seqlens_k_new is not None:
        total = layout.k_new.shape[0]
        cumulative_values("cu_seqlens_k_new", layout.cu_seqlens_k_new, total, "k")
    before, added = lengths.tolist(), layout.added
    new = [added] * len(before) if isinstance(added, int) else added.tolist()
    after = [length + count for length, count in zip(before, new, strict=True)]
    if table is not None:
        page_size = k_cache.shape[1] if k_cache.shape[0] > 0 else 0
        with_new = "cache_seqlens" + (" with the new tokens" if layout.k_new is not None else "")
        lengths_in_pages(with_new, after, table, page_size)
    if min(before, default=0) < 0 or max(after, default=0) > capacity:
        raise ValueError(
            f"cache_seqlens: got {before}, {after} with the new tokens, want at least 0 and at "
            f"most {capacity}, the capacity of the cache"
        )
    if layout.k_new is not None and layout.v_new is not None:
        if operands.page_table is not None or operands.cache_batch_idx is not None:
            _distinct_slots(before, new, operands)
        # The column of the keys at which the values begin, if they are in one memory.
        first = (operands.v.data_ptr() - k_cache.data_ptr()) // k_cache.element_size()
        if -layout.v_new.shape[-1] < first < layout.k_new.shape[-1]:
            _shared_memory(operands, layout, layout.k_new, layout.v_new, first)
    if layout.rotary_cos is not None and before:
        _positions(lengths, layout, layout.rotary_cos, _rotated_queries(operands, options))


def _distinct_slots(before: list[int], added: list[int], operands: Operands) -> None:
    """Check that no two new tokens go to one slot of the cache."""
    table, rows = operands.page_table, operands.cache_batch_idx
    counts = torch.tensor(added, dtype=torch.int64)
    sequence = torch.arange(len(before)).repeat_interleave(counts)
    index = torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]
    position = torch.tensor(before, dtype=torch.int64)[sequence] + index
    row = sequence
    if rows is not None:
        row = rows.cpu()[sequence]
    elif table is not None:
        page_size = operands.k.shape[1]
        row, position = table.cpu()[sequence, position // page_size], position % page_size
    slots = torch.stack((row, position), 1)
    if len(slots.unique(dim=0)) < len(slots):
        name = "page_table (block_table)" if rows is None else "cache_batch_idx"
        indices = table if rows is None else rows
        shown = None if indices is None else indices.tolist()
        raise ValueError(
            f"{name}: got {shown}, by which new tokens of two sequences go to one slot of the "
            "cache; want a slot for each"
        )


def _shared_memory(operands: Operands, layout: Cached, k: Tensor, v: Tensor, first: int) -> None:
    """Check that new keys and new values that go to the same memory are the same.

    `first`: the column of the keys at which the values begin.
    """
    k_cache, v_cache = operands.k, operands.v
    has_columns = k_cache.stride(-1) == v_cache.stride(-1) == 1 and layout.formats is None
    if not k.numel() or (first != 0 and not has_columns):
        return
    k, v = k[..., max(first, 0) :], v[..., max(-first, 0) :]
    columns = min(k.shape[-1], v.shape[-1])
    rotated = 0 if layout.rotary_cos is None else 2 * layout.rotary_cos.shape[1]
    same = torch.equal(k[..., :columns], v[..., :columns])
    if rotated > max(first, 0) or k_cache.stride() != v_cache.stride() or not same:
        raise ValueError(
            "v_cache: got the memory of k_cache, want memory of its own where new keys and new "
            "values differ"
        )


def _rotated_queries(operands: Operands, options: Options) -> int | Tensor:
    """Number of positions of each sequence's queries: one without a causal mask, a window or a
    chunk.
    """
    starts = operands.cu_seqlens_q
    count = operands.q.shape[1] if starts is None else starts.diff()
    return count if options.facts else count > 0


def _positions(lengths: Tensor, layout: Cached, cos: Tensor, queries: int | Tensor) -> None:
    """Check that the rotary tables cover all positions of the new tokens and of the `queries`."""
    base = lengths if layout.rotary_seqlens is None else layout.rotary_seqlens
    if int(base.min()) < 0:
        raise ValueError(f"rotary_seqlens: got {base.tolist()}, want positions of at least 0")
    needed = max(int((base + count).max()) for count in (layout.added, queries))
    if needed > cos.shape[0]:
        raise ValueError(
            f"rotary_cos: got {cos.shape[0]} positions, want at least {needed} for the last new "
            "token and the last query"
        )
