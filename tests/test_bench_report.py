"""The output of a run: rows in files, tables, a page, pictures; and the presets."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import markdown, peers, plots, prepared, presets, report, run, shapes
from benchmarks import rows as saved
from benchmarks.rows import Row
from benchmarks.shapes import Case
from flashtile.cli import machine

pytestmark = pytest.mark.slow

PROVENANCE = {"command": "c", "date": "d", "commit": None, "device": "cpu", "torch": "2"}
ORIGIN = {"command": "c", "date": "2026-01-02", "commit": "0123", "device": "GPU", "torch": "2"}
SMALL = Case(heads_q=4, heads_kv=2, head_dim=16, head_dim_v=16, seqlen_q=160, seqlen_k=160)
QUICK = run.Settings(peers=("flashtile", "standard"), seconds=0, min_rounds=1)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    settings = replace(QUICK, peers=("flashtile", "standard", "fa2"))
    settings = replace(settings, directions=("forward", "backward"))
    cases = [replace(SMALL, seqlen_q=n, seqlen_k=n) for n in (64, 128)]
    return [row for case in cases for row in run.measure_case(case, settings)]


COLUMNS = {
    *("provider", "backend", "pass", "dtype", "head_dim", "heads_q", "heads_kv", "batch"),
    *("seqlen_q", "seqlen_k", "causal", "variant", "median_ms", "p20_ms", "p80_ms", "tflops"),
    *("gbps", "peak_mib", "max_error", "rms_error", "skipped", "date", "commit", "device"),
    *("torch", "triton", "command", "preset", "density", "host_us", "percent_of_matmul"),
    *("percent_of_read", "seed", "index"),
}


def test_csv_has_a_line_for_each_row(rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.csv"
    saved.write_csv(path, rows, machine.provenance("cpu", "python -m benchmarks"))
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert set(lines[0]) >= COLUMNS
    assert len(lines) == len(rows) == 12
    for line, row in zip(lines, rows, strict=True):
        assert line["pass"] == row.direction
        assert line["skipped"] == row.skipped
        assert line["command"] == "python -m benchmarks"
        if row.skipped:
            assert line["median_ms"] == ""
        else:
            assert row.median_ms is not None
            assert float(line["median_ms"]) == pytest.approx(row.median_ms, rel=1e-4)


def test_json_keeps_the_rows_and_the_machine(rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    saved.write_json(path, rows, PROVENANCE)
    content = json.loads(path.read_text())
    assert content["machine"] == PROVENANCE
    assert [row["skipped"] for row in content["rows"]] == [row.skipped for row in rows]
    assert content["rows"][0]["median_ms"] == rows[0].median_ms


def test_the_table_says_once_what_never_changes(rows: list[Row]) -> None:
    title, headings, lines = report.table(rows)
    assert "dtype float32" in title
    assert "heads 4:2" in title
    assert "dtype" not in headings
    assert {"pass", "length", "who", "peak MiB", "max error"} <= set(headings)
    assert "GB/s" not in headings  # nothing decodes here
    assert len(lines) == 8


def test_the_table_needs_no_rich(
    rows: list[Row],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    report.show(rows)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split()[:3] == ["pass", "length", "who"]
    assert "flashtile (cpu)" in printed[2]


def test_plain_columns_line_up() -> None:
    assert report.plain_table(["a", "bb"], [["long", "x"], ["s", "y"]]) == (
        "a     bb\nlong  x\ns     y"
    )


def test_pictures_are_drawn(rows: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plots import draw

    causal = [replace(row, causal=True) for row in rows]
    paths = draw(tmp_path / "new", [*rows, *causal], PROVENANCE)
    assert [path.name for path in paths] == [
        "speed-backward-float32-dense-b1.png",
        "memory-backward-float32-dense-b1.png",
        "speed-forward-float32-dense-b1.png",
        "memory-forward-float32-dense-b1.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


# Runs in parts


def _row(peer: str, tflops: float | None, case: Case = SMALL, direction: str = "forward") -> Row:
    row = Row.of(case, peer, direction)
    if tflops is None:
        return replace(row, skipped="out of memory: 64.00 GiB wanted at once")
    return row.timed(case, [shapes.flops(case, direction) / tflops / 1e9])


def test_rows_come_back_from_their_file(rows: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    saved.write_csv(path, rows, ORIGIN)
    found = saved.read_csv(path)
    assert [origin for _, origin in found] == [ORIGIN] * len(rows)
    for (again, _), row in zip(found, rows, strict=True):
        numbers = [(getattr(again, name), getattr(row, name)) for name in _NUMBERS]
        assert [got or 0 for got, _ in numbers] == pytest.approx(
            [wanted or 0 for _, wanted in numbers], rel=1e-5
        )
        nothing = dict.fromkeys(_NUMBERS)
        assert replace(again, **nothing) == replace(row, **nothing)


_NUMBERS = [name for name, kind in Row.__annotations__.items() if kind == "float | None"]


def test_an_older_file_lacks_columns(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    saved.write_csv(path, [_row("fa2", 1.0)], ORIGIN)
    with path.open(newline="") as file:
        names, line = csv.reader(file)
    keep = [column for column, name in enumerate(names) if name not in ("preset", "host_us")]
    lines = [",".join(cells[column] for column in keep) for cells in (names, line)]
    path.write_text("\n".join(lines) + "\n")
    ((row, _),) = saved.read_csv(path)
    assert (row.preset, row.host_us, row.provider) == ("", None, "fa2")


def test_a_cut_off_run_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([[_row("fa2", 1.0)]])

    def stops_after_one(case: Case, settings: run.Settings) -> list[Row]:
        for rows in measured:
            return rows
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure_case", stops_after_one)
    argv = ["--seq-len", "32", "64", "--device", "cpu", "--csv", str(tmp_path / "x.csv")]
    with pytest.raises(KeyboardInterrupt):
        command.main(argv)
    ((row, origin),) = saved.read_csv(tmp_path / "x.csv")
    assert row.provider == "fa2"
    assert origin["command"].endswith("--csv x.csv")  # no folder of this machine


def test_a_folder_is_one_run(tmp_path: Path) -> None:
    other = replace(SMALL, causal=True)
    early = [_row("flashtile", 1.0), _row("fa2", 1.0), _row("cudnn", 1.0), _row("flex", None)]
    late = [_row("flashtile", 2.0), _row("fa4", 2.0), _row("flashtile", 2.0, other)]
    again = [_row("flashtile", 3.0, other)]
    saved.write_csv(tmp_path / "c.csv", early, ORIGIN)
    saved.write_csv(tmp_path / "a.csv", late, {**ORIGIN, "date": "2026-01-03", "command": "e"})
    saved.write_csv(tmp_path / "b.csv", again, {**ORIGIN, "date": "2026-01-04"})
    rows, origin = saved.read_folder(tmp_path)
    assert origin["date"] == "2026-01-02 to 2026-01-04"
    assert (origin["command"], origin["device"]) == ("c, e", "GPU")
    found = {(row.peer, row.causal): row.tflops for row in rows}
    expected = {("flashtile", False): 1.0, ("fa2", False): 1.0, ("cudnn", False): 1.0}
    expected |= {("fa4", False): 2.0, ("flashtile", True): 3.0}  # the later of equals
    assert found.pop(("flex", False)) is None
    assert found == pytest.approx(expected)


def test_what_was_measured_stands_before_what_was_skipped(tmp_path: Path) -> None:
    saved.write_csv(tmp_path / "a.csv", [_row("fa2", 1.0), _row("fa3", 1.0)], ORIGIN)
    wide = [_row("fa2", None), _row("flashtile", 1.0), _row("fa4", 1.0), _row("cudnn", 1.0)]
    saved.write_csv(tmp_path / "b.csv", wide, ORIGIN)
    rows, _ = saved.read_folder(tmp_path)
    assert {row.peer: row.skipped for row in rows} == dict.fromkeys(
        ("fa2", "fa3", "fa4", "flashtile", "cudnn"), ""
    )


# The page


def test_the_page_has_a_column_for_each_peer() -> None:
    long = replace(SMALL, seqlen_q=320, seqlen_k=320)
    rows = [_row("flashtile-triton", 300.0), _row("fa2", 200.0)]
    rows += [replace(_row("flashtile-triton", 400.0, long), percent_of_matmul=50.0)]
    rows += [_row("fa2", 100.0, long), _row("fa3", None, long), _row("cudnn", 1.0, long)]
    page = markdown.page(rows, ORIGIN, ["speed.png"])
    lines = page.splitlines()
    assert lines[0] == "# GPU, 2026-01-02"
    assert lines[2].startswith("torch 2, commit 0123. ")
    assert lines[4] == "![speed.png](speed.png)"
    at = lines.index("| length | flashtile-triton | fa2 | cudnn | flashtile-triton / fa2 |")
    assert "head dim 16, heads 4:2, batch 1" in lines[at - 2]
    assert lines[at + 2 : at + 4] == [
        "| 160 | 300 | 200 | - | 1.50 |",
        "| 320 | 400 (50) | 100 | 1 | 4.00 |",
    ]
    assert lines[-1] == "- skipped fa3 (dense): out of memory: 64.00 GiB wanted at once"


def test_ours_stands_for_what_a_call_takes_and_beside_a_forced_backend() -> None:
    rows = [_row("flashtile", 600.0), _row("flashtile-triton", 450.0), _row("fa2", 300.0)]
    rows += [_row("fa3", 500.0), _row("cudnn", 400.0)]
    rows[:2] = [replace(rows[0], backend="hopper"), replace(rows[1], backend="triton")]
    lines = markdown.page(rows, ORIGIN).splitlines()
    (heading,) = (line for line in lines if "flashtile (hopper) | flashtile-triton | fa2" in line)
    ratios = "flashtile / fa2 | flashtile-triton / fa2 | flashtile / best of cudnn, fa3 |"
    assert heading.endswith(ratios)
    assert lines[lines.index(heading) + 2].endswith("| 2.00 | 1.50 | 1.20 |")
    chosen = [rows[0], replace(rows[0], backend="triton", seqlen_k=320)]
    assert saved.with_backend("flashtile", chosen) == "flashtile (hopper, triton)"


def test_a_cache_is_read_at_a_share_of_the_memorys_speed() -> None:
    case = replace(SMALL, variant="decode", cached=True, seqlen_q=1)
    row = replace(_row("flashtile", 1.0, case, "decode"), percent_of_read=92.4)
    assert row.gbps is not None
    assert f"| {report.number(row.gbps)} (92) |" in markdown.page([row], ORIGIN)
    assert plots._best(row) == pytest.approx(row.gbps / 0.924)
    assert plots._best(replace(row, gbps=None, percent_of_matmul=50.0)) == pytest.approx(2.0)


def test_the_page_says_where_memory_ran_out() -> None:
    long = replace(SMALL, seqlen_q=320, seqlen_k=320)
    rows = [_row("standard", 1.0), _row("fa2", 1.0), _row("fa2", 1.0, long)]
    rows = [replace(row, peak_mib=2.0) for row in rows] + [_row("standard", None, long)]
    page = markdown.page(rows, ORIGIN)
    assert "| 320 | out of memory | 2 |" in page
    assert "| 320 | out of memory | - |" in markdown.page(
        [replace(row, peak_mib=0.0) if row.seqlen_k == 320 else row for row in rows], ORIGIN
    )


def test_masks_are_compared_with_full_attention() -> None:
    sparse = replace(SMALL, variant="block-sparse 25%", block_density=0.25)
    slow, fast = _row("flashtile", 1.0), replace(_row("fa2", 1.0), median_ms=1.0)
    assert saved.faster_than_full([slow, _row("flashtile", 1.0, replace(SMALL, causal=True))]) == {}
    half = replace(_row("flashtile", 1.0, sparse), median_ms=slow.median_ms / 2)  # type: ignore
    alone = _row("flex", 1.0, sparse)  # whose full attention was not measured
    found = saved.faster_than_full([slow, fast, half, alone])
    assert found == {slow: 1.0, fast: 1.0, half: 2.0}
    assert "times as fast as full attention" in markdown.page([slow, half], ORIGIN)


def test_pictures_of_memory_and_density(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plots import draw

    tall = [replace(SMALL, preset="p", seqlen_q=n, seqlen_k=n, batch=640 // n) for n in (160, 320)]
    sparse = replace(tall[0], variant="block-sparse 25%", block_density=0.25)
    window = replace(tall[0], variant="window 9", window=(8, 0), causal=True)
    rows = [_row("fa2", 1.0, case) for case in (*tall, sparse, window)]
    rows = [replace(row, peak_mib=1.0) for row in rows] + [_row("standard", None, tall[1])]
    names = [path.name for path in draw(tmp_path, rows, ORIGIN)]
    assert names == [  # memory at equal tokens says nothing
        "speed-p-forward-float32-dense.png",
        "density-p-forward-float32.png",
    ]
    alone = [replace(row, batch=1, host_us=1.0) for row in rows if row.variant == "dense"]
    assert [path.name for path in draw(tmp_path, alone, ORIGIN)] == [
        "speed-p-forward-float32-dense.png",
        "host-p-forward-float32-dense.png",
        "memory-p-forward-float32-dense.png",
    ]
    assert draw(tmp_path, rows[:1], ORIGIN) == []  # a point is no line


def test_drawn_shapes_share_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plots import draw

    cases = [
        replace(SMALL, preset="gpu-field", seed=1, index=n, seqlen_q=n, seqlen_k=n)
        for n in (100, 201, 302)
    ]
    ours = [replace(_row("flashtile", 1.0, case), median_ms=2.0) for case in cases]
    others = [
        replace(_row("fa4", 1.0, case), median_ms=ms)
        for case, ms in zip(cases, (1.0, 3.0, 200.0), strict=True)
    ]
    paths = draw(tmp_path, [*ours, *others[1:], _row("fa4", None, cases[0])], ORIGIN)
    assert [path.name for path in paths] == ["drawn-gpu-field-forward-float32.png"]
    (axis,) = plots._drawn([*ours, *others], ORIGIN).axes
    fa4 = axis.get_lines()[0]
    assert fa4.get_ydata().tolist() == [0.5, 1.5, 4.0]  # as 100, which would be outside
    assert draw(tmp_path, ours, ORIGIN) == []  # nobody to compare with


def test_calls_of_models_have_a_ratio_to_the_fastest_library(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plots import draw

    cases = presets.preset_cases("gpu-models")
    assert len({case.variant for case in cases}) == len(cases) == 34
    first, second = cases[:2]
    rows = [_row("flashtile", 100.0, first), _row("flashtile", 100.0, second)]
    rows += [_row(peer, 50.0, first) for peer in markdown.LIBRARIES]
    rows += [_row("fa4", 125.0, second), _row("fa3", None, second)]
    lines = markdown.page(rows, ORIGIN).splitlines()
    (heading,) = (line for line in lines if "| fa4 |" in line)
    at = lines.index(heading)
    headings = heading.strip("| ").split(" | ")
    ratio = headings.index(f"flashtile / best of {', '.join(markdown.LIBRARIES)}")
    table = [line.strip("| ").split(" | ") for line in lines[at + 2 : at + 4]]
    ratios = {cells[0]: cells[ratio] for cells in table}
    assert ratios == {first.variant: "2.00", second.variant: "0.80"}
    assert [path.name for path in draw(tmp_path, rows, ORIGIN)] == ["models-forward.png"]
    (axis,) = plots._models(rows, ORIGIN).axes
    fa4 = next(line for line in axis.get_lines() if line.get_label() == "fa4")
    assert fa4.get_xdata().tolist() == pytest.approx([0.8, 2.0])  # the worst first
    assert [label.get_text() for label in axis.get_yticklabels()] == [second.variant, first.variant]
    assert draw(tmp_path, rows[:2], ORIGIN) == []  # nobody to compare with


def test_no_picture_cuts_off_a_line() -> None:
    pytest.importorskip("matplotlib")
    slow = [replace(SMALL, preset="p", seqlen_q=n, seqlen_k=n, batch=640 // n) for n in (160, 320)]
    fast = [replace(case, head_dim=32, head_dim_v=32) for case in slow]
    rows = [replace(_row("fa2", 1.0, case), host_us=10.0, peak_mib=2.0) for case in slow]
    rows += [replace(_row("fa2", 9.0, case), host_us=90.0, peak_mib=9.0) for case in fast]
    for picture, highest in ((plots._speed, 9), (plots._host, 90)):
        for axis in picture(rows, ORIGIN).axes:
            assert axis.get_ylim()[0] == 0
            assert axis.get_ylim()[1] > highest
            assert [label.get_text() for label in axis.get_xticklabels()] == [
                "160\nbatch 4",
                "320\nbatch 2",
            ]
    assert plots._memory([replace(row, batch=1, peak_mib=0.0) for row in rows], ORIGIN) is None


def test_of_many_lengths_only_powers_of_two_are_labelled() -> None:
    pytest.importorskip("matplotlib")
    lengths = range(512, 8193, 512)
    rows = [_row("fa2", 1.0, replace(SMALL, preset="p", seqlen_q=n, seqlen_k=n)) for n in lengths]
    (axis,) = plots._speed(rows, ORIGIN).axes
    labels = [label.get_text() for label in axis.get_xticklabels()]
    assert labels == ["512", "1k", "2k", "4k", "8k"]


# Presets


@pytest.mark.parametrize("name", presets.PRESETS)
def test_a_preset_names_its_cases(name: str) -> None:
    cases, settings = presets.preset_cases(name), presets.PRESETS[name].settings
    assert {case.preset for case in cases} == {name}
    assert [case.index for case in cases] == list(range(1, len(cases) + 1))
    assert len({replace(case, index=0) for case in cases}) == len(cases)
    assert set(settings.peers) <= set(peers.PEERS)
    assert set(settings.directions) <= set(prepared.DIFFERENTIATED) | {"forward"}
    assert settings.device == "cuda"
    dtypes = {
        "gpu-options": {"bfloat16", "float16", "float32"},
        "gpu-models": {"bfloat16", "float16", "float32"},
        "fa-readme": {"float16"},
        "lecture": {"float16", "float32"},
    }
    assert {case.dtype for case in cases} == dtypes.get(name, {"bfloat16"})


def test_dense_cases_hold_as_many_tokens_each() -> None:
    cases = presets.preset_cases("gpu-dense")
    assert {case.batch * case.seqlen_k for case in cases} == {16384}
    assert {(case.head_dim, case.heads_q) for case in cases} == {(64, 32), (128, 16), (256, 8)}
    assert len(cases) == 3 * 2 * 6


def test_the_readme_of_flash_attention_has_the_dense_cases_in_float16() -> None:
    cases, dense = (presets.preset_cases(name) for name in ("fa-readme", "gpu-dense"))
    assert [replace(case, dtype="bfloat16", preset="gpu-dense") for case in cases] == dense


def test_the_lecture_has_a_picture_for_each_pass_and_dtype() -> None:
    cases = presets.preset_cases("lecture")
    assert {(case.batch, case.heads_q, case.heads_kv, case.head_dim) for case in cases} == {
        (32, 4, 4, 128)
    }
    lengths = [case.seqlen_q for case in cases if case.causal and case.dtype == "float32"]
    assert lengths == list(range(512, 8193, 512))
    assert presets.PRESETS["lecture"].settings.directions == ("forward", "backward")


def test_packed_cases_have_the_lengths_that_were_drawn() -> None:
    packed = [case for case in presets.preset_cases("gpu-hopper") if case.documents]
    assert [case.causal for case in packed] == [False, True]
    for case in packed:
        lengths = shapes.document_lengths(case)
        assert len(lengths) == case.documents
        assert sum(lengths) == case.batch * case.seqlen_k == case.batch * case.seqlen_q
        assert 128 <= min(lengths) < max(lengths) <= 8192
        assert shapes.visible_scores(case) == case.heads_q * sum(
            n * (n + 1) // 2 if case.causal else n * n for n in lengths
        )


def test_every_option_is_measured_at_two_lengths() -> None:
    cases = presets.preset_cases("gpu-options")
    for length in (4096, 16384):
        named = {case.variant: case for case in cases if case.seqlen_k == length}
        wanted = {*("softcap", "alibi", "sink", "chunk", "value-dim", "value-dim 128")}
        assert set(named) == wanted | {"float16", "float32", "bias", "dropout"}
        assert {case.heads_q for case in named.values()} == {16}
        assert [name for name, case in named.items() if not case.causal] == ["bias"]
    assert len({(case.variant, case.seqlen_k) for case in cases}) == len(cases)


@pytest.mark.parametrize("case", presets.preset_cases("gpu-options")[:10], ids=lambda c: c.variant)
def test_options_run_at_a_small_size(case: Case) -> None:
    small = replace(case, batch=1, heads_q=2, heads_kv=2, seqlen_q=96, seqlen_k=96)
    small = replace(small, head_dim=case.head_dim // 8, head_dim_v=case.head_dim_v // 8)
    settings = replace(QUICK, directions=("forward", "backward"), memory=False)
    for row in run.measure_case(small, settings):
        assert row.skipped == ""
        assert case.dropout or (row.max_error or 1) < 0.1


@pytest.mark.parametrize("case", presets.preset_cases("gpu-models"), ids=lambda c: c.variant)
def test_calls_of_models_run_at_a_small_size(case: Case) -> None:
    group = case.heads_q // case.heads_kv
    lengths = tuple(min(n, 40) for n in case.lengths[:3])
    tokens = {
        name: sum(lengths) or min(getattr(case, name), 96) for name in ("seqlen_q", "seqlen_k")
    }
    small = replace(case, batch=1, heads_q=group, heads_kv=1, lengths=lengths, **tokens)
    small = replace(small, head_dim=case.head_dim // 4, head_dim_v=case.head_dim_v // 4)
    small = replace(small, documents=len(lengths), dtype="float32")
    settings = replace(QUICK, peers=("flashtile",), directions=("forward", "backward"))
    for row in run.measure_case(small, settings):
        assert row.skipped == ""
        assert case.dropout or (row.max_error or 1) < 1e-3


def test_sparse_cases_leave_what_their_name_says() -> None:
    for case in presets.preset_cases("gpu-sparse"):
        if case.block_sparse:
            said = float(case.variant.split()[1].rstrip("%")) / 100
            assert shapes.density(case) == pytest.approx(said, abs=0.01)
        elif case.variant != "dense":
            left, right = case.window
            assert (left + 1, right) == (int(case.variant.split()[1]), 0)


def _asked(flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(flags.split())


def test_flags_keep_a_part_of_a_preset() -> None:
    flags = "--preset gpu-dense --head-dim 64 256 --seq-len 512 16384 --use-causal"
    cases = command.cases(_asked(flags), "cuda")
    assert [(case.head_dim, case.seqlen_k) for case in cases] == [
        (64, 512),
        (64, 16384),
        (256, 512),
        (256, 16384),
    ]
    assert all(case.causal for case in cases)


def test_flags_change_how_a_preset_measures() -> None:
    plain = command._settings(_asked("--preset gpu-host"), "cuda")
    assert plain == presets.PRESETS["gpu-host"].settings
    flags = "--preset gpu-dense --pass step --peers fa4 flex --seconds 0 --no-accuracy --host"
    found = command._settings(_asked(flags), "cuda")
    assert (found.directions, found.peers, found.seconds) == (("both",), ("fa4", "flex"), 0)
    assert (found.accuracy, found.host) == (False, True)
    assert command._settings(_asked("--preset gpu-decode"), "cuda").cuda_graph
    assert command._settings(_asked("--preset gpu-dense --cuda-graph"), "cuda").cuda_graph


def test_a_gpu_preset_wants_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main(["--preset", "gpu-dense"]) == 2
    assert "wants a GPU" in capsys.readouterr().err
    assert command.main(["--preset", "gpu-dense", "--device", "cpu", "--seq-len", "7"]) == 2
    assert "no case" in capsys.readouterr().err


def test_a_preset_runs_in_parts_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    small = [replace(SMALL, seqlen_q=n, seqlen_k=n, batch=128 // n) for n in (32, 64)]
    monkeypatch.setitem(presets.PRESETS, "gpu-dense", presets.Preset("small", small, QUICK))
    for length in ("32", "64"):
        argv = ["--preset", "gpu-dense", "--device", "cpu", "--pass", "all"]
        argv += ["--seq-len", length, "--csv", str(tmp_path / f"{length}.csv")]
        assert command.main(argv) == 0
    (tmp_path / "others.csv").write_text("pass,provider,seconds\nforward,someone,1\n")
    (tmp_path / "empty.csv").write_text("")
    assert command.main(["--report", str(tmp_path)]) == 0
    page = (tmp_path / "report.md").read_text()
    for direction in ("forward", "backward", "both"):
        assert f"## gpu-dense: {direction}, TFLOP/s" in page
        assert (tmp_path / f"speed-gpu-dense-{direction}-float32-dense.png").exists()
    assert str(tmp_path) not in page
    assert "someone" not in page
    assert command.main(["--report", str(tmp_path / "nowhere")]) == 2
    assert "no CSV file" in capsys.readouterr().err


def test_a_failure_of_ours_is_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(case: Case, inputs: shapes.Inputs) -> prepared.Prepared:
        raise ValueError("a bug of ours")

    monkeypatch.setitem(peers.PEERS, "flashtile", broken)
    argv = ["--seq-len", "32", "--device", "cpu", "--seconds", "0"]
    assert command.main([*argv, "--peers", "flashtile", "standard"]) == 1
    assert "failed: a bug of ours" in capsys.readouterr().out
