"""`ContextParallel` over threads: every option gives what one process gives."""

from __future__ import annotations

import pytest
from cases import Case, compare

from flashtile.distributed import ContextParallel
from flashtile.testing.wires import run_ranks


@pytest.mark.parametrize("seed", range(40))
def test_ranks_compute_what_one_process_does(seed: int) -> None:
    case = Case(seed)
    results = run_ranks(
        case.ranks,
        lambda wire: case.on_rank(
            ContextParallel.over(wire, ulysses=case.ulysses, stages=case.stages)
        ),
    )
    compare(case, results)
