"""The benchmark's caches: in pages, in float8, with the query's own token appended."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import peers, presets, run, shapes
from benchmarks.shapes import Case, vary

pytestmark = pytest.mark.slow

SMALL = Case(heads_q=4, heads_kv=2, head_dim=16, head_dim_v=16, seqlen_q=160, seqlen_k=160)
QUICK = run.Settings(peers=("flashtile", "sdpa", "standard"), seconds=0, min_rounds=1)


def test_pages_hold_the_contiguous_cache() -> None:
    case = vary(replace(SMALL, batch=3), "paged-decode")
    inputs = shapes.make_inputs(case)
    assert inputs.k_pages is not None
    assert inputs.v_pages is not None
    assert inputs.page_table is not None
    for pages, whole in ((inputs.k_pages, inputs.k), (inputs.v_pages, inputs.v)):
        assert torch.equal(pages[inputs.page_table.long()].flatten(1, 2), whole)


def test_a_float8_cache_holds_half_the_bytes_and_is_read_by_us_alone() -> None:
    case = vary(replace(SMALL, dtype="bfloat16"), "paged-decode")
    small = replace(case, cache_dtype="float8_e4m3fn")
    assert shapes.cache_bytes(small) * 2 == shapes.cache_bytes(case)
    ours, *others = run.measure_case(small, QUICK)
    assert not ours.skipped
    assert all(row.skipped for row in others)
    assert ours.max_error is None  # other keys than the case's


def test_an_appended_token_is_the_last_of_the_cache() -> None:
    case = replace(vary(replace(SMALL, batch=2), "decode"), appends=True)
    inputs = shapes.make_inputs(case)
    before = inputs.k.clone()
    with torch.no_grad():
        peers.flashtile(case, inputs).forward()
    assert inputs.v_new is not None
    assert torch.equal(inputs.k[:, :-1], before[:, :-1])
    assert not torch.equal(inputs.k[:, -1], before[:, -1])
    assert torch.equal(inputs.v[:, -1:], inputs.v_new)


def test_a_step_may_append_without_rotating() -> None:
    case = replace(vary(replace(SMALL, batch=2), "decode"), appends=True, rotates=False)
    inputs = shapes.make_inputs(case)
    with torch.no_grad():
        peers.flashtile(case, inputs).forward()
    assert inputs.k_new is not None
    assert torch.equal(inputs.k[:, -1:], inputs.k_new)
    assert torch.equal(inputs.v[:, -1:], inputs.v_new)


def test_the_host_time_of_decoding_steps_is_measured() -> None:
    """Of each kind at batch 1, 8 and 16; here with short caches, on a CPU."""
    steps = [case for case in presets.preset_cases("gpu-host") if case.cached]
    assert sorted({(case.appends, case.rotates, case.batch) for case in steps}) == [
        (appends, rotates, batch)
        for appends, rotates in ((False, False), (True, False), (True, True))
        for batch in (1, 8, 16)
    ]
    for case in steps:
        if case.batch == 8:
            short = replace(case, dtype="float32", head_dim=16, head_dim_v=16, seqlen_k=32)
            ours, *_ = run.measure_case(short, replace(QUICK, host=True))
            assert not ours.skipped
            assert (ours.host_us or 0) > 1
