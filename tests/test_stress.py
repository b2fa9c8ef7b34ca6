"""Long runs of calls on a GPU (`stress.py`): under load, from many threads, streams and graphs.

`FLASHTILE_REPEATS` says how many calls of each kind (200 by default). The other tests show on a CPU
that these runs find what they look for.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import stress
import torch
from processes import output_of
from stress import Call

from flashtile.testing import allowed_error

pytestmark = pytest.mark.slow

REPEATS = int(os.environ.get("FLASHTILE_REPEATS", "200"))
SCRIPT = Path(stress.__file__)
SECONDS = 150 + 0.03 * REPEATS  # the first part for compiling
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
SMALL = Call(16, packed=False, causal=True, M=30, N=40, heads=(2, 1))


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_repeats_under_load_agree(head_dim: int, dropout_p: float) -> None:
    output_of(SCRIPT, "repeats", head_dim, dropout_p, "bfloat16", REPEATS, seconds=SECONDS)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_repeats_in_float32_agree(head_dim: int) -> None:
    output_of(SCRIPT, "repeats", head_dim, 0.0, "float32", REPEATS, seconds=SECONDS)


@pytest.mark.gpu
def test_threads_streams_and_graphs_give_the_results_of_fresh_processes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        runs = [
            pool.submit(output_of, SCRIPT, "alone", number, tmp_path, seconds=SECONDS)
            for number in range(stress.CASES)
        ]
    for run in runs:
        run.result()
    output_of(SCRIPT, "threads", REPEATS, tmp_path, seconds=SECONDS)


def _small_case(number: int) -> Call:
    return Call(16, number == 1, True, 30, 40, (2, 1), decodes=number == 2)


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a GPU, with a few cases."""
    monkeypatch.setattr(stress, "ON_GPU", False)
    monkeypatch.setattr(stress, "DEVICE", "cpu")
    monkeypatch.setattr(stress, "CASES", 3)
    monkeypatch.setattr(stress, "case", _small_case)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", ["out", "lse", "dv", "dq"])
def test_a_repeat_that_differs_is_found(name: str) -> None:
    run = partial(SMALL.prepared, True)()
    first = run()
    wrong = {**first, name: first[name].clone()}
    wrong[name].view(-1)[-1] += 0.5
    answers = iter([run(), run(), wrong, run()])
    same = [*first]
    with pytest.raises(AssertionError, match=rf"up to 4: .*'{name}': 1"):
        stress._repeat(lambda: next(answers), 4, first, same, (first["dq"], 0.0), "planted")


@pytest.mark.usefixtures("on_the_cpu")
def test_a_default_dq_beyond_the_rule_is_found() -> None:
    first = SMALL.prepared(False)()
    truth, same = first["dq"].double(), ["out", "lse", "dk", "dv"]
    for change, fails in ((0.01, False), (0.5, True), (float("nan"), True)):
        again = {**first, "dq": first["dq"] + change}
        if not fails:
            stress._repeat(lambda x=again: x, 2, first, same, (truth, 0.1), "planted")
            continue
        with pytest.raises(AssertionError, match="'dq by the rule': 2"):
            stress._repeat(lambda x=again: x, 2, first, same, (truth, 0.1), "planted")


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("packed", [False, True])
def test_a_repeat_drops_what_its_reference_drops(packed: bool) -> None:
    call = replace(SMALL, packed=packed, dropout_p=0.3)
    truth, plain = call.reference(torch.float64), call.reference(torch.bfloat16)
    run = call.prepared(True)
    for results in (run(), run()):
        for name, error in stress._errors(results, truth).items():
            assert error <= allowed_error(torch.bfloat16, truth[name], plain[name]), name


@pytest.mark.usefixtures("on_the_cpu")
def test_first_results_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "reference", lambda self, dtype: {"out": torch.zeros(1)})
    monkeypatch.setattr(Call, "prepared", lambda self, _: lambda: {"out": torch.ones(1)})
    with pytest.raises(AssertionError, match=r"errors \{'out': 1.0\}"):
        stress.repeats(16, 0.0, torch.bfloat16, 1)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(("number", "name"), [(1, "dk"), (2, "step"), (2, "rotated")])
def test_threads_find_results_that_are_not_those_of_a_fresh_process(
    number: int, name: str, tmp_path: Path
) -> None:
    for each in range(3):
        stress.alone(each, tmp_path)
    stress.threads(3, tmp_path)
    kept = torch.load(tmp_path / f"{number}.pt")
    kept[name].view(-1)[5] += 0.5
    torch.save(kept, tmp_path / f"{number}.pt")
    with pytest.raises(AssertionError, match=rf"packed={number == 1}.*\['{name}'\]"):
        stress.threads(8, tmp_path)


def test_the_cases_differ_in_what_callers_may_change() -> None:
    calls = [stress.case(number) for number in range(stress.CASES)]
    for name in (
        "head_dim",
        "packed",
        "causal",
        "M",
        "layout",
        "wanted",
        "deterministic",
        "decodes",
    ):
        assert len({getattr(call, name) for call in calls}) > 1, name
    assert {call.layout for call in calls} == set(stress.STRIDE_STYLES)
