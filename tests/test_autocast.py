"""Autocast casts the inputs of a call; inside, every product runs in the dtype of the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import BlockMask, Spans
from flashtile.bert_padding import (
    index_first_axis_residual,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from flashtile.combine import flash_attn_combine
from flashtile.flash_blocksparse_attn_interface import flash_blocksparse_attn_func
from flashtile.integrations import sdpa
from flashtile.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)
from flashtile.losses.cross_entropy import CrossEntropyLoss, linear_cross_entropy
from flashtile.modules.block import Block
from flashtile.modules.mha import MHA
from flashtile.modules.mlp import Mlp
from flashtile.testing import attention_reference
from flashtile.testing.inputs import generator, normal

HALF = (torch.float16, torch.bfloat16)
DTYPES = (*HALF, torch.float32)
Entry = Callable[..., Any]

CU = torch.tensor([0, 13, 13, 40], dtype=torch.int32)
ALIBI = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SPAN_STARTS = torch.arange(-4, 36, dtype=torch.int32).view(1, 1, 40, 1)
TILES = torch.tensor([[1, 0], [1, 1], [0, 1]])


def tensors(result: Any) -> list[Tensor]:
    found = result if isinstance(result, Iterable) and not isinstance(result, Tensor) else [result]
    return [x for x in found if isinstance(x, Tensor)]


def run(entry: Entry, inputs: list[Tensor], autocast: torch.dtype | None) -> list[Tensor]:
    """Results and gradients of `entry` under autocast to the dtype `autocast`."""
    torch.manual_seed(7)  # of dropout
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        results = tensors(entry(*leaves))
        roots = [x for x in results if x.requires_grad]
        if not roots:
            return results
        cotangents = [normal(generator(3), *x.shape, 1, dtype=x.dtype)[..., 0] for x in roots]
        gradients = torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
    return [*results, *(x for x in gradients if x is not None)]


def assert_equal(mine: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(mine) == len(wanted) > 0
    for a, b in zip(mine, wanted, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0))


def heads(seed: int, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    g = generator(seed)
    return [normal(g, *shape, dtype=torch.float32).to(dtype) for shape in shapes]


def dense(**options: Any) -> Entry:
    return lambda q, k, v: flashtile.attention(q, k, v, return_lse=True, **options)


def packed(**options: Any) -> Entry:
    return lambda q, k, v: flashtile.attention_varlen(
        q, k, v, CU, CU, 27, 27, return_lse=True, **options
    )


BATCH = ((2, 40, 4, 24), (2, 50, 2, 24), (2, 50, 2, 24))
WIDE_VALUES = ((2, 40, 4, 24), (2, 50, 2, 24), (2, 50, 2, 32))
TOKENS = ((40, 4, 24), (40, 2, 24), (40, 2, 24))
HEADS_FIRST = ((2, 4, 40, 24), (2, 4, 50, 24), (2, 4, 50, 24))

# name: (entry, shapes of its inputs); all cast their inputs as SDPA does.
ATTENTION: dict[str, tuple[Entry, tuple[tuple[int, ...], ...]]] = {
    "dense": (dense(causal=True), BATCH),
    "alibi": (dense(alibi_slopes=ALIBI), BATCH),
    "relative bias": (dense(relative_bias=torch.linspace(-2, 2, 28).view(4, 7)), BATCH),
    "softcap": (dense(softcap=1.0, window_size=(9, 3)), BATCH),
    "value head dim": (dense(causal=True), WIDE_VALUES),
    "bias": (dense(bias=torch.linspace(-2, 2, 2000).view(40, 50)), BATCH),
    "sink": (dense(sink=torch.tensor([0.1, -1.0, 2.0, 0.0]), attention_chunk=16), BATCH),
    "dropout": (dense(dropout_p=0.3), BATCH),
    "block mask": (dense(block_mask=BlockMask.from_tiles(TILES, (16, 32))), BATCH),
    "score function": (dense(score_mod=lambda s, b, h, i, j: s + ALIBI[h] * (i - j)), BATCH),
    "spans": (dense(mask=Spans(SPAN_STARTS, SPAN_STARTS + 9)), BATCH),
    "float attn_mask": (dense(attn_mask=torch.linspace(-2, 2, 2000).view(40, 50)), BATCH),
    "bool attn_mask": (dense(attn_mask=torch.ones(40, 50, dtype=torch.bool).tril(3)), BATCH),
    "key_padding_mask": (
        dense(key_padding_mask=torch.arange(50) < torch.tensor([[50], [21]]), softcap=1.0),
        BATCH,
    ),
    "probabilities": (
        lambda q, k, v: flashtile.attention(q, k, v, causal=True, return_attn_probs=True),
        BATCH,
    ),
    "qkvpacked": (
        lambda qkv: flashtile.flash_attn_qkvpacked_func(qkv, softcap=1.0),
        ((2, 40, 3, 4, 24),),
    ),
    "kvpacked": (
        lambda q, kv: flashtile.flash_attn_kvpacked_func(q, kv, alibi_slopes=ALIBI),
        ((2, 40, 4, 24), (2, 50, 2, 2, 24)),
    ),
    "varlen": (packed(causal=True), TOKENS),
    "varlen softcap": (packed(softcap=1.0), TOKENS),
    "varlen qkvpacked": (
        lambda qkv: flashtile.flash_attn_varlen_qkvpacked_func(qkv, CU, 27, alibi_slopes=ALIBI),
        ((40, 3, 4, 24),),
    ),
    "varlen kvpacked": (
        lambda q, kv: flashtile.flash_attn_varlen_kvpacked_func(
            q, kv, CU, CU, 27, 27, alibi_slopes=ALIBI
        ),
        ((40, 4, 24), (40, 2, 2, 24)),
    ),
    "block-sparse": (
        lambda qkv: flash_blocksparse_attn_func(qkv, CU, torch.ones(2, 1), 0.0, 27),
        ((40, 3, 4, 24),),
    ),
    "sdpa": (lambda q, k, v: sdpa.scaled_dot_product_attention(q, k, v), HEADS_FIRST),
    "sdpa with a bool mask": (
        lambda q, k, v: sdpa.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(40, 50, dtype=torch.bool).tril(3)
        ),
        HEADS_FIRST,
    ),
    "sdpa with a float mask": (
        lambda q, k, v: sdpa.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.linspace(-1, 1, 2000).view(40, 50)
        ),
        HEADS_FIRST,
    ),
    "qv": (lambda q, k, v, qv: flashtile.attention(q, k, v, qv=qv), (*BATCH, (2, 40, 4, 24))),
    "float8": (
        lambda q, k, v: flashtile.attention_fp8(
            q, k, v, causal=True, hadamard_v=True, smooth_k=True, return_lse=True
        ),
        ((2, 40, 4, 32), (2, 50, 2, 32), (2, 50, 2, 32)),
    ),
}


@pytest.mark.parametrize("autocast", HALF, ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_casts_its_inputs_only(name: str, autocast: torch.dtype, seed: int) -> None:
    entry, shapes = ATTENTION[name]
    inputs = heads(seed, torch.float32, *shapes)
    by_hand = [x.to(autocast) for x in inputs]
    wanted = run(entry, by_hand, None)
    assert_equal(run(entry, by_hand, autocast), wanted)
    cast = run(entry, inputs, autocast)
    rounded = [x.to(y.dtype) for x, y in zip(cast, wanted, strict=True)]  # gradients came back
    assert_equal(rounded, wanted)


def test_the_error_is_that_of_16_bits() -> None:
    """The call that showed the bug: its error was 0.7 instead of 0.001."""
    q, k, v = heads(0, torch.float16, *[(2, 300, 4, 64)] * 3)
    truth = attention_reference(q.double(), k.double(), v.double(), alibi_slopes=ALIBI).out
    with torch.autocast("cpu", dtype=torch.float16):
        out = flashtile.attention(q, k, v, alibi_slopes=ALIBI)
    assert (out - truth).abs().max() <= 2**-11 * truth.abs().max()


def with_cache(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """A cached call that appends and rotates: its result and the contents of the cache after it."""
    caches = [torch.zeros(2, 64, 2, 24, dtype=dtype or x.dtype) for x in (k, v)]
    angle = torch.linspace(0, 3, 64 * 12).view(64, 12)
    out, lse = flashtile.attention_with_kvcache(
        *(q, *caches, k, v), cache_seqlens=torch.tensor([3, 11], dtype=torch.int32), causal=True,
        rotary_cos=angle.cos(), rotary_sin=angle.sin(), softcap=1.0, return_lse=True,
    )  # fmt: skip
    return [out, lse, *(x.float() for x in caches)]


def with_absorbed_cache(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    k_cache, v_cache = torch.zeros(2, 64, 2, 24, dtype=k.dtype), torch.ones(2, 64, 2, 24).to(v)
    out = flashtile.attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=5, qv=q)
    return [out, k_cache]


def with_float8_cache(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return with_cache(q, k, v, torch.float8_e4m3fn)


@torch.no_grad()
def quantized(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    angle = torch.linspace(0, 3, 50 * 12).view(50, 12)
    found = flashtile.quantize_qkv(
        q, k, v, smooth_k=True, hadamard_v=True, rotary_cos=angle.cos(), rotary_sin=angle.sin()
    )
    return [x.float() for x in found if x is not None]


def rotated(x: Tensor, interleaved: bool = False, **options: Any) -> Tensor:
    angle = torch.linspace(0, 3, 64 * 8).view(64, 8)
    return apply_rotary_emb(x, angle.cos(), angle.sin(), interleaved, **options)


def rotated_by_layer(qkv: Tensor) -> Any:
    return RotaryEmbedding(16, scale_base=512)(qkv.clone())


ANGLE = torch.linspace(0, 3, 64 * 8).view(64, 8)
LENGTHS = torch.tensor([[5, 8, 0, 0], [16, 0, 0, 0]])


def padded(x: Tensor) -> list[Tensor]:
    mask = torch.arange(16) < torch.tensor([[5], [16]])
    tokens, indices, *_ = unpad_input(x, mask)
    more, _, *_ = unpad_input_for_concatenated_sequences(x[:, :4], LENGTHS.clamp(max=2))
    rows, residual = index_first_axis_residual(tokens, torch.tensor([3, 1]))
    return [tokens, more, rows, residual, pad_input(tokens, indices, 2, 16)]


# name: (entry, shapes of its inputs); none of them casts.
EXACT: dict[str, tuple[Entry, tuple[tuple[int, ...], ...]]] = {
    "rotary": (rotated, ((2, 40, 4, 24),)),
    "interleaved rotary": (lambda x: rotated(x, True), ((2, 40, 4, 24),)),
    "packed rotary": (lambda x: rotated(x, cu_seqlens=CU, max_seqlen=27), ((40, 4, 24),)),
    "rotary with learned tables": (apply_rotary_emb, ((2, 40, 4, 24), (64, 8), (64, 8))),
    "rotary in place": (
        lambda qkv: apply_rotary_emb_qkv_(qkv.clone(), ANGLE.cos(), ANGLE.sin()),
        ((2, 40, 3, 4, 24),),
    ),
    "rotary of keys in place": (
        lambda kv: apply_rotary_emb_kv_(kv.clone(), ANGLE.cos(), ANGLE.sin(), interleaved=True),
        ((2, 40, 2, 4, 24),),
    ),
    "rotary in one line": (
        lambda x: apply_rotary_emb_torch(x, ANGLE[:40].cos(), ANGLE[:40].sin()),
        ((2, 40, 4, 24),),
    ),
    "rotary layer": (rotated_by_layer, ((2, 40, 3, 4, 24),)),
    "combine": (
        lambda out, lse: flash_attn_combine(out, lse.float()),
        ((3, 2, 40, 4, 24), (3, 2, 40, 4)),
    ),
    "combine of packed sequences": (
        lambda out, lse: flash_attn_combine(out, lse.float(), cu_seqlens=CU),
        ((3, 40, 4, 24), (3, 40, 4)),
    ),
    "bert_padding": (padded, ((2, 16, 24),)),
    "cross-entropy": (
        lambda x: CrossEntropyLoss(label_smoothing=0.1, lse_square_scale=0.1)(
            x, torch.arange(40).view(2, 20)
        ),
        ((2, 20, 50),),
    ),
    "quantize": (quantized, BATCH),
}


@pytest.mark.parametrize("autocast", HALF, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_the_rest_stays(name: str, dtype: torch.dtype, autocast: torch.dtype, seed: int) -> None:
    entry, shapes = EXACT[name]
    inputs = heads(seed, dtype, *shapes)
    assert_equal(run(entry, inputs, autocast), run(entry, inputs, None))


@pytest.mark.parametrize("autocast", HALF, ids=str)
def test_what_a_score_function_computes_from_captured_tensors_stays(
    autocast: torch.dtype, seed: int
) -> None:
    q, k, v, a, b = heads(seed, torch.float32, *BATCH, (4, 16), (16, 50))
    results = []
    for is_on in (False, True):
        leaves = [x.clone().requires_grad_() for x in (a, b)]
        with torch.autocast("cpu", dtype=autocast, enabled=is_on):
            left, right = leaves
            out = flashtile.attention(
                *(x.to(autocast) for x in (q, k, v)),
                score_mod=lambda s, b, h, i, j: s + (left @ right)[h, j],  # noqa: B023
            )
        results.append([out, *torch.autograd.grad(out.float().sum(), leaves)])
    assert_equal(*results)


@pytest.mark.parametrize("autocast", HALF, ids=str)
def test_what_a_mask_function_computes_stays(autocast: torch.dtype, seed: int) -> None:
    left, right = heads(seed, torch.float32, (40, 16), (16, 40))
    masks = []
    for is_on in (False, True):
        with torch.autocast("cpu", dtype=autocast, enabled=is_on):
            mask = BlockMask.from_function(
                lambda b, h, i, j: (left @ right)[i, j] > 0, (40, 40), tile_size=(16, 16)
            )
        masks.append(mask.to_dense(40, 40))
    assert torch.equal(*masks)


NEW_TOKENS = ((2, 5, 4, 24), (2, 5, 2, 24), (2, 5, 2, 24))


@pytest.mark.parametrize("autocast", HALF, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("entry", [with_cache, with_absorbed_cache])
def test_caches(entry: Entry, dtype: torch.dtype, autocast: torch.dtype, seed: int) -> None:
    """A call computes in the dtype of its cache."""
    inputs = heads(seed, dtype, *NEW_TOKENS)
    assert_equal(run(entry, inputs, autocast), run(entry, inputs, None))


@pytest.mark.parametrize("autocast", HALF, ids=str)
def test_float8_caches(autocast: torch.dtype, seed: int) -> None:
    inputs = heads(seed, autocast, *NEW_TOKENS)
    assert_equal(run(with_float8_cache, inputs, autocast), run(with_float8_cache, inputs, None))


@pytest.mark.parametrize("autocast", HALF, ids=str)
def test_linear_cross_entropy(autocast: torch.dtype, seed: int) -> None:
    def entry(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        target = torch.arange(40).view(2, 20)
        loss = CrossEntropyLoss(label_smoothing=0.1)
        return linear_cross_entropy(hidden, weight, target, loss, bias=bias, chunk_tokens=7)

    inputs = heads(seed, autocast, (2, 20, 16), (50, 16), (50,))
    assert_equal(run(entry, inputs, autocast), run(entry, inputs, None))
    exact = [x.double() for x in inputs]  # which autocast does not cast
    assert_equal(run(entry, exact, autocast), run(entry, exact, None))


@pytest.mark.parametrize("autocast", HALF, ids=str)
@pytest.mark.parametrize(
    "layer",
    [
        lambda: MHA(32, 4, 2, causal=True, rotary_emb_dim=8, softcap=1.0),
        lambda: MHA(32, 4, causal=True, use_alibi=True),
        lambda: Block(32, lambda dim: MHA(dim, 4, causal=True, use_alibi=True), Mlp),
    ],
    ids=["MHA", "MHA with ALiBi", "Block"],
)
def test_modules(layer: Callable[[], torch.nn.Module], autocast: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    module = layer().to(autocast)
    (x,) = heads(seed, autocast, (2, 40, 32))

    def entry(x: Tensor, *parameters: Tensor) -> Any:
        names = [name for name, _ in module.named_parameters()]
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    inputs = [x, *module.parameters()]
    assert_equal(run(entry, inputs, autocast), run(entry, inputs, None))


@pytest.mark.parametrize("autocast", HALF, ids=str)
def test_tables_made_under_autocast_are_those_made_without(autocast: torch.dtype) -> None:
    inside, outside = RotaryEmbedding(16, scale_base=512), RotaryEmbedding(16, scale_base=512)
    with torch.autocast("cpu", dtype=autocast):
        inside._update_cos_sin_cache(64, torch.device("cpu"), torch.float32)
    outside._update_cos_sin_cache(64, torch.device("cpu"), torch.float32)
    for name in ("_cos_cached", "_sin_cached", "_cos_k_cached", "_sin_k_cached"):
        assert torch.equal(getattr(inside, name), getattr(outside, name))


@pytest.mark.slow
def test_compiled(seed: int) -> None:
    entry, shapes = ATTENTION["softcap"]
    inputs = heads(seed, torch.float16, *shapes)
    compiled = torch.compile(entry, backend="aot_eager")
    assert_equal(run(compiled, inputs, torch.float16), run(entry, inputs, None))


def test_compiled_rotary(seed: int) -> None:
    inputs = heads(seed, torch.float16, (2, 40, 4, 24))
    compiled = torch.compile(rotated, backend="aot_eager")
    assert_equal(run(compiled, inputs, torch.bfloat16), run(rotated, inputs, None))


def test_autocast_of_another_device(seed: int) -> None:
    """Autocast for a GPU does not affect CPU tensors."""
    entry, shapes = ATTENTION["softcap"]
    inputs = heads(seed, torch.float32, *shapes)
    torch.set_autocast_enabled("cuda", True)
    try:
        got = run(entry, inputs, None)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert_equal(got, run(entry, inputs, None))
