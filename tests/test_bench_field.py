"""Drawn shapes: what every seed has in common, what differs, their rows and their targets."""

from __future__ import annotations

import argparse
import csv
from collections import Counter
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import geometric_mean

import pytest

from benchmarks import __main__ as command
from benchmarks import field, gpu_targets, presets, shapes
from benchmarks.markdown import page
from benchmarks.rows import Row, read_csv
from benchmarks.run import Settings
from benchmarks.shapes import Case

pytestmark = pytest.mark.slow

SEEDS = (1, 2, 12345)


def _length(case: Case) -> int:
    """Of a sequence that is not packed."""
    assert not case.documents
    return case.seqlen_k


@pytest.mark.parametrize("seed", SEEDS)
def test_every_seed_has_as_many_cases_of_each_kind(seed: int) -> None:
    cases = field.draw(seed)
    windowed = [case for case in cases if case.window != (-1, -1)]
    full = [case for case in cases if not case.causal]
    packed = [case for case in cases if case.documents]
    counts = [len(cases) - len(full) - len(windowed), len(full), len(windowed), len(packed)]
    assert counts == [28, 8, 4, 13]
    packed_of = [sum(case in packed for case in part) for part in (full, windowed)]
    assert packed_of == [3, 1]
    assert all(case.causal for case in windowed)
    dims = Counter(case.head_dim for case in cases)
    assert set(dims) == set(range(64, 257, 16))
    assert set(dims.values()) <= {3, 4}
    assert {case.dtype for case in cases} == {"bfloat16"}


@pytest.mark.parametrize("seed", SEEDS)
def test_every_quantity_is_in_its_range(seed: int) -> None:
    for case in field.draw(seed):
        group, remainder = divmod(case.heads_q, case.heads_kv)
        assert remainder == 0
        assert group in (1, 2, 4, 6, 8) or case.heads_kv == 1
        assert 8 <= case.heads_q <= 64
        assert 1 <= case.batch <= 32
        assert case.seqlen_q == case.seqlen_k
        assert case.batch * case.seqlen_k <= field.TOKENS
        if case.documents:
            lengths = shapes.document_lengths(case)
            assert len(lengths) == case.documents
            assert (case.batch, sum(lengths)) == (1, case.seqlen_k)
            assert 1 <= min(lengths) <= max(lengths) <= 32768
        else:
            assert 512 <= _length(case) <= 32768
        if case.window != (-1, -1):
            assert 127 <= case.window[0] < 16384
            assert case.window[1] == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_work_is_bounded_and_only_the_fewest_heads_of_one_sequence_exceed_it(seed: int) -> None:
    for case in field.draw(seed):
        work = shapes.flops(case, "forward")
        if work > field.OPERATIONS:
            group = case.heads_q // case.heads_kv
            assert case.batch == 1
            assert case.heads_q < 8 + group
        assert work < 14e12


def test_a_seed_repeats_and_another_draws_other_shapes() -> None:
    first, again, other = field.draw(1), field.draw(1), field.draw(2)
    assert first == again
    assert not {replace(case, seed=0) for case in first} & {replace(case, seed=0) for case in other}
    assert {case.seed for case in first} == {1}
    case = first[13]  # as committed results call it: a change of the draw needs another default
    sizes = (case.batch, case.heads_q, case.heads_kv, case.head_dim, case.seqlen_k)
    assert sizes == (2, 36, 6, 208, 10929)


def test_lengths_are_log_uniform_whatever_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(field, "KINDS", {("causal", False): field.COUNT})
    means = []
    for seed in range(1, 21):
        lengths = sorted(_length(case) for case in field.draw(seed))
        octaves = Counter(int(log(length / 512, 2)) for length in lengths)
        assert all(5 <= octaves[octave] <= 8 for octave in range(6))  # 40 / 6 in each
        assert sum(length % 64 == 0 for length in lengths) < 5
        means.append(geometric_mean(lengths))
    assert max(means) / min(means) < 1.03


def _model(case: Case) -> float:
    """A ratio to the others that depends on everything that is drawn; it spreads by 7 %."""
    ratio = 1.05 - 0.1 * (case.head_dim % 64 != 0) - 0.03 * log(case.head_dim / 128, 2)
    ratio += 0.03 * log(case.seqlen_k / 4096, 8) - 0.06 * (case.window != (-1, -1))
    ratio += 0.05 * (not case.causal) - 0.05 * bool(case.documents)
    return ratio + 0.05 * (case.heads_kv == 1) - 0.03 * (case.heads_q == case.heads_kv)


def test_a_new_seed_hardly_moves_the_mean() -> None:
    """40 independent draws would move it by 1.1 %, the standard deviation."""
    means = [geometric_mean(map(_model, field.draw(seed))) for seed in range(1, 41)]
    assert max(means) / min(means) < 1.02


SMALL = Settings(peers=("flashtile", "standard"), directions=("forward", "backward"), seconds=0)


def _shrunken(seed: int) -> list[Case]:
    """The field with lengths and windows of a 128th and fewer, small heads, for a CPU."""

    def shrink(case: Case) -> Case:
        lengths = tuple(-(-length // 128) for length in case.lengths)
        length = sum(lengths) if lengths else case.seqlen_k // 128
        heads_kv = min(case.heads_kv, 2)
        window = (case.window[0] // 128 if case.window[0] > 0 else -1, case.window[1])
        return replace(
            case,
            dtype="float32",
            heads_q=case.heads_q // case.heads_kv * heads_kv,
            heads_kv=heads_kv,
            head_dim=case.head_dim // 16,
            head_dim_v=case.head_dim // 16,
            seqlen_q=length,
            seqlen_k=length,
            lengths=lengths,
            window=window,
        )

    return [shrink(case) for case in field.draw(seed)]


def _run(folder: Path, name: str, *flags: str) -> list[Row]:
    path = folder / f"{name}.csv"
    argv = ["--preset", "gpu-field", "--device", "cpu", "--csv", str(path), *flags]
    assert command.main(argv) == 0
    return [row for row, _ in read_csv(path)]


def test_the_field_runs_in_parts_and_a_row_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = presets.Preset("small", _shrunken, replace(SMALL, min_rounds=1, memory=False))
    monkeypatch.setitem(presets.PRESETS, "gpu-field", preset)
    first = _run(tmp_path, "first", "--seed", "2", "--part", "2/13", "--no-accuracy")
    assert "3 of the cases that --seed 2 draws" in capsys.readouterr().out
    assert [row.index for row in first[::4]] == [2, 15, 28]
    assert {row.seed for row in first} == {2}
    assert not any(row.skipped for row in first)
    again = _run(tmp_path, "again", "--seed", "2", "--cases", "28")
    assert {row.subject for row in again} == {row.subject for row in first if row.index == 28}
    assert all((row.max_error or 1) < 1e-4 for row in again)
    other = _run(tmp_path, "other", "--cases", "28", "--pass", "forward", "--no-accuracy")
    assert {row.seed for row in other} == {presets.SEED}
    with (tmp_path / "again.csv").open(newline="") as file:
        assert {(line["seed"], line["index"]) for line in csv.DictReader(file)} == {("2", "28")}
    assert command.main(["--report", str(tmp_path)]) == 0
    report = (tmp_path / "report.md").read_text()
    assert "| seed | case | function |" in report
    assert "\n| 2 | 28 | " in report


def _asked(flags: str) -> list[Case]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.cases(parser.parse_args(flags.split()), "cuda")


@pytest.mark.parametrize("flags", ["--preset gpu-field --seed 3", "--seq-len 64 128 256"])
def test_all_parts_together_are_the_whole(flags: str) -> None:
    parts = [_asked(f"{flags} --part {part}/3") for part in (1, 2, 3)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    whole = _asked(flags)
    together = [case for part in parts for case in part]
    assert sorted(together, key=whole.index) == whole


def test_cases_are_chosen_by_their_number() -> None:
    assert [case.index for case in _asked("--preset gpu-dense --cases 7 3")] == [3, 7]
    assert {case.dtype for case in _asked("--preset lecture --dtype fp16")} == {"float16"}
    (case,) = _asked("--preset gpu-field --seed 5 --cases 40")
    assert case == presets.preset_cases("gpu-field", 5)[-1]
    assert case.label.startswith("case 40 of seed 5, ")
    assert _asked("--preset gpu-field") == presets.preset_cases("gpu-field", presets.SEED)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--part 4/3", "got 4/3, want a part such as 1/3"),
        ("--part 2", "got 2, want a part such as 1/3"),
        ("--part 0/3", "got 0, want an integer of at least 1"),
        ("--seed 0", "got 0, want an integer of at least 1"),
        ("--preset gpu-dense --seed 2", "nothing here is drawn"),
        ("--preset cpu-targets --seed 2", "nothing here is drawn"),
        ("--seq-len 64 --cases 2", "--cases needs a preset"),
    ],
)
def test_a_part_that_is_none_is_refused(
    flags: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = command.main(flags.split())
    except SystemExit as stop:
        # argparse exits with a number; SystemExit may hold anything.
        status = stop.code  # type: ignore[assignment]
    assert status == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def _against_fa3(seed: int, direction: str, *ratios: float) -> list[Row]:
    """Rows of the first cases of a seed, whose speeds have these ratios."""
    rows = []
    for case, ratio in zip(presets.preset_cases("gpu-field", seed), ratios, strict=False):
        for peer, ms in (("flashtile", 1 / ratio), ("fa3", 1.0), ("cudnn", 1.5)):
            rows.append(Row.of(case, peer, direction).timed(case, [ms]))
    return rows


@pytest.mark.parametrize(
    ("direction", "least", "mean"), [("forward", 0.95, 1.05), ("backward", 0.92, 1.03)]
)
def test_the_field_has_a_target_for_the_least_and_for_the_mean(
    direction: str, least: float, mean: float
) -> None:
    ratios = [1.25, 1.0, least - 0.01, least, *[1.1] * 36]
    (summary,) = gpu_targets.summaries(_against_fa3(1, direction, *ratios))
    assert (summary.target.least, summary.target.mean) == (least, mean)
    assert (len(summary.outcomes), summary.met, summary.ahead) == (40, 39, 38)
    assert summary.mean == pytest.approx(geometric_mean(ratios))


def test_the_page_has_a_line_for_each_seed_and_names_cases_and_means_that_miss() -> None:
    rows = _against_fa3(1, "forward", 1.25, 1.0, 0.9) + _against_fa3(2, "forward", 1.1, 1.0)
    lines = list(gpu_targets.section(rows))
    about, others = "Hopper forward, drawn shapes", "fa3 or fa4 or cudnn"
    ends = ("0.90, 1.04, 1.25 | 2 of 3 | 2 of 3", "1.00, 1.05, 1.10 | 2 of 2 | 2 of 2")
    for seed, end in zip((1, 2), ends, strict=True):
        assert f"| {about}, seed {seed}: / {others} | 0.95, 1.05 | {end} |" in lines
    assert f"| {about}, seed 1 | mean of 3 cases | 1.04 | 1.05 | |" in lines
    (missed,) = (line for line in lines if "case 3 of seed 1, " in line)
    assert missed.startswith(f"| {about} | case 3 of seed 1, ")
    assert missed.endswith(" | 0.90 | 0.95 | fa3 |")
    assert not any("seed 2 |" in line for line in lines)


def test_rows_of_two_seeds_are_not_merged() -> None:
    same = replace(presets.preset_cases("gpu-field", 1)[0], index=0)
    first, second = (Row.of(replace(same, seed=seed), "fa3", "forward") for seed in (1, 2))
    assert first.subject != second.subject
    origin = {"device": "GPU", "date": "d"}
    text = page([first.timed(same, [1.0]), second.timed(same, [2.0])], origin)
    assert text.count("| fa3 |") == 1


def test_the_picture_does_not_mix_seeds() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks import plots

    rows = [
        replace(Row.of(field.draw(seed)[0], peer, "forward"), median_ms=ms)
        for seed, ours, theirs in ((1, 1.0, 2.0), (2, 10.0, 5.0))
        for peer, ms in (("flashtile", ours), ("fa4", theirs))
    ]
    origin = {"command": "c", "date": "2026-01-02", "commit": "0123", "device": "GPU", "torch": "2"}
    (axis,) = plots._drawn(rows, origin).axes
    assert axis.get_title() == "2 shapes, seeds 1 and 2"
    (points,) = [line for line in axis.lines if line.get_label() == "fa4"]
    assert list(points.get_ydata()) == [0.5, 2.0]
