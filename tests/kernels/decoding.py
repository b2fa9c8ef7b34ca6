"""Calls of few queries against long caches, one for each option and layout, described as operands.

Lengths of the four sequences: none, one, the edge of a page, and an odd one. Slots after a
length hold NaN, which must not reach a result.
"""

from __future__ import annotations

from typing import Any

import torch

from flashtile import CacheFormat, cache_formats
from flashtile.call.layouts import Dense
from flashtile.call.layouts import Packed as PackedLayout
from flashtile.call.prepare import describe
from flashtile.masks import BlockMask
from flashtile.problem import AttentionProblem, Operands, Options, starts_after
from flashtile.testing import (
    alibi_slopes,
    assert_close,
    cu_seqlens,
    floor_of,
    generator,
    normal,
    paged,
    rounding_variance,
)

from .cases import random_spans
from .reference import reference

LENGTHS = (0, 1, 128, 177)
CAPACITY = 256
B = len(LENGTHS)
QUERIES = (1, 2, 0, 3)  # of each sequence where they are packed

# Sizes and layouts that are not options of a call.
PLAIN: dict[str, Any] = {
    "M": 1, "Hq": 4, "Hk": 2, "D": 16, "Dv": 16, "page_size": 0, "leftpad": False, "rows": False,
    "packed": False, "block_mask": False, "sink": False, "alibi": False, "bias": False,
    "hidden": False, "float8": False, "latent": False, "spans": 0,
}  # fmt: skip

# DeepSeek's MLA: one key head, whose values are the first columns of its keys.
LATENT: dict[str, Any] = {"Hq": 8, "Hk": 1, "D": 576, "Dv": 512, "latent": True}

CASES: dict[str, dict[str, Any]] = {
    "one query": {},
    "few queries, causal": {"M": 3, "causal": True},
    "more queries than keys, causal": {"M": 5, "causal": True},
    "queries of many tiles": {"M": 70, "Hq": 1, "Hk": 1, "causal": True},
    "heads alone": {"Hq": 2},
    "one key head": {"Hq": 8, "Hk": 1, "M": 2, "causal": True},
    "another value head dim": {"D": 24, "Dv": 20},
    "window": {"M": 3, "causal": True, "window_size": (100, 0)},
    "window to both sides": {"M": 3, "window_size": (9, 2)},
    "chunk": {"M": 3, "causal": True, "attention_chunk": 96},
    "softcap": {"softcap": 2.0},
    "negative scale": {"softmax_scale": -0.3},
    "alibi": {"M": 2, "alibi": True, "causal": True},
    "bias": {"bias": True},
    "bias of huge numbers": {"bias": True, "hidden": True, "M": 3},
    "bias of huge numbers, pages, packed queries": {
        "bias": True,
        "hidden": True,
        "page_size": 16,
        "packed": True,
        "sink": True,
    },
    "sink": {"sink": True, "M": 5, "causal": True},
    "block mask": {"M": 40, "Hq": 1, "Hk": 1, "block_mask": True},
    "spans": {"spans": 2, "M": 3},
    "a span of many tiles": {"spans": 1, "M": 70, "Hq": 1, "Hk": 1, "causal": True},
    "spans, pages of 16, packed queries": {"spans": 3, "page_size": 16, "packed": True},
    "spans, pages of 16, left pads": {"spans": 2, "page_size": 16, "leftpad": True, "M": 2},
    "left pads": {"leftpad": True, "M": 2, "causal": True},
    "cache rows": {"rows": True},
    "packed queries": {"packed": True, "causal": True},
    "pages of one token": {"page_size": 1},
    "pages of 2": {"page_size": 2, "M": 2, "causal": True},
    "pages of 3": {"page_size": 3, "M": 2, "causal": True},
    "pages of 16": {"page_size": 16},
    "pages of 48, left pads": {"page_size": 48, "leftpad": True},
    "pages of 96": {"page_size": 96},
    "pages of 128": {"page_size": 128},
    "pages of 256, left pads": {"page_size": 256, "leftpad": True},
    "pages under a window": {"page_size": 16, "window_size": (50, 0), "M": 2},
    "pages, packed queries": {"page_size": 16, "packed": True, "causal": True, "sink": True},
    "latent keys": LATENT,
    "latent keys of 520": LATENT | {"D": 520},
    "keys of 576 with values of their own": LATENT | {"latent": False},
    "latent keys of many heads": LATENT | {"Hq": 20, "M": 2, "causal": True},
    "latent keys, pages of 16": LATENT | {"page_size": 16, "packed": True, "causal": True},
    "latent keys, pages of 64": LATENT | {"Hq": 24, "M": 3, "page_size": 64, "causal": True},
}


# Those that the Hopper backend decodes.
LATENT_CASES = ("latent keys", "latent keys of many heads", "latent keys, pages of 64")

# Of a float8 cache, which queries of 16 bits read.
FLOAT8_CASES: dict[str, dict[str, Any]] = {
    "one query": {},
    "one key head": {"Hq": 8, "Hk": 1, "M": 2, "causal": True},
    "another value head dim": {"D": 24, "Dv": 20},
    "softcap": {"softcap": 2.0},
    "queries of many tiles": {"M": 70, "Hq": 1, "Hk": 1, "causal": True},
    "pages of 16": {"page_size": 16},
    "pages of 48": {"page_size": 48},
    "packed queries": {"packed": True, "causal": True},
    # Wide enough to come in pairs of columns; but not if a row starts at an odd offset.
    "pairs": {"D": 64, "Dv": 32},
    "pairs of a padded head dim": {"Hq": 8, "Hk": 2, "M": 2, "D": 48, "Dv": 80, "causal": True},
    "pairs, pages of 16": {"page_size": 16, "D": 32, "Dv": 64},
    "pairs, pages of 3": {"page_size": 3, "D": 32, "Dv": 64},
    "an odd head dim": {"D": 33, "Dv": 47},
}


def make_decoding(
    name: str, dtype: torch.dtype, seed: int = 0, **changes: Any
) -> tuple[Operands, Options]:
    """The operands and options of a case, as `attention_with_kvcache` describes them."""
    g = generator(seed)
    case = PLAIN | (FLOAT8_CASES if changes.get("float8") else CASES)[name] | changes
    sizes = {key: case.pop(key) for key in PLAIN}
    M, Hq, Hk = sizes["M"], sizes["Hq"], sizes["Hk"]
    rows = B + 2 if sizes["rows"] else B
    k = normal(g, rows, CAPACITY, Hk, sizes["D"], dtype=dtype)
    v = normal(g, rows, CAPACITY, Hk, sizes["Dv"], dtype=dtype)
    used = torch.tensor(LENGTHS, dtype=torch.int32)
    where: dict[str, torch.Tensor] = {"seqused_k": used}
    if sizes["rows"]:
        where["cache_batch_idx"] = torch.tensor([5, 0, 3, 3], dtype=torch.int32)
    else:
        for b, length in enumerate(LENGTHS):
            k[b, length:], v[b, length:] = torch.nan, torch.nan
    if sizes["leftpad"]:
        where["leftpad_k"] = torch.tensor([0, 1, 5, 130], dtype=torch.int32)
    bias = normal(g, B, 1, M, CAPACITY, dtype=dtype) if sizes["bias"] else None
    if sizes["hidden"]:  # left padding of whole parts, and rows without a key
        bias = torch.zeros(B, 1, M, CAPACITY, dtype=dtype)
        bias[..., :70], bias[::2] = torch.finfo(dtype).min, torch.finfo(dtype).min
    given = dict(
        **case,
        sink=normal(g, Hq) if sizes["sink"] else None,
        alibi_slopes=alibi_slopes(g, Hq) if sizes["alibi"] else None,
        bias=bias,
        block_mask=_some_tiles(g, M) if sizes["block_mask"] else None,
    )
    if sizes["packed"]:
        q = normal(g, sum(QUERIES) + 2, Hq, sizes["D"], dtype=dtype)
        starts = cu_seqlens(list(QUERIES))
        layout = PackedLayout(starts, starts, max(QUERIES), CAPACITY)
        operands, options = describe((q, k[0], v[0]), layout, given)
        operands = operands._replace(cu_seqlens_k=None)
    else:
        q = normal(g, B, M, Hq, sizes["D"], dtype=dtype)
        operands, options = describe((q, k[:B], v[:B]), Dense(), given)
    if sizes["spans"]:
        lead = 1 if sizes["packed"] else B
        mask = random_spans(g, (lead, Hq, operands.q.shape[-3], sizes["spans"]), CAPACITY)
        operands = operands._replace(span_starts=mask.starts, span_stops=mask.stops)
    if sizes["page_size"]:
        state = g.get_state()
        k, where["page_table"] = paged(g, k, sizes["page_size"])
        g.set_state(state)
        v, _ = paged(g, v, sizes["page_size"])
    if sizes["latent"]:
        v = k[..., : sizes["Dv"]]
    if sizes["float8"]:
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
        for descale in ("k_descale", "v_descale"):
            where[descale] = 0.5 + torch.rand(B, Hk, generator=g)
    return operands._replace(k=k, v=v, **where), options


def _some_tiles(g: torch.Generator, M: int) -> BlockMask:
    """Empty, full and partial tiles."""
    mask = torch.rand(1, 1, M, CAPACITY, generator=g) < 0.5
    mask[..., :128] = True
    mask[..., 128:192] = False
    return BlockMask.from_dense(mask, (32, 64))


def assert_decoding(
    backend: Any,
    name: str,
    dtype: torch.dtype,
    seed: int,
    splits: tuple[int, ...],
    device: str = "cpu",
    float8: bool = False,
    capability: tuple[int, int] | None = None,
) -> None:
    """Compare the outputs of a case, its keys cut into each number of parts, with the
    reference's.

    `capability`: plan for such a device, on whichever device the tensors are.
    """
    operands, options = make_decoding(name, dtype, seed, float8=float8)
    truth = reference(operands, options)
    plain = reference(operands, options, compute_dtype=dtype)
    # The floor of scores of ordinary size holds for huge ones, too.
    calm = make_decoding(name, dtype, seed, float8=float8, hidden=False)
    variance = reference(*calm, attend=rounding_variance(dtype))
    there = Operands(*(None if x is None else x.to(device) for x in operands))
    if starts_after(operands.k, operands.v, 0):  # latents, of which `to` made two copies
        there = there._replace(v=there.k[..., : operands.v.shape[-1]])
    for count in splits:
        problem = AttentionProblem.of(there, options._replace(num_splits=count))
        if capability is not None:
            problem = problem._replace(capability=capability)
        got = backend.forward(problem, there)
        for field, x in zip(("out", "lse"), got, strict=True):
            label, floor = f"{field} of {count} parts", floor_of(getattr(variance, field))
            wanted, low = getattr(truth, field), getattr(plain, field)
            assert_close(label, x.cpu(), wanted, low, floor=floor, dtype=dtype, seed=seed)


# Of a cache of packed rows: the formats of keys and values, and a case of `CASES` with changes.
# Heads are 64 wide, where elements that share a byte come in pairs, unless the case says otherwise.
INT4 = cache_formats.int4(64)
INT8 = cache_formats.int8(64)


def wider(cache_format: CacheFormat, more: int) -> CacheFormat:
    """The same with some bytes behind each row."""

    def pack(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(cache_format.packed(x), (0, more))

    size = cache_format.bytes_per_row + more
    return CacheFormat(size, cache_format.unpack, pack, cache_format.head_dim)


MLA: tuple[CacheFormat, CacheFormat] = cache_formats.flashmla()
FORMAT_CASES: dict[str, tuple[CacheFormat, CacheFormat, str, dict[str, Any]]] = {
    "int4": (INT4, INT4, "one query", {}),
    "int4, one scale a token": (cache_formats.int4(64, None),) * 2 + ("one key head", {}),
    "int4, padded head dim": (cache_formats.int4(48, 16),) * 2 + ("softcap", {"D": 48, "Dv": 48}),
    "int4, many queries": (INT4, INT4, "queries of many tiles", {}),
    "int4, pages of 16": (INT4, INT4, "pages of 16", {}),
    "int4, pages of 3, window": (INT4, INT4, "pages under a window", {"page_size": 3}),
    "int4 under a block mask": (INT4, INT4, "block mask", {}),
    "int8": (INT8, INT8, "sink", {}),
    "int8, rows at even bytes": (wider(INT8, 2),) * 2 + ("pages under a window", {}),
    "int8, rows at odd bytes": (wider(INT8, 1),) * 2 + ("one query", {}),
    "int8 in blocks, left pads": (cache_formats.int8(64, 16),) * 2 + ("pages of 48, left pads", {}),
    "int8 keys, int4 values": (INT8, INT4, "alibi", {}),
    "e5m2": (cache_formats.e5m2(64),) * 2 + ("cache rows", {}),
    "e5m2, odd head dim": (cache_formats.e5m2(33),) * 2 + ("packed queries", {"D": 33, "Dv": 33}),
    "nvfp4": (cache_formats.nvfp4(64, 0.5),) * 2 + ("pages, packed queries", {}),
    "flashmla": (*MLA, "latent keys", {}),
    "flashmla, pages of 16": (*MLA, "latent keys, pages of 16", {}),
}  # fmt: skip


def make_packed(name: str, dtype: torch.dtype, seed: int) -> tuple[Operands, Operands, Options]:
    """The operands of a case with a packed cache, the same with the unpacked one, and the options
    of the packed one. Unused slots hold random bytes, or NaN.
    """
    k_format, v_format, case, changes = FORMAT_CASES[name]
    is_latent = k_format is MLA[0]
    sizes = {} if is_latent else {"D": 64, "Dv": 64}
    operands, options = make_decoding(case, dtype, seed, **(sizes | changes))
    g = generator(seed + 1)

    def rows(x: torch.Tensor, cache_format: CacheFormat) -> torch.Tensor:
        unused = x.isnan().any(-1, keepdim=True)
        packed = cache_format.packed(x.nan_to_num())
        noise = torch.randint(0, 256, packed.shape, generator=g, dtype=torch.uint8)
        noise[torch.rand(packed.shape[:-1], generator=g) < 0.5] = 255  # NaN, in most formats
        return torch.where(unused, noise, packed)

    k = rows(operands.k, k_format)
    v = k if is_latent else rows(operands.v, v_format)
    options = options._replace(
        k_unpack=k_format.program, v_unpack=v_format.program, value_head_dim=operands.v.shape[-1]
    )
    unpacked = operands._replace(k=k_format.unpacked(k).to(dtype), v=v_format.unpacked(v).to(dtype))
    return operands._replace(k=k, v=v), unpacked, options
