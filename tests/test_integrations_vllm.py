"""vLLM's calls, on stand-ins of its interface: two steps of a few requests over one paged cache."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import vllm_interface
from torch import Tensor

from flashtile.testing import assert_close

HEADS, KV_HEADS, HEAD_SIZE, PAGES, PAGE = 4, 2, 24, 12, 5
NEW, BEFORE = (3, 1, 7), (4, 11, 0)  # tokens of each request in this step, and before it


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, module in vllm_interface.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "flashtile.integrations.vllm", raising=False)
    monkeypatch.setattr(vllm_interface.AttentionBackendEnum, "registered", None)
    from flashtile.integrations import vllm

    yield vllm
    sys.modules.pop("flashtile.integrations.vllm", None)


def visible(query: int, keys: int, causal: bool, left: int | None, right: int) -> Tensor:
    """(query, keys) bool: what the last `query` of `keys` tokens see."""
    i = torch.arange(keys - query, keys)[:, None]
    j = torch.arange(keys)
    seen = (j <= i) if causal else torch.ones(query, keys, dtype=torch.bool)
    return seen if left is None else seen & (i - j < left) & (j - i <= right)


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, options: dict) -> Tensor:
    """(queries, heads, head_size), step by step, in the dtype of the inputs."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q * 0.2, k)
    if cap := options.get("logits_soft_cap"):
        s = cap * torch.tanh(s / cap)
    if (slopes := options.get("alibi_slopes")) is not None:
        i = torch.arange(len(k) - len(q), len(k), dtype=s.dtype)[:, None]
        s = (
            s
            - torch.tensor(slopes, dtype=s.dtype)[:, None, None] * (i - torch.arange(len(k))).abs()
        )
    s = s.masked_fill(~seen, -torch.inf)
    sink = options.get("sinks")
    if sink is not None:
        s = torch.cat([s, sink.to(s.dtype)[:, None, None].expand(-1, len(q), 1)], -1)
    p = s.softmax(-1)
    return torch.einsum("hij,jhd->ihd", p if sink is None else p[..., :-1], v)


def step(counts: tuple[int, ...], before: tuple[int, ...], page_table: Tensor) -> SimpleNamespace:
    """vLLM's metadata of a step, with one token and one request of padding."""
    ends = torch.tensor([0, *counts, 0]).cumsum(0).to(torch.int32)
    lengths = [n + m for n, m in zip(counts, before, strict=True)]
    places = [
        page_table[b, position // PAGE] * PAGE + position % PAGE
        for b, (n, m) in enumerate(zip(counts, before, strict=True))
        for position in range(m, m + n)
    ]
    return vllm_interface.CommonAttentionMetadata(
        query_start_loc=ends,
        query_start_loc_cpu=ends,
        seq_lens=torch.tensor([*lengths, 0], dtype=torch.int32),
        num_reqs=len(counts) + 1,
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=max(lengths) + 2,  # an upper bound
        block_table_tensor=torch.cat([page_table, page_table[:1] * 0]),
        slot_mapping=torch.tensor([*places, -1]),
    )


OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 3},
    "softcap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 1.0]},
    "sinks": {"sinks": torch.tensor([0.0, 1.0, -1.0, 3.0])},
    "both sides": {"causal": False},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_over_a_paged_cache(backend: ModuleType, options: dict, dtype: torch.dtype) -> None:
    options = dict(options)
    causal = options.pop("causal", True)
    layer = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0))
    impl = backend.FlashtileImpl(HEADS, HEAD_SIZE, 0.2, KV_HEADS, **options)
    builder = backend.FlashtileMetadataBuilder(None, ["0"], None, torch.device("cpu"))
    # vLLM's order of the dimensions in memory: pages, rows, heads. Page 0 is nobody's.
    shape = PAGES, PAGE, KV_HEADS, 2 * HEAD_SIZE
    cache = torch.full(shape, torch.nan, dtype=dtype).transpose(1, 2)
    page_table = torch.randperm(PAGES - 1)[: 3 * 3].view(3, 3).to(torch.int32) + 1
    history = [torch.empty(0, 2, KV_HEADS, HEAD_SIZE, dtype=dtype) for _ in NEW]
    for counts, before in ((BEFORE, (0, 0, 0)), (NEW, BEFORE)):
        tokens = sum(counts)
        q = torch.randn(tokens + 1, HEADS, HEAD_SIZE).to(dtype)
        kv = torch.randn(tokens + 1, 2, KV_HEADS, HEAD_SIZE).to(dtype)
        common = step(counts, before, page_table)
        common.causal = causal
        metadata = builder.build(0, common)
        impl.do_kv_cache_update(layer, kv[:, 0], kv[:, 1], cache, common.slot_mapping)
        output = torch.full((tokens + 1, HEADS * HEAD_SIZE), torch.nan, dtype=dtype)
        result = impl.forward(layer, q, kv[:, 0], kv[:, 1], cache, metadata, output)
        assert result is output
        assert result[tokens:].isnan().all()
        written = (~cache.isnan()).sum(dim=(1, 2, 3)) // (KV_HEADS * 2 * HEAD_SIZE)
        assert written[1:].sum() == sum(counts) + sum(before)  # padding is in page 0
        start = 0
        for b, count in enumerate(counts):
            history[b] = torch.cat([history[b], kv[start : start + count]])
            if count:
                k, v = history[b].unbind(1)
                seen = visible(count, len(k), causal, options.get("sliding_window"), 0)
                mine = q[start : start + count], k, v
                exact = attended(*(x.double() for x in mine), seen, options)
                plain = attended(*mine, seen, options)
                out = result[start : start + count].view(count, HEADS, HEAD_SIZE)
                assert_close(f"out of request {b}", out, exact, plain)
            start += count


def test_float8_pages(backend: ModuleType) -> None:
    layer = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
    impl = backend.FlashtileImpl(HEADS, HEAD_SIZE, 0.2, KV_HEADS, kv_cache_dtype="fp8")
    builder = backend.FlashtileMetadataBuilder(None, ["0"], None, torch.device("cpu"))
    cache = torch.zeros(PAGES, PAGE, KV_HEADS, 2 * HEAD_SIZE, dtype=torch.uint8).transpose(1, 2)
    q, kv = torch.randn(7, HEADS, HEAD_SIZE).half(), torch.randn(7, 2, KV_HEADS, HEAD_SIZE).half()
    kv[0] = 1000.0  # beyond the range of float8: the largest number of it
    common = step((6,), (0,), torch.tensor([[3, 1]], dtype=torch.int32))
    impl.do_kv_cache_update(layer, kv[:, 0], kv[:, 1], cache, common.slot_mapping)
    output = torch.empty_like(q)
    impl.forward(layer, q, kv[:, 0], kv[:, 1], cache, builder.build(0, common), output)
    scales = torch.tensor([0.5, 0.25])[:, None, None]
    rounded = (kv[:6] / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
    k, v = rounded.double().unbind(1)
    seen = visible(6, 6, True, None, 0)
    exact = attended(q[:6].double(), k, v, seen, {})
    plain = attended(q[:6], k.half(), v.half(), seen, {})
    assert_close("out", output[:6], exact, plain)


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
def test_an_encoder_has_no_cache(backend: ModuleType, kind: str) -> None:
    impl = backend.FlashtileImpl(HEADS, HEAD_SIZE, 0.2, HEADS, sliding_window=4, attn_type=kind)
    builder = backend.FlashtileMetadataBuilder(None, ["0"], None, torch.device("cpu"))
    qkv = [torch.randn(12, HEADS, HEAD_SIZE, dtype=torch.float64) for _ in range(3)]
    common = step(NEW, (0, 0, 0), torch.zeros(3, 3, dtype=torch.int32))
    cache = torch.empty(0)
    impl.do_kv_cache_update(None, *qkv[1:], cache, common.slot_mapping)
    output = torch.empty_like(qkv[0])
    impl.forward(None, *qkv, cache, builder.build(0, common), output)
    for start, end in ((0, 3), (3, 4), (4, 11)):
        q, k, v = (x[start:end] for x in qkv)
        seen = visible(end - start, end - start, False, 4, 3)
        s = torch.einsum("ihd,jhd->hij", q * 0.2, k).masked_fill(~seen, -torch.inf)
        exact = torch.einsum("hij,jhd->ihd", s.softmax(-1), v)
        s = torch.einsum("ihd,jhd->hij", q.float() * 0.2, k.float()).masked_fill(~seen, -torch.inf)
        plain = torch.einsum("hij,jhd->ihd", s.softmax(-1), v.float())
        assert_close("out", output[start:end], exact, plain)


def test_registration(backend: ModuleType) -> None:
    backend.register()
    name = vllm_interface.AttentionBackendEnum.registered
    assert name == "flashtile.integrations.vllm.FlashtileBackend"
    vllm_interface.AttentionBackendEnum.registered = "another.Backend"
    backend.register()
    assert vllm_interface.AttentionBackendEnum.registered == "another.Backend"
    ours = backend.FlashtileBackend
    assert ours.get_impl_cls() is backend.FlashtileImpl
    assert ours.get_builder_cls() is backend.FlashtileMetadataBuilder
    assert ours.supports_head_size(512) and not ours.supports_head_size(576)
    assert ours.supports_attn_type("decoder") and not ours.supports_attn_type("encoder_decoder")


def test_what_is_refused(backend: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="attn_type: got 'encoder_decoder'"):
        backend.FlashtileImpl(HEADS, HEAD_SIZE, 0.2, attn_type="encoder_decoder")
    impl = backend.FlashtileImpl(HEADS, HEAD_SIZE, 0.2)
    x = torch.ones(1, HEADS, HEAD_SIZE)
    with pytest.raises(NotImplementedError, match="output_scale"):
        impl.forward(None, x, x, x, x, None, x, output_scale=x)
    assert impl.forward(None, x, x, x, x, None, torch.ones(2)).eq(0).all()  # a run for its memory
    older = torch.ones(2, PAGES, PAGE, HEADS, HEAD_SIZE)  # a cache of earlier releases of vLLM
    with pytest.raises(ValueError, match=r"kv_cache: got shape \(2, 12, 5, 4, 24\)"):
        impl.do_kv_cache_update(None, x, x, older, torch.zeros(1))
    builder = backend.FlashtileMetadataBuilder(None, ["0"], None, torch.device("cpu"))
    common = step((1,), (0,), torch.zeros(1, 1, dtype=torch.int32))
    for field, value in (("causal", torch.ones(1)), ("rswa_prefix_lens", torch.ones(1))):
        changed = SimpleNamespace(**{**vars(common), field: value})
        with pytest.raises(NotImplementedError, match=field):
            builder.build(0, changed)
