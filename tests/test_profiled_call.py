"""The call that a profiler watches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import profiled_call


@pytest.mark.parametrize("cached", [False, True])
def test_it_runs_the_case_of_a_set(
    cached: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = {"heads_q": 2, "heads_kv": 1, "seqlen_q": 1, "seqlen_k": 30, "cached": cached}
    (tmp_path / "tiny.json").write_text(json.dumps([{**case, "head_dim": D} for D in (32, 64)]))
    profiled_call.main([str(tmp_path / "tiny.json"), "2"])
    passes = ["forward"] if cached else ["forward", "backward"]
    lines = [f"dense float32 B1 H2:1 D64 N30, {direction}, by flashtile" for direction in passes]
    assert capsys.readouterr().out.splitlines() == lines


def test_it_runs_the_passes_that_a_peer_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = {"heads_q": 2, "heads_kv": 1, "seqlen_q": 9, "seqlen_k": 9, "head_dim": 8}
    (tmp_path / "tiny.json").write_text(json.dumps([case]))
    asked = ["--peers", "sdpa", "fa3", "--pass", "backward"]
    profiled_call.main([str(tmp_path / "tiny.json"), "1", *asked])
    ran, refused = capsys.readouterr().out.splitlines()
    assert ran == "dense float32 B1 H2:1 D8 N9, backward, by sdpa"
    assert refused.startswith("dense float32 B1 H2:1 D8 N9, backward, by fa3: left out, ")


def test_a_missing_number_lists_those_there_are() -> None:
    assert profiled_call.find_case("papers", 12).label.endswith(
        "causal bfloat16 B1 H16:16 D128 N16384"
    )
    with pytest.raises(ValueError, match=r"models has no case 40, but\n1: model causal bfloat16"):
        profiled_call.find_case("models", 40)
