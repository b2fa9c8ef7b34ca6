"""Invalid input of every kind raises a clear error before anything is written.

The error is a `ValueError`, `TypeError` or `NotImplementedError` whose message names the argument.
`out`, the caches and the state of the generator are as they were.
"""

from __future__ import annotations

import pytest
import torch
from bad_calls import cache, dense, packed, refuse, tensor, zeros

import flashtile
from flashtile.masks import BlockMask, Spans
from flashtile.testing import cu_seqlens, generator, qkv, rotary_tables


def spans(*shape, dtype=torch.int32):
    return Spans(zeros(*shape, dtype=dtype), zeros(*shape, dtype=dtype) + 7)


# The argument that the message names, and the change of a valid call.
DENSE = {
    "q of rank 3": ("q", {"q": zeros(5, 4, 8)}),
    "q of rank 5": ("q", {"q": zeros(1, 2, 5, 4, 8)}),
    "k of rank 3": ("k", {"k": zeros(7, 2, 8)}),
    "v of rank 2": ("v", {"v": zeros(7, 8)}),
    "q is a list": ("q", {"q": [[1.0]]}),
    "k is None": ("k", {"k": None}),
    "batches differ": ("k", {"k": zeros(3, 7, 2, 8), "v": zeros(3, 7, 2, 8)}),
    "key and value lengths differ": ("v", {"v": zeros(2, 6, 2, 8)}),
    "key and value heads differ": ("v", {"v": zeros(2, 7, 4, 8)}),
    "heads that do not divide": ("k", {"k": zeros(2, 7, 3, 8), "v": zeros(2, 7, 3, 8)}),
    "more key heads than query heads": ("k", {"k": zeros(2, 7, 8, 8), "v": zeros(2, 7, 8, 8)}),
    "no key heads": ("k", {"k": zeros(2, 7, 0, 8), "v": zeros(2, 7, 0, 8)}),
    "head dims differ": ("k", {"k": zeros(2, 7, 2, 6)}),
    "head dim 0": ("q", {"q": zeros(2, 5, 4, 0), "k": zeros(2, 7, 2, 0)}),
    "head dim 577": ("head_dim", {"q": zeros(2, 5, 4, 577), "k": zeros(2, 7, 2, 577)}),
    "value head dim 577": ("head_dim", {"v": zeros(2, 7, 2, 577), "out": zeros(2, 5, 4, 577)}),
    "integers": ("q", {"q": zeros(2, 5, 4, 8, dtype=torch.int64)}),
    "complex": ("q", {"q": zeros(2, 5, 4, 8, dtype=torch.complex64)}),
    "dtypes differ": ("k", {"k": zeros(2, 7, 2, 8, dtype=torch.float64)}),
    "v of another dtype": ("v", {"v": zeros(2, 7, 2, 8, dtype=torch.bfloat16)}),
    "k on another device": ("k", {"k": torch.zeros(2, 7, 2, 8, device="meta")}),
    "out on another device": ("out", {"out": torch.zeros(2, 5, 4, 8, device="meta")}),
    "out of another shape": ("out", {"out": zeros(2, 5, 4, 9)}),
    "out of another dtype": ("out", {"out": zeros(2, 5, 4, 8, dtype=torch.float16)}),
    "dropout_p of 1": ("dropout_p", {"dropout_p": 1.0}),
    "dropout_p below 0": ("dropout_p", {"dropout_p": -0.1}),
    "dropout_p of 2": ("dropout_p", {"dropout_p": 2}),
    "dropout_p of NaN": ("dropout_p", {"dropout_p": float("nan")}),
    "dropout_p is text": ("dropout_p", {"dropout_p": "0.1"}),
    "softmax_scale of NaN": ("softmax_scale", {"softmax_scale": float("nan")}),
    "softmax_scale is infinite": ("softmax_scale", {"softmax_scale": float("inf")}),
    "softmax_scale is text": ("softmax_scale", {"softmax_scale": "1"}),
    "softcap below 0": ("softcap", {"softcap": -1.0}),
    "softcap of NaN": ("softcap", {"softcap": float("nan")}),
    "window of one number": ("window_size", {"window_size": 3}),
    "window of three": ("window_size", {"window_size": (1, 2, 3)}),
    "window of floats": ("window_size", {"window_size": (1.5, 2.0)}),
    "window of bools": ("window_size", {"window_size": (True, 3)}),
    "attention_chunk below 0": ("attention_chunk", {"attention_chunk": -4}),
    "attention_chunk is a float": ("attention_chunk", {"attention_chunk": 2.5}),
    "alibi_slopes for 3 heads": ("alibi_slopes", {"alibi_slopes": zeros(3)}),
    "alibi_slopes of rank 3": ("alibi_slopes", {"alibi_slopes": zeros(2, 4, 1)}),
    "alibi_slopes of integers": ("alibi_slopes", {"alibi_slopes": zeros(4, dtype=torch.int32)}),
    "relative_bias for 3 heads": ("relative_bias", {"relative_bias": zeros(3, 5)}),
    "relative_bias of an even width": ("relative_bias", {"relative_bias": zeros(4, 4)}),
    "relative_bias without columns": ("relative_bias", {"relative_bias": zeros(4, 0)}),
    "relative_bias for each batch": ("relative_bias", {"relative_bias": zeros(2, 4, 5)}),
    "relative_bias of integers": ("relative_bias", {"relative_bias": zeros(4, 5).int()}),
    "relative_bias on another device": ("relative_bias", {"relative_bias": zeros(4, 5).to("meta")}),
    "bias that does not broadcast": ("bias", {"bias": zeros(2, 4, 5, 6)}),
    "bias for 3 heads": ("bias", {"bias": zeros(3, 5, 7)}),
    "bias of rank 5": ("bias", {"bias": zeros(1, 1, 1, 5, 7)}),
    "bias of bool": ("bias", {"bias": torch.ones(5, 7, dtype=torch.bool)}),
    "bias on another device": ("bias", {"bias": torch.zeros(5, 7, device="meta")}),
    "bias is a number": ("bias", {"bias": 1.0}),
    "sink for 2 heads": ("sink", {"sink": zeros(2)}),
    "sink of rank 2": ("sink", {"sink": zeros(1, 4)}),
    "sink of integers": ("sink", {"sink": zeros(4, dtype=torch.int64)}),
    "seqused_q for 3 sequences": ("seqused_q", {"seqused_q": zeros(3, dtype=torch.int32)}),
    "seqused_k of floats": ("seqused_k", {"seqused_k": zeros(2)}),
    "seqused_k is a list": ("seqused_k", {"seqused_k": [3, 4]}),
    "block_mask is text": ("block_mask", {"block_mask": "causal"}),
    "block_mask too small": (
        "block_mask",
        {"block_mask": BlockMask.from_tiles(torch.ones(1, 1).bool(), (4, 4))},
    ),
    "block_mask for 3 heads": (
        "block_mask",
        {"block_mask": BlockMask.from_tiles(torch.ones(1, 3, 2, 2).bool(), (4, 4))},
    ),
    "block_mask for 5 batches": (
        "block_mask",
        {"block_mask": BlockMask.from_tiles(torch.ones(5, 1, 2, 2).bool(), (4, 4))},
    ),
    "mask is a dense mask": ("mask", {"mask": torch.ones(5, 7).bool()}),
    "mask is a block mask": ("mask", {"mask": BlockMask.from_tiles(torch.ones(2, 2), (4, 4))}),
    "mask is a pair": ("mask", {"mask": tuple(spans(1, 1, 5, 1))}),
    "mask of lists": ("mask.starts", {"mask": Spans([[0]], [[3]])}),
    "mask of int64": ("mask.starts", {"mask": spans(1, 1, 5, 1, dtype=torch.int64)}),
    "mask for 6 queries": ("mask.starts", {"mask": spans(1, 1, 6, 1)}),
    "mask for 3 batches": ("mask.starts", {"mask": spans(3, 1, 5, 1)}),
    "mask for the key heads": ("mask.starts", {"mask": spans(1, 2, 5, 1)}),
    "mask of nine intervals": ("mask.starts", {"mask": spans(1, 1, 5, 9)}),
    "mask of rank 3": ("mask.starts", {"mask": spans(1, 5, 1)}),
    "mask with two shapes": (
        "mask",
        {"mask": Spans(zeros(2, 1, 5, 1).int(), zeros(1, 1, 5, 1).int())},
    ),
    "mask on another device": (
        "mask.stops",
        {"mask": Spans(spans(1, 1, 5, 1).starts, spans(1, 1, 5, 1).stops.to("meta"))},
    ),
    "score_mod is a tensor": ("score_mod", {"score_mod": zeros(5, 7)}),
    "score_mod is a name": ("score_mod", {"score_mod": "causal"}),
    "score_mod of a matrix": ("score_mod", {"score_mod": lambda s, b, h, i, j: s + zeros(5)}),
    "score_mod of another dtype": ("score_mod", {"score_mod": lambda s, b, h, i, j: i}),
    "score_mod of a number": ("score_mod", {"score_mod": lambda s, b, h, i, j: 1.0}),
    "score_mod of a vector in between": (
        "score_mod",
        {"score_mod": lambda s, b, h, i, j: (s + zeros(5)).sum()},
    ),
    "score_mod with too few indices": (
        "score_mod",
        {"score_mod": lambda s, b, h, i, j: zeros(4, 5)[h]},
    ),
    "score_mod captures another device": (
        "score_mod",
        {"score_mod": lambda s, b, h, i, j: s + zeros(4).to("meta")[h]},
    ),
    "score_mod captures complex numbers": (
        "score_mod",
        {"score_mod": lambda s, b, h, i, j: s + zeros(4, dtype=torch.complex64)[h].real},
    ),
    "q_descale without float8": ("q_descale", {"q_descale": torch.ones(2, 2)}),
    "k_descale of another shape": ("k_descale", {"k_descale": torch.ones(4)}),
    "an unknown backend": ("backend", {"backend": "abacus"}),
    "backend is a number": ("backend", {"backend": 3}),
}


@pytest.mark.parametrize("case", DENSE)
def test_dense(case):
    argument, change = DENSE[case]
    call = dense() | change
    untouched = [call["out"]] if call["out"].device.type == "cpu" else []
    refuse(flashtile.attention, call, argument, untouched)


def test_out_while_recording_gradients():
    call = dense()
    call["q"].requires_grad_()
    refuse(flashtile.attention, call, "out", [call["out"]])


def test_out_that_overlaps_itself():
    call = dense() | {"out": torch.zeros(1).expand(2, 5, 4, 8)}
    refuse(flashtile.attention, call, "out", [call["out"]])


def test_unknown_arguments_are_not_swallowed():
    q, k, v = qkv(generator(0))
    for function in (flashtile.attention, flashtile.flash_attn_func):
        with pytest.raises(TypeError, match="colour"):
            function(q, k, v, colour="red")


PACKED = {
    "mask for each sequence": ("mask.starts", {"mask": spans(2, 1, 5, 1)}),
    "mask for 6 tokens": ("mask.starts", {"mask": spans(1, 4, 6, 2)}),
    "q of rank 4": ("q", {"q": zeros(1, 5, 4, 8)}),
    "k of rank 4 without pages": ("k", {"k": zeros(1, 7, 2, 8)}),
    "totals of k and v differ": ("v", {"v": zeros(6, 2, 8)}),
    "cu_seqlens_q of int16": (
        "cu_seqlens_q",
        {"cu_seqlens_q": torch.tensor([0, 3, 5], dtype=torch.int16)},
    ),
    "cu_seqlens_k of floats": ("cu_seqlens_k", {"cu_seqlens_k": torch.tensor([0.0, 4.0, 7.0])}),
    "cu_seqlens_q is a list": ("cu_seqlens_q", {"cu_seqlens_q": [0, 3, 5]}),
    "cu_seqlens_q is None": ("cu_seqlens_q", {"cu_seqlens_q": None}),
    "cu_seqlens_q of rank 2": ("cu_seqlens_q", {"cu_seqlens_q": cu_seqlens([3, 2])[None]}),
    "cu_seqlens_q is empty": ("cu_seqlens_q", {"cu_seqlens_q": zeros(0, dtype=torch.int32)}),
    "cu_seqlens of two batches": ("cu_seqlens_k", {"cu_seqlens_k": cu_seqlens([4, 2, 1])}),
    "max_seqlen_q below 0": ("max_seqlen_q", {"max_seqlen_q": -1}),
    "max_seqlen_k is a float": ("max_seqlen_k", {"max_seqlen_k": 4.0}),
    "max_seqlen_k is text": ("max_seqlen_k", {"max_seqlen_k": "7"}),
    "bias for other lengths": ("bias", {"bias": zeros(2, 4, 5, 7)}),
    "page_table of floats": ("page_table", {"page_table": zeros(2, 1), "paged": 4}),
    "page_table for 3 sequences": (
        "page_table",
        {"page_table": zeros(3, 1, dtype=torch.int32), "paged": 4},
    ),
    "page_table of rank 1": (
        "page_table",
        {"page_table": zeros(2, dtype=torch.int32), "paged": 4},
    ),
    "a page size of 0": (
        "page size",
        {"page_table": zeros(2, 2, dtype=torch.int32), "paged": 0},
    ),
}


@pytest.mark.parametrize("case", PACKED)
def test_packed(case):
    argument, change = PACKED[case]
    call = packed() | change
    if "paged" in call:
        page_size = call.pop("paged")
        call["k"], call["v"] = zeros(4, page_size, 2, 8), zeros(4, page_size, 2, 8)
    refuse(flashtile.attention_varlen, call, argument, [call["out"]])


COS, SIN = rotary_tables(32, 8)
FLOAT8 = torch.float8_e4m3fn
HALF_Q = zeros(2, 3, 4, 8, dtype=torch.bfloat16)
HALF_CACHES = dict.fromkeys(("k_cache", "v_cache"), zeros(4, 16, 2, 8, dtype=torch.bfloat16))
FLOAT8_CACHE = zeros(4, 16, 2, 8, dtype=FLOAT8)
BYTES = torch.zeros(64, dtype=torch.uint8)
ROWS = {"cache_batch_idx": tensor(0, 1)}

CACHE = {
    "q of rank 3": ("q", {"q": zeros(3, 4, 8)}),
    "k_cache of rank 3": ("k_cache", {"k_cache": zeros(16, 2, 8)}),
    "heads that do not divide": (
        "k_cache",
        {"k_cache": zeros(4, 16, 3, 8), "v_cache": zeros(4, 16, 3, 8)},
    ),
    "caches of two lengths": ("v_cache", {"v_cache": zeros(4, 15, 2, 8)}),
    "caches of another dtype": ("k_cache", {"k_cache": zeros(4, 16, 2, 8, dtype=torch.float16)}),
    "one cache in float8": ("k_cache", {"k_cache": zeros(4, 16, 2, 8, dtype=FLOAT8)}),
    **{
        f"a float8 {name} alone": (name, {"q": HALF_Q, **HALF_CACHES, name: FLOAT8_CACHE})
        for name in ("k_cache", "v_cache")
    },
    "float8 caches under float32": (
        "k_cache",
        dict.fromkeys(("k_cache", "v_cache"), zeros(4, 16, 2, 8, dtype=FLOAT8)),
    ),
    "k_descale without float8": ("k_descale", {"k_descale": torch.ones(2, 2)}),
    "per-block scales with a left pad": (
        "q_descale",
        {
            **{name: zeros(2, 3, 4 if name == "q" else 2, 8, dtype=FLOAT8) for name in "qkv"},
            **dict.fromkeys(("k_cache", "v_cache"), FLOAT8_CACHE),
            **{f"{name}_descale": torch.ones(2, 4 if name == "q" else 2, 1) for name in "qkv"},
            "cache_leftpad": tensor(0, 1),
            "out": zeros(2, 3, 4, 8, dtype=torch.bfloat16),
        },
    ),
    "cache on another device": ("k_cache", {"k_cache": torch.zeros(4, 16, 2, 8, device="meta")}),
    "more rows than the batch": ("cache_batch_idx", {"cache_batch_idx": None}),
    "no rows to choose": (
        "k_cache",
        {"k_cache": zeros(0, 16, 2, 8), "v_cache": zeros(0, 16, 2, 8)},
    ),
    "k without v": ("v", {"v": None}),
    "v without k": ("k", {"k": None}),
    "k of rank 3": ("k", {"k": zeros(3, 2, 8)}),
    "k is a list": ("k", {"k": [1.0], "cache_seqlens": 2}),
    "pages of no tokens": (
        "page size",
        {n: zeros(4, 0, 2, 8) for n in ("k_cache", "v_cache")} | {"page_table": tensor([0], [1])},
    ),
    "k of another batch": ("k", {"k": zeros(3, 3, 2, 8), "v": zeros(3, 3, 2, 8)}),
    "k of other heads": ("k", {"k": zeros(2, 3, 4, 8), "v": zeros(2, 3, 4, 8)}),
    "k of another dtype": ("k", {"k": zeros(2, 3, 2, 8, dtype=torch.float64)}),
    "v of another length": ("v", {"v": zeros(2, 2, 2, 8)}),
    "new tokens without cache_seqlens": ("cache_seqlens", {"cache_seqlens": None}),
    "cache_seqlens of floats": ("cache_seqlens", {"cache_seqlens": zeros(2)}),
    "cache_seqlens for 3 sequences": ("cache_seqlens", {"cache_seqlens": tensor(1, 2, 3)}),
    "cache_seqlens below 0": ("cache_seqlens", {"cache_seqlens": -1}),
    "cache_seqlens past the capacity": ("cache_seqlens", {"cache_seqlens": 14}),
    "cache_seqlens is a float": ("cache_seqlens", {"cache_seqlens": 2.0}),
    "cache_batch_idx for 3 sequences": ("cache_batch_idx", {"cache_batch_idx": tensor(0, 1, 2)}),
    "cache_batch_idx for 3 sequences in pages": (
        "cache_batch_idx",
        {"cache_batch_idx": tensor(0, 1, 1), "page_table": tensor([0, 1], [2, 3])},
    ),
    "cache_batch_idx into a page_table without rows": (
        "page_table",
        ROWS | {"page_table": zeros(0, 2, dtype=torch.int32)},
    ),
    "new tokens of two sequences in one row": (
        "cache_batch_idx",
        {"cache_batch_idx": tensor(1, 1), "cache_seqlens": 2},
    ),
    "new tokens of two sequences in one page": (
        "page_table",
        {"page_table": tensor([1], [1]), "cache_seqlens": 2},
    ),
    "new keys and other values in one memory": (
        "v_cache",
        dict.fromkeys(("k_cache", "v_cache"), zeros(2, 16, 2, 8)) | {"v": zeros(2, 3, 2, 8) + 1},
    ),
    "cache_leftpad of floats": ("cache_leftpad", {"cache_leftpad": zeros(2)}),
    "cache_leftpad for 1 sequence": ("cache_leftpad", {"cache_leftpad": tensor(1)}),
    "page_table for 3 sequences": ("page_table", {"page_table": tensor([0], [1], [2])}),
    "page_table of int8": (
        "page_table",
        {"page_table": torch.zeros(2, 2, dtype=torch.int8)},
    ),
    "packed queries with a bound of floats": (
        "max_seqlen_q",
        {"q": zeros(4, 4, 8), "cu_seqlens_q": tensor(0, 2, 4), "max_seqlen_q": torch.tensor(2.0)},
    ),
    "cu_seqlens_q without a number": (
        "cu_seqlens_q",
        {"q": zeros(4, 4, 8), "cu_seqlens_q": zeros(0).int(), "max_seqlen_q": 2},
    ),
    "cu_seqlens_q of rank 2": (
        "cu_seqlens_q",
        {"q": zeros(4, 4, 8), "cu_seqlens_q": tensor([0, 2, 4]), "max_seqlen_q": 2},
    ),
    "cu_seqlens_k_new of another batch": (
        "cu_seqlens_k_new",
        {"k": zeros(4, 2, 8), "v": zeros(4, 2, 8), "cu_seqlens_k_new": tensor(0, 4)},
    ),
    "rotary_cos without rotary_sin": ("rotary_sin", {"rotary_cos": COS}),
    "rotary_sin without rotary_cos": ("rotary_cos", {"rotary_sin": SIN}),
    "rotary without new tokens": (
        "rotary_cos",
        {"rotary_cos": COS, "rotary_sin": SIN, "k": None, "v": None},
    ),
    "rotary wider than the head": (
        "rotary_cos",
        {"rotary_cos": zeros(32, 5), "rotary_sin": zeros(32, 5)},
    ),
    "rotary tables of two shapes": ("rotary_sin", {"rotary_cos": COS, "rotary_sin": SIN[:16]}),
    "rotary of integers": (
        "rotary_cos",
        {"rotary_cos": COS.long(), "rotary_sin": SIN.long()},
    ),
    "rotary_seqlens for 3 sequences": (
        "rotary_seqlens",
        {"rotary_cos": COS, "rotary_sin": SIN, "rotary_seqlens": tensor(1, 2, 3)},
    ),
    "num_splits below 0": ("num_splits", {"num_splits": -1}),
    "num_splits is a float": ("num_splits", {"num_splits": 1.5}),
    "softmax_scale of NaN": ("softmax_scale", {"softmax_scale": float("nan")}),
    "window of three": ("window_size", {"window_size": (1, 2, 3)}),
    "sink for 2 heads": ("sink", {"sink": zeros(2)}),
    "bias that does not broadcast": ("bias", {"bias": zeros(3, 5)}),
    "out of another shape": ("out", {"out": zeros(2, 4, 4, 8)}),
    "workspace of floats": ("workspace", {"workspace": zeros(64)}),
    "workspace is a number": ("workspace", {"workspace": 64}),
    "workspace of rank 2": ("workspace", {"workspace": BYTES.view(4, 16)}),
    "workspace with gaps": ("workspace", {"workspace": BYTES[::2]}),
    "workspace from an odd byte on": ("workspace", {"workspace": BYTES[3:]}),
    "workspace on another device": ("workspace", {"workspace": BYTES.to("meta")}),
    "an unknown backend": ("backend", {"backend": "abacus"}),
}


@pytest.mark.parametrize("case", CACHE)
def test_cache(case):
    argument, change = CACHE[case]
    call = cache() | ({} if "page_table" in change else ROWS) | change
    untouched = [x for n in ("k_cache", "v_cache", "out") if not (x := call[n]).is_meta]
    refuse(flashtile.attention_with_kvcache, call, argument, untouched)


@pytest.mark.parametrize("argument", ["q", "k_cache", "v_cache"])
@pytest.mark.parametrize("given", [None, [[1.0]]])
def test_inputs_that_are_no_tensors_under_autocast(argument, given):
    call = cache() | ROWS | {argument: given}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refuse(flashtile.attention_with_kvcache, call, argument, [call["out"]])


def test_both_names_of_the_page_table():
    call = cache() | {"page_table": tensor([0, 1], [2, 3]), "block_table": tensor([0, 1], [2, 3])}
    untouched = [call[n] for n in ("k_cache", "v_cache", "out")]
    refuse(flashtile.flash_attn_with_kvcache, call, "block_table", untouched)


PACKED_TENSORS = {
    "qkv of rank 4": (flashtile.flash_attn_qkvpacked_func, "qkv", (2, 5, 3, 8)),
    "qkv of 2": (flashtile.flash_attn_qkvpacked_func, "qkv", (2, 5, 2, 4, 8)),
    "packed qkv of rank 5": (flashtile.flash_attn_varlen_qkvpacked_func, "qkv", (1, 5, 3, 4, 8)),
    "kv of 3": (flashtile.flash_attn_kvpacked_func, "kv", (2, 5, 3, 4, 8)),
    "packed kv of rank 5": (flashtile.flash_attn_varlen_kvpacked_func, "kv", (1, 5, 2, 4, 8)),
}


@pytest.mark.parametrize("case", PACKED_TENSORS)
def test_packed_tensors(case):
    function, argument, shape = PACKED_TENSORS[case]
    call = {argument: zeros(*shape)}
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    if argument == "kv":
        call["q"] = zeros(5, 4, 8) if "varlen" in function.__name__ else zeros(2, 5, 4, 8)
    else:
        lengths = ["cu_seqlens", "max_seqlen"]
    if "varlen" in function.__name__:
        call |= {n: tensor(0, 5) if n.startswith("cu") else 5 for n in lengths}
    refuse(function, call, argument, [])


def test_combine():
    good = {"out_partial": zeros(3, 2, 5, 4, 8), "lse_partial": zeros(3, 2, 5, 4)}
    cases = {
        "out_partial": {"out_partial": zeros(3, 8)},
        "lse_partial": {"lse_partial": zeros(3, 2, 4, 5)},
        "out": {"out": zeros(2, 5, 4, 7)},
        "out_dtype": {"out_dtype": torch.int32},
    }
    for argument, change in cases.items():
        refuse(flashtile.flash_attn_combine, good | change, argument, [])
    for dtype in (torch.int32, torch.float16):
        lse = {"lse_partial": zeros(3, 2, 5, 4, dtype=dtype)}
        refuse(flashtile.flash_attn_combine, good | lse, "lse_partial", [])
    out = zeros(2, 5, 4, 8, dtype=torch.int32)
    refuse(flashtile.flash_attn_combine, good | {"out": out}, "out", [out])


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("kinds", {"kinds": zeros(2, 2, 2).bool()}),
        ("tile_size", {"tile_size": (0, 4)}),
        ("tile_size", {"tile_size": 4}),
    ],
)
def test_block_mask_from_tiles(argument, change):
    call = {"kinds": zeros(2, 2).bool(), "tile_size": (4, 4)} | change
    refuse(BlockMask.from_tiles, call, argument, [])


@pytest.mark.parametrize("change", [{"mask": zeros(4, 4)}, {"mask": zeros(2, 4, 4).bool()}])
def test_block_mask_from_dense(change):
    refuse(BlockMask.from_dense, {"tile_size": (2, 2)} | change, "mask", [])


def test_the_context_names_an_unknown_backend():
    with pytest.raises(ValueError, match="abacus"), flashtile.backend("abacus"):
        pass


def test_no_backend_lists_every_backend_with_its_reasons():
    q = zeros(1, 2, 1, 600)
    with pytest.raises(NotImplementedError, match=r"(?s)cpu.*600.*512"):
        flashtile.attention(q, q, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(("name", "shape"), [("alibi_slopes", (2,)), ("relative_bias", (2, 3))])
def test_what_requires_a_gradient_is_fine_where_none_is_recorded(name, shape, dtype):
    q, x = torch.randn(1, 3, 2, 8).to(dtype), torch.rand(shape, requires_grad=True)
    with torch.no_grad():
        out = flashtile.attention(q, q, q, **{name: x})
    assert torch.equal(out, flashtile.attention(q, q, q, **{name: x.detach()}))
    if dtype == torch.float8_e4m3fn:
        with pytest.raises(NotImplementedError, match="float8 attention has no backward"):
            flashtile.attention(q, q, q, **{name: x})


def test_blocks_of_one_tensor_alone_have_scales():
    q, k = zeros(2, 5, 4, 8, dtype=FLOAT8), zeros(2, 7, 2, 8, dtype=FLOAT8)
    call = {"q": q, "k": k, "v": k, "q_descale": torch.ones(2, 4, 1)}
    refuse(flashtile.attention, call, "k_descale", [])
