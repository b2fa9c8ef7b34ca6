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
    assert capsys.readouterr().out == "dense float32 B1 H2:1 D64 N30, by cpu\n"


def test_a_missing_number_lists_those_there_are() -> None:
    assert profiled_call.find_case("papers", 12).label.endswith(
        "causal bfloat16 B1 H16:16 D128 N16384"
    )
    with pytest.raises(ValueError, match=r"models has no case 40, but\n1: model causal bfloat16"):
        profiled_call.find_case("models", 40)
