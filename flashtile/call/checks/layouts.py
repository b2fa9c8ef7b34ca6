"""Checks of queries, keys and values together: dense, packed or paged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...problem import FLOAT8
from .tensors import index_tensor, rank, same_device, shape, shape_of, tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *FLOAT8[:1])
HALF_DTYPES = (torch.float16, torch.bfloat16)
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
    rank(name_q, q, layout_q)
    rank(name_k, k, layout_k)
    rank(name_v, v, layout_k)
    if q.device.type not in DEVICES:
        raise NotImplementedError(f"{name_q}: is on {q.device}, want a cpu or cuda device")
    for name, x in ((name_q, q), (name_k, k), (name_v, v)):
        if x.dtype not in DTYPES:
            wanted = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
            raise TypeError(f"{name}: got dtype {x.dtype}, want one of {wanted}")
        mixed = takes_float8_keys and x is not q and q.dtype in HALF_DTYPES
        if x.dtype != q.dtype and not (mixed and x.dtype == torch.float8_e4m3fn):
            also = " (or float8_e4m3fn for both caches)" if mixed else ""
            raise TypeError(
                f"{name}: got dtype {x.dtype}, want {q.dtype}, the dtype of {name_q}{also}"
            )
        same_device(name, x, q)
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
    shape(
        "cu_seqlens_k",
        cu_seqlens_k,
        tuple(cu_seqlens_q.shape),
        "one longer than the batch, like cu_seqlens_q",
    )
    if page_table is not None:
        paged(page_table, k, cu_seqlens_q.shape[0] - 1, has_rows=False)


def cumulative(name: str, x: Any, q: Tensor) -> None:
    """Check cumulative lengths: (batch + 1,) integers."""
    index_tensor(name, x, q)
    if x.dim() != 1 or x.shape[0] < 1:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want (batch + 1,), starting with 0")


def paged(page_table: Any, k: Tensor, batch: int, has_rows: bool) -> None:
    """Check page_table, (batch, pages per sequence) integers, and that pages have tokens. With
    `has_rows` the table may have any number of rows, because each sequence has a row index.
    """
    index_tensor("page_table", page_table, k)
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
            shape("qv", qv, (*q.shape[:-1], qv.shape[-1]), "the shape of q except for the head dim")
        batches["q"] = q.shape[0]
    else:
        rank("q", q, "total_q, heads, head_dim")
        cumulative("cu_seqlens_q", cu_seqlens_q, q)
        batches["cu_seqlens_q"] = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is not None:
        cumulative("cu_seqlens_k", cu_seqlens_k, q)
        batches["cu_seqlens_k"] = cu_seqlens_k.shape[0] - 1
    elif page_table is None:
        _padded_side("k", k, "batch, seq_k, kv_heads, head_dim")
        rank("v", v, "batch, seq_k, kv_heads, value_head_dim")
        shape("v", v, (*k.shape[:-1], v.shape[-1]), "the shape of k except for the head dim")
        batches["k"] = k.shape[0]
    else:
        rank("k", k, PAGES)
        rank("page_table", page_table, "batch, pages per sequence")
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
    rank(name, x, meaning)
