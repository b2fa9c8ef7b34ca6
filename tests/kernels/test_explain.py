"""`explain` for a GPU that is absent."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flashtile
from flashtile.backends.hopper.forward import plan as hopper_plan
from flashtile.backends.triton import plan, support
from flashtile.call import dispatch
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.gpu import hardware
from flashtile.lru import clear_caches
from flashtile.masks import BlockMask
from flashtile.problem import AttentionProblem, Operands, Options


def explained(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    plan.plan.cache_clear()
    with FakeTensorMode():  # tensors without memory: a device is only a name
        q = torch.empty(1, 128, 4, 64, dtype=dtype, device="cuda")
        return str(flashtile.explain(q, q, q, causal=True, backend="triton"))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_a_gpu_that_was_only_compiled_for(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
):
    name = f"sm_{capability[0]}{capability[1]}"
    report = explained(monkeypatch, capability)
    assert "-> triton: yes" in report
    assert f"untested: the kernels compile for {name}, but have never run on it" in report


@pytest.mark.parametrize(
    ("capability", "allows_tf32", "wanted"),
    [
        ((9, 0), False, "float32: six products of bfloat16 parts on tensor cores"),
        ((9, 0), True, "float32: one product in TF32"),
        ((8, 0), False, "float32: without tensor cores"),
    ],
)
def test_products_of_float32(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], allows_tf32: bool, wanted: str
):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allows_tf32 else "ieee"
    try:
        assert wanted in explained(monkeypatch, capability, torch.float32)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert "float32:" not in explained(monkeypatch, capability)


@pytest.mark.parametrize(
    ("seq_q", "head_dims", "wanted"),
    [
        (1, (128, 128), "16 x 64, head dim padded to 128, 4 warps, 3 stages, 4 query heads in a "
            "tile, keys split into 32 parts"),
        (300, (128, 128), "64 x 64, head dim padded to 128, 4 warps, 3 stages"),
        (1, (576, 512), "16 x 16, head dim padded to 576, 4 warps, 3 stages, 4 query heads in a "
            "tile, keys split into 33 parts"),
    ],
    ids=["decoding", "prefill", "latent keys"],
)  # fmt: skip
def test_the_parts_of_a_cache_call(
    monkeypatch: pytest.MonkeyPatch, seq_q: int, head_dims: tuple[int, int], wanted: str
):
    """Few queries against a long cache: the tile of the split KV loop, and its parts."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(1, seq_q, 32, head_dims[0], dtype=torch.bfloat16, device="cuda")
        k, v = (torch.empty(1, 32768, 8, d, dtype=q.dtype, device="cuda") for d in head_dims)
        report = str(flashtile.explain(q, k, v, backend="triton"))
    assert f"forward: tiles of {wanted}\n" in report + "\n"


@pytest.mark.parametrize(
    ("length", "head_dims", "wanted"),
    [
        (49, (4, 4, 32), "64 x 64, head dim padded to 32, 2 warps"),
        (64, (16, 16, 80), "64 x 64, head dim padded to 128, 4 warps"),
        (64, (4, 2, 80), "64 x 64, head dim padded to 128, 8 warps"),
        (9, (8, 8, 64), "16 x 16, head dim padded to 64, 2 warps"),
    ],
    ids=str,
)
def test_short_sequences_go_to_triton_on_hopper(
    monkeypatch: pytest.MonkeyPatch, length: int, head_dims: tuple[int, int, int], wanted: str
):
    """One kernel for the forward and one for the backward; the report says why not Hopper's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(hopper_plan, "TRITON_VERSION", hopper_plan.OLDEST_TRITON)
    Hq, Hk, D = head_dims
    with FakeTensorMode():
        q = torch.empty(8, length, Hq, D, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(8, length, Hk, D, dtype=torch.bfloat16, device="cuda")
        report = str(flashtile.explain(q, k, k))
    assert f"hopper: no: {length} queries (at least 65)" in report
    assert "-> triton: yes" in report
    assert f"forward: tiles of {wanted}, 1 stages" in report
    assert f"dQ, dK and dV in one kernel: tiles of {wanted}, 1 stages" in report


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"M": 2, "N": 1}, True),
        ({"M": 1}, False),
        ({"M": 65}, False),
        ({"N": 65}, False),
        ({"M": 0}, False),
        ({"N": 0}, False),
        ({"D": 129}, False),
        ({"Dv": 129}, False),
        ({"dtype": torch.float32}, False),
        ({"page_size": 16}, False),
        ({"has_cache_rows": True}, False),
        ({"has_float8_keys": True}, False),
        ({"runs": 1}, False),
        ({"is_partial": True}, False),
        ({"block_tile": (16, 16)}, False),
        ({"spans": 1}, False),
        ({"layout": "packed", "has_lengths": True, "has_bias": True, "has_sink": True}, True),
    ],
    ids=str,
)
def test_which_calls_have_kernels_for_short_sequences(change: dict[str, Any], expected: bool):
    q = torch.empty(2, 64, 4, 128, dtype=torch.float16, device="meta")
    problem = AttentionProblem.of(Operands(q, q, q), Options(64, 64, 0.1))
    problem = problem._replace(device_type="cuda", capability=(9, 0), **change)
    assert plan.is_short(problem) == expected
    assert (plan.plan(problem, True).short is not None) == expected


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, []),
        ({"needs_grad": True}, ["gradients at head_dim=576 (forward only"]),
        ({"wants_probabilities": True}, ["probabilities at head_dim=576 (forward only"]),
        ({"has_float8_keys": True}, ["float8 keys and values at head_dim=576 (forward only"]),
        ({"D": 577}, ["head_dim=577 (at most 576)"]),
        ({"Dv": 513}, ["value head_dim=513 (at most 512)"]),
    ],
    ids=str,
)
def test_latent_keys_are_for_the_forward_alone(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], wanted: list[str]
):
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    q = torch.empty(1, 128, 4, 576, dtype=torch.bfloat16, device="meta")
    problem = AttentionProblem.of(Operands(q, q, q[..., :512]), Options(128, 128, 0.1))
    problem = problem._replace(device_type="cuda", capability=(9, 0), **change)
    reasons = support.unsupported_reasons(problem)
    assert [x[: len(y)] for x, y in zip(reasons, wanted, strict=True)] == wanted


@pytest.mark.parametrize(
    ("values", "keys"),
    [("first columns", 64), ("a head added later", 64), ("last columns", 32), ("of their own", 32)],
)
def test_tiles_of_latents_hold_keys_and_values(values: str, keys: int):
    latents, other = torch.empty(2, 2, 300, 1, 576, dtype=torch.bfloat16, device="meta")
    v = {
        "first columns": latents[..., :512],
        "a head added later": latents[:, :, 0, :512].unsqueeze(2),  # another stride of heads
        "last columns": latents[..., 64:],
    }
    q = torch.empty(2, 1, 128, 576, dtype=torch.bfloat16, device="meta")
    operands = Operands(q, latents, v.get(values, other[..., :512]))
    problem = AttentionProblem.of(operands, Options(1, 300, 0.1))
    problem = problem._replace(device_type="cuda", capability=(9, 0))
    config = plan.plan(problem, True).split.config
    assert (keys == 64, keys) == (config.HAS_VALUES_IN_KEYS, config.BLOCK_N)
    few = plan.plan(problem._replace(Hq=16), True).split.config
    assert (16, keys // 2) == (few.BLOCK_M, few.BLOCK_N)
    for other_tiles in ({"batch_invariant": True}, {"k_unpack": "x", "v_unpack": "y"}):
        changed = problem._replace(options=problem.options._replace(**other_tiles))
        assert not plan.has_latents(changed)


@pytest.mark.parametrize(("mask_tile", "warps"), [((128, 128), 8), ((64, 64), 4), ((128, 64), 4)])
def test_small_tiles_of_a_block_mask_take_four_warps(mask_tile: tuple[int, int], warps: int):
    kinds = torch.ones(1, 1, 256 // mask_tile[0], 256 // mask_tile[1], dtype=torch.bool)
    mask = BlockMask.from_tiles(kinds, mask_tile)
    q = torch.empty(1, 256, 2, 128)
    operands, options = describe((q, q, q), Dense(), {"block_mask": mask})
    problem = AttentionProblem.of(operands, options)
    facts = {"device_type": "cuda", "capability": (9, 0), "dtype": torch.bfloat16}
    found = plan.plan(problem._replace(**facts), True)
    assert found.forward.warps == warps
    assert found.queries.warps == (4 if warps == 4 else plan.tiles_for("sm_90", 128)[2].warps)
    assert min(128, mask_tile[1]) == found.forward.config.BLOCK_N


def test_an_amd_gpu_was_only_compiled_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "is_rocm", lambda: True)
    report = explained(monkeypatch, (9, 4))
    assert "untested: the kernels compile for ROCm, but have never run on it" in report


def test_a_gpu_that_ran(monkeypatch: pytest.MonkeyPatch):
    assert "never run" not in explained(monkeypatch, (9, 0))


@pytest.mark.parametrize(
    ("dtype", "intervals", "reason"),
    [
        (torch.bfloat16, 2, ""),
        (torch.bfloat16, 3, "a mask of 3 intervals (on this backend: at most 2)"),
        (torch.float8_e4m3fn, 2, "a mask of spans (not in float8 on this backend)"),
    ],
    ids=str,
)
def test_spans_go_to_hopper_or_triton(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, intervals: int, reason: str
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(hopper_plan, "TRITON_VERSION", hopper_plan.OLDEST_TRITON)
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(1, 300, 4, 64, dtype=dtype, device="cuda")
        bounds = torch.empty(1, 1, 300, intervals, dtype=torch.int32, device="cuda")
        report = str(flashtile.explain(q, q, q, mask=flashtile.Spans(bounds, bounds)))
    assert f"-> {'triton' if reason else 'hopper'}: yes" in report
    assert reason in report


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [(torch.bfloat16, ""), (torch.float8_e4m3fn, "dropout (not in float8 on this backend)")],
    ids=str,
)
def test_dropout_goes_to_hopper_or_triton(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, reason: str
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(hopper_plan, "TRITON_VERSION", hopper_plan.OLDEST_TRITON)
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(1, 300, 4, 64, dtype=dtype, device="cuda")
        report = str(flashtile.explain(q, q, q, dropout_p=0.1))
    assert f"-> {'triton' if reason else 'hopper'}: yes" in report
    assert reason in report


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_spans_go_to_hopper_or_triton(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(hopper_plan, "TRITON_VERSION", hopper_plan.OLDEST_TRITON)
    with FakeTensorMode():
        q = torch.empty(1, 300, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        bounds = torch.empty(1, 1, 300, 2, dtype=torch.int32, device="cuda")
        mask = flashtile.Spans(bounds, bounds)
        report = str(flashtile.explain(q, q, q, mask=mask, deterministic=deterministic))
    assert f"-> {'triton' if deterministic else 'hopper'}: yes" in report
    reason = "deterministic gradients of a mask of spans (not on this backend)"
    assert (reason in report) == deterministic


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_float8_goes_to_hopper(monkeypatch: pytest.MonkeyPatch, head_dim: int):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hopper_plan, "TRITON_VERSION", hopper_plan.OLDEST_TRITON)
    with FakeTensorMode():
        q = torch.empty(1, 128, 4, head_dim, dtype=torch.float8_e4m3fn, device="cuda")
        report = str(flashtile.explain(q, q, q, causal=True))
    assert "-> hopper: yes" in report
    assert "forward in float8: tiles of" in report


@pytest.mark.parametrize(
    ("seq_q", "options", "chosen"),
    [
        (300, {}, "hopper"),
        (300, {"attention_chunk": 64}, "triton"),
        (300, {"seqused_k": 1}, "triton"),
        (1, {}, "triton"),
        (1, {"q_descale": (1, 4, 1), "k_descale": (1, 4, 4), "v_descale": (1, 4, 4)}, "triton"),
    ],
    ids=["plain", "chunk", "lengths", "one query", "per-block scales"],
)
def test_float8_runs_by_one_kernel_or_the_other(
    monkeypatch: pytest.MonkeyPatch, seq_q: int, options: dict[str, Any], chosen: str
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(hopper_plan, "TRITON_VERSION", (3, 6))
    with FakeTensorMode(), torch.no_grad():
        made = {"dtype": torch.float8_e4m3fn, "device": "cuda"}
        q, k = (torch.empty(1, n, 4, 64, **made) for n in (seq_q, 400))
        given = dict(options)
        if "seqused_k" in given:
            given["seqused_k"] = torch.ones(1, dtype=torch.int32, device="cuda")
        for name, shape in options.items():
            if name.endswith("_descale"):
                given[name] = torch.ones(shape, device="cuda")
        report = str(flashtile.explain(q, k, k, **given))
    assert f"-> {chosen}: yes" in report
    assert "16-bit queries and weights with float8 keys and values" in report


@pytest.mark.parametrize(
    ("change", "refuses", "reason"),
    [
        ({"runs": 32}, "hopper", "parts of sequences in 32 runs (at most 16)"),
        ({"runs": 2, "has_alibi": True}, "hopper", "ALiBi on parts of sequences (not on"),
        ({"is_partial": True, "layout": "dense"}, "hopper", "parts of sequences in a dense batch"),
        ({"runs": 32}, "triton", "parts of sequences in 32 runs (at most 16)"),
    ],
    ids=str,
)
def test_parts_of_sequences_that_a_backend_refuses(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], refuses: str, reason: str
):
    """Triton runs what Hopper does not have."""
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(hopper_plan, "TRITON_VERSION", hopper_plan.OLDEST_TRITON)
    clear_caches()
    q = torch.empty(2, 128, 4, 64, dtype=torch.bfloat16, device="meta")
    whole = AttentionProblem.of(Operands(q, q, q), Options(128, 128, 0.1))
    whole = whole._replace(device_type="cuda", capability=(9, 0), layout="packed")
    parts = whole._replace(runs=4, is_partial=True)
    assert dispatch.select(parts) == "hopper"
    problem = whole._replace(**change)
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        dispatch.select(problem, refuses)
    if problem.runs <= 16:
        assert dispatch.select(problem) == "triton"


@pytest.mark.parametrize("names", [("entropy",), ("max_logit",), ("column_sum",)])
@pytest.mark.parametrize("has_alibi", [False, True])
def test_the_forward_with_statistics_and_alibi_is_tritons(
    monkeypatch: pytest.MonkeyPatch, has_alibi: bool, names: tuple[str, ...]
):
    """The Hopper kernel has no largest score before ALiBi; the backward may still be Hopper's."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(hopper_plan, "TRITON_VERSION", (3, 6))
    clear_caches()
    with FakeTensorMode():
        q = torch.empty(2, 4096, 4, 64, dtype=torch.bfloat16, device="cuda")
        slopes = torch.empty(4, device="cuda") if has_alibi else None
        found = flashtile.explain(q, q, q, causal=True, alibi_slopes=slopes, return_stats=names)
    is_hopper = not has_alibi or names == ("column_sum",)
    assert found.chosen == ("hopper" if is_hopper else "triton")
    says_why = "statistics with ALiBi, relative_bias or score_mod (not on this backend)" in str(
        found
    )
    assert says_why != is_hopper


@pytest.mark.parametrize("needs_grad", [False, True])
def test_hopper_runs_relative_biases_and_learned_slopes_where_the_caller_names_it(
    monkeypatch: pytest.MonkeyPatch, needs_grad: bool
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(hopper_plan, "TRITON_VERSION", (3, 6))
    clear_caches()
    with FakeTensorMode():
        q = torch.empty(2, 512, 4, 64, dtype=torch.bfloat16, device="cuda")
        table = torch.empty(4, 257, device="cuda", requires_grad=needs_grad)
        slopes = torch.empty(4, device="cuda", requires_grad=needs_grad)
        for backend in (None, "hopper"):
            found = flashtile.explain(q, q, q, alibi_slopes=slopes, backend=backend)
            assert found.chosen == ("hopper" if backend or not needs_grad else "triton")
            assert "hopper: yes" in str(found)
            found = flashtile.explain(q, q, q, relative_bias=table, backend=backend)
            assert found.chosen == (backend or "triton")
            assert 'after the other backends, unless backend="hopper" is given' in str(found)
        with_dropout = flashtile.explain(q, q, q, relative_bias=table, dropout_p=0.1)
    assert with_dropout.chosen == "triton"
    assert "dropout with a score_mod or relative_bias" in str(with_dropout)


def test_numbers_that_a_relative_bias_would_displace(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(hopper_plan, "TRITON_VERSION", (3, 6))
    clear_caches()
    q = torch.empty(2, 128, 4, 64, dtype=torch.bfloat16, device="meta")
    options = Options(128, 128, 0.1, score_mod="t: float32 = values(0, (4,), h)\nreturn t")
    call = AttentionProblem.of(Operands(q, q, q, relative_bias=torch.empty(4, 9)), options)
    call = call._replace(device_type="cuda", capability=(9, 0))
    with pytest.raises(NotImplementedError, match="with a score_mod that captures numbers"):
        dispatch.select(call, "hopper")


@pytest.mark.parametrize(
    ("batch", "heads", "new", "keys", "options", "is_split"),
    [
        (1, 32, 70, 32768, {}, True),  # measured: 160 us, and 412 on Hopper
        (1, 32, 128, 4096, {}, True),
        (3, 16, 65, 9000, {"softcap": 30.0}, True),
        (1, 8, 129, 32768, {}, False),  # Triton does not split keys
        (1, 32, 70, 32768, {"num_splits": 1}, False),
        (1, 32, 70, 4095, {}, False),
        (1, 32, 70, 32768, {"window_size": (8192, 0)}, False),
        (2, 32, 70, 32768, {}, False),  # 64 tiles
        (4, 32, 512, 8192, {}, False),  # measured
        (1, 32, 2048, 32768, {}, False),  # measured
    ],
)
def test_few_tiles_of_queries_on_many_keys_are_tritons(
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    heads: int,
    new: int,
    keys: int,
    options: dict[str, Any],
    is_split: bool,
):
    """Where its kernels split keys; over rows and pages of a cache, in dense and packed batches."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(hopper_plan, "TRITON_VERSION", (3, 6))
    clear_caches()
    make = partial(torch.empty, dtype=torch.bfloat16, device="cuda")
    with FakeTensorMode():
        q, cache = make(batch, new, heads, 128), make(batch, keys, 8, 128)
        used = torch.empty(batch, dtype=torch.int32, device="cuda")
        starts = torch.empty(batch + 1, dtype=torch.int32, device="cuda")
        pages = make(99, 64, 8, 128)
        table = torch.empty(batch, keys // 64, dtype=torch.int32, device="cuda")
        dense = partial(flashtile.explain, causal=True, **options)
        cached = partial(dense, flashtile.attention_with_kvcache, q, cache_seqlens=used)
        flat = [x.flatten(0, 1) for x in (q, cache, cache)]
        reports = [
            cached(cache, cache),
            cached(pages, pages, page_table=table),
            dense(q, cache, cache),
            dense(flashtile.attention_varlen, *flat, starts, starts, new, keys),
        ]
        trained = dense(q.requires_grad_(), cache, cache)
    assert trained.chosen == "hopper"
    why = 'unless backend="hopper" is given: fewer than 64 tiles of queries'
    for report in reports:
        assert report.chosen == ("triton" if is_split else "hopper")
        assert (why in str(report)) == is_split
        if is_split:
            split = plan.plan(report.problem, True).split.config
            assert plan.splits_of(report.problem, split, 132, batch * new) > 1
