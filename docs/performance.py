"""Writes the tables of the performance pages, README.md and others from the committed measurements.

``python docs/performance.py`` rewrites them; with ``--check`` it only says whether they are
current. Every number comes from a CSV file in benchmarks/results.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median

import lesson_tables
import mask_results
from generated import dated, markdown_table, update

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"

NAMES = {
    "flashtile": "flashtile",
    "flashtile-triton": "flashtile (Triton)",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "cudnn": "cuDNN",
    "sdpa": "PyTorch SDPA",
    "sdpa-efficient": "PyTorch, memory-efficient",
    "flex": "FlexAttention",
    "standard": "standard attention",
}
HEADS = {**NAMES, "fa2": "FA2", "fa3": "FA3", "fa4": "FA4"}  # of columns
PEERS = ("flashtile", "flashtile-triton", "fa2", "fa3", "fa4", "cudnn")
DENSE = ("dense-64", "dense-128", "dense-256")

Row = dict[str, str]
Key = tuple[str, ...]


def read(*names: str) -> list[Row]:
    """The measured lines of some CSV files; a call that a library refused has no line."""
    rows: list[Row] = []
    for name in names:
        with (RESULTS / f"{name}.csv").open(encoding="utf-8") as file:
            rows += [row for row in csv.DictReader(file) if row["median_ms"]]
    return rows


def h200(*names: str) -> list[Row]:
    """The same, of the H200."""
    return read(*(f"h200/{name}" for name in names))


def of_preset(name: str) -> list[Row]:
    """The same, of all files in a preset's folder of one machine; none before it was measured."""
    files = sorted(RESULTS.glob(f"*/{name}/*.csv"))
    rows = read(*(str(file.relative_to(RESULTS).with_suffix("")) for file in files))
    for row in rows:
        if row["provider"] == "sdpa" and row["backend"]:  # the peer that has its own name
            row["provider"] += f"-{row['backend']}"
    return rows


def by_case(rows: Iterable[Row], column: str, *keys: str) -> dict[Key, dict[str, float]]:
    """The numbers of `column`, by what was measured (`keys`) and then by library."""
    cases: dict[Key, dict[str, float]] = {}
    for row in rows:
        if row[column]:
            case = cases.setdefault(tuple(row[key] for key in keys), {})
            case[row["provider"]] = float(row[column])
    return cases


def number(value: float | None) -> str:
    """Three digits, or a dash where a library has no such call."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def mask(causal: str) -> str:
    return "causal" if causal == "True" else "full"


def line(title: str, values: list[float | None], best: Callable[..., float]) -> list[str]:
    """A line of a table, whose best number is bold."""
    top = best(value for value in values if value is not None)
    return [title, *(f"**{number(x)}**" if x == top else number(x) for x in values)]


def tflops_table(rows: list[Row], key: str, lengths: tuple[int, ...]) -> str:
    """TFLOP/s by `key`, mask and length."""
    cases = by_case(rows, "tflops", key, "causal", "seqlen_q")
    peers = [peer for peer in NAMES if any(peer in case for case in cases.values())]
    lines = [
        line(f"{value}, {mask(causal)}, {int(length):,}", [case.get(peer) for peer in peers], max)
        for (value, causal, length), case in cases.items()
        if int(length) in lengths
    ]
    head = f"{key.replace('_', ' ')}, mask, length"
    return markdown_table([head, *(HEADS[peer] for peer in peers)], lines)


def speed_table(direction: str) -> str:
    """TFLOP/s of plain attention, by head dim, mask and length."""
    rows = [row for row in h200(*DENSE) if row["pass"] == direction]
    return tflops_table(rows, "head_dim", (1024, 4096, 16384))


def h100_table(direction: str) -> str:
    """The same on an H100, as far as it has been measured there."""
    rows = read("h100/dense-128", "h100/dense-256")
    rows = [row for row in rows if row["pass"] == direction]
    return tflops_table(rows, "head_dim", (1024, 4096, 16384))


def preset_block(name: str, key: str, lengths: tuple[int, ...], about: str) -> str:
    """The picture and the tables of a preset's folder, or how to measure it."""
    rows = of_preset(name)
    if not rows:
        return f"Not measured yet: `python -m benchmarks --preset {name}`."
    parts = [
        f"```{{image}} _static/{name}-{theme}.svg\n:class: only-{theme}\n:alt: {about}\n```"
        for theme in ("light", "dark")
    ]
    titles = {"forward": "Forward", "backward": "Backward", "both": "Forward and backward"}
    for direction, title in titles.items():
        if found := [row for row in rows if row["pass"] == direction]:
            parts += [f"{title}, TFLOP/s:", dated(tflops_table(found, key, lengths), found)]
    return "\n\n".join(parts)


def variants_table(direction: str) -> str:
    """TFLOP/s of other head dims, grouped heads, packed sequences and a window."""
    rows = h200("hopper")
    rows = [row for row in rows if row["pass"] == direction]
    cases = by_case(rows, "tflops", "head_dim", "variant", "causal", "seqlen_q")
    peers = [peer for peer in PEERS if any(peer in case for case in cases.values())]
    lines = [
        line(
            f"{head_dim}, {variant.replace('dense', 'plain')}, {mask(causal)}, {int(length):,}",
            [case.get(peer) for peer in peers],
            max,
        )
        for (head_dim, variant, causal, length), case in cases.items()
    ]
    return markdown_table(["head dim, kind, mask, length", *(HEADS[p] for p in peers)], lines)


def decode_table() -> str:
    """Microseconds of one decoding step."""
    keys = ("variant", "batch", "heads_q", "heads_kv", "seqlen_k")
    cases = by_case(h200("decode"), "median_ms", *keys)
    peers = ("flashtile", "fa2", "fa3")
    lines = []
    for (variant, batch, heads, kv_heads, length), case in cases.items():
        kind = variant.removeprefix("decode").removeprefix(", ") or "plain cache"
        times = [case[peer] * 1000 if peer in case else None for peer in peers]
        lines.append(
            line(
                f"{kind}; batch {batch}, heads {heads}:{kv_heads}, {int(length):,} keys", times, min
            )
        )
    return markdown_table(["cache", *(HEADS[peer] for peer in peers)], lines)


def float8_table() -> str:
    """TFLOP/s of the forward in float8."""
    cases = by_case(h200("float8"), "tflops", "head_dim", "causal", "seqlen_q")
    columns = {
        "flashtile": "flashtile, bfloat16",
        "flashtile-float8": "flashtile, float8, per-block scales",
        "flashtile-float8-head": "flashtile, float8, per-head scales",
        "fa3": "FA3, float8",
    }
    lines = [
        line(
            f"{head_dim}, {mask(causal)}, {int(length):,}",
            [case.get(column) for column in columns],
            max,
        )
        for (head_dim, causal, length), case in cases.items()
    ]
    return markdown_table(["head dim, mask, length", *columns.values()], lines)


def models_table() -> str:
    """Milliseconds of calls of published models, next to the fastest other library."""
    cases = by_case(of_preset("models"), "median_ms", "variant", "pass")
    short = {**HEADS, "sdpa-efficient": "PyTorch", "flex": "Flex"}
    lines = []
    for name in dict.fromkeys(name for name, _ in cases):
        line = [name]
        for direction in ("forward", "backward"):
            others = dict(cases[name, direction])
            ours = others.pop("flashtile")
            line.append(number(ours))
            if others:
                best = min(others, key=others.__getitem__)
                line += [f"{number(others[best])} ({short[best]})", f"{others[best] / ours:.2f}×"]
            else:
                line += ["–", "–"]
        lines.append(line)
    columns = ["fastest other", "speed"]
    return markdown_table(["call", "forward", *columns, "backward", *columns], lines)


def memory_table() -> str:
    """MiB above the inputs."""
    cases = by_case(h200("memory"), "peak_mib", "seqlen_q")
    peers = ("standard", "fa2", "flashtile", "flashtile-triton")
    lines = [
        [f"{int(length):,}"] + [number(case.get(peer)) for peer in peers]
        for (length,), case in cases.items()
    ]
    return markdown_table(["length", *(HEADS[peer] for peer in peers)], lines)


def host_times() -> dict[Key, dict[str, float]]:
    """Microseconds for which a call keeps the host, by library."""
    rows = read("h200/short/host")
    return by_case(rows, "host_us", "variant", "pass", "head_dim", "seqlen_q", "batch")


def host_table() -> str:
    """The same as a table: prompts with 32 heads of 64, decoding with 32:8 heads of 128."""
    titles = {"forward": "forward", "both": "forward and backward"}
    peers = ("flashtile", "flashtile-triton", "sdpa")
    lines = []
    for (variant, direction, head_dim, length, batch), case in host_times().items():
        if variant == "dense" and head_dim == "64":
            title = f"{titles[direction]}, {int(length):,} tokens"
        elif direction == "decode" and batch != "8":
            title = f"{variant}, batch {batch}"
        else:
            continue
        lines.append([title] + [number(case.get(peer)) for peer in peers])
    return markdown_table(["call", *(HEADS[peer] for peer in peers)], lines)


def cpu_table() -> str:
    """Times on a CPU over those of PyTorch's attention with the same causality."""
    rows = [row for row in read("cpu/cpu-targets") if row["seqlen_q"] == row["seqlen_k"] == "4096"]
    native = {
        (row["dtype"], row["pass"], row["causal"]): float(row["median_ms"])
        for row in rows
        if row["provider"] == "sdpa"
    }
    columns = [(dtype, way) for dtype in ("float32", "bfloat16") for way in ("forward", "backward")]
    lines: dict[str, dict[tuple[str, str], str]] = {}
    for row in rows:
        if row["provider"] == "flashtile":
            column = row["dtype"], row["pass"]
            title = row["variant"].replace("dense", "no further option")
            ratio = float(row["median_ms"]) / native[(*column, row["causal"])]
            lines.setdefault(f"{mask(row['causal'])}; {title}", {})[column] = f"{ratio:.2f}"
    return markdown_table(
        ["mask; option", *(f"{dtype} {way}" for dtype, way in columns)],
        [[title, *(cells[column] for column in columns)] for title, cells in lines.items()],
    )


def speedups(ours: str, peer: str, direction: str) -> list[float]:
    """How many times the speed of `peer`, in every case of DENSE."""
    rows = [row for row in h200(*DENSE) if row["pass"] == direction]
    cases = by_case(rows, "tflops", "head_dim", "causal", "seqlen_q")
    return [case[ours] / case[peer] for case in cases.values()]


def times(ratios: list[float]) -> list[str]:
    """The middle and the range of ratios."""
    return [f"**{median(ratios):.2f}×**", f"{min(ratios):.2f}× to {max(ratios):.2f}×"]


def summary_table() -> str:
    """The speed next to each library, in one line each."""
    lines = []
    for ours, way, peers in (
        ("flashtile", "forward", ("fa2", "fa3", "fa4", "cudnn")),
        ("flashtile", "backward", ("fa2", "fa4", "cudnn")),
        ("flashtile-triton", "forward", ("fa2",)),
        ("flashtile-triton", "backward", ("fa2",)),
    ):
        kernels = "Triton" if ours == "flashtile-triton" else "Hopper"
        for peer in peers:
            ratios = speedups(ours, peer, way)
            lines.append([f"{kernels} kernels, {way}, next to {NAMES[peer]}", *times(ratios)])
    keys = ("variant", "batch", "heads_q", "heads_kv", "seqlen_k")
    decoding = by_case(h200("decode"), "median_ms", *keys).values()
    ratios = [case["fa3"] / case["flashtile"] for case in decoding if "fa3" in case]
    lines.append([f"decoding, next to {NAMES['fa3']}", *times(ratios)])
    return markdown_table(["H200, bfloat16", "median speed", "range"], lines)


def choices_table() -> str:
    """Milliseconds of some calls next to what one would do otherwise."""
    dense = ("gpu-dense", "dense", "16384", "True")
    window = ("gpu-hopper", "window 1024", "16384", "True")
    sparse = ("gpu-sparse", "block-sparse 12.5%", "16384", "False")
    rows = h200("dense-128", "hopper", "sparse")
    keys = ("preset", "variant", "seqlen_q", "causal", "pass")
    cases = by_case(rows, "median_ms", *keys)
    lines = []
    for title, key, peers in (
        ("causal, 16,384 tokens", dense, ("fa2", "cudnn")),
        ("window of 1,024, 16,384 tokens", window, ("cudnn", "fa4")),
        ("block mask with 12.5 % of the tiles", sparse, ("flex",)),
    ):
        for direction in ("forward", "backward"):
            case = cases[(*key, direction)]
            lines += [choice(f"{title}, {direction}", case, "flashtile", peer) for peer in peers]
    keys = ("variant", "batch", "heads_kv", "seqlen_k")
    decoding = by_case(h200("decode"), "median_ms", *keys)
    plain, float8 = (decoding[name, "64", "8", "4096"] for name in ("decode", "decode, float8"))
    title = "one token for each of 64 sequences of 4,096 keys"
    lines.append(choice(title, plain, "flashtile", "fa2"))
    both = {"flashtile": plain["flashtile"], "float8": float8["flashtile"]}
    lines.append(choice(f"{title}, float8 cache", both, "float8", "flashtile"))
    case = by_case(h200("float8"), "median_ms", "head_dim", "causal", "seqlen_q")
    title = "float8, causal, 16,384 tokens, head dim 256, forward"
    lines.append(choice(title, case["256", "True", "16384"], "flashtile-float8", "flashtile"))
    host = host_times()["dense", "forward", "64", "512", "1"]
    host = {peer: microseconds / 1000 for peer, microseconds in host.items()}
    lines.append(choice("the host's time of a call with 512 tokens", host, "flashtile", "sdpa"))
    return markdown_table(["call", "flashtile", "instead", "time", "speed"], lines)


def choice(title: str, case: dict[str, float], ours: str, other: str) -> list[str]:
    """A line of the table above."""
    name = NAMES[other] + (" in bfloat16" if other == "flashtile" else "")
    times = [number(case[x]) for x in (ours, other)]
    return [title, times[0], name, times[1], f"{case[other] / case[ours]:.2f}×"]


def main() -> int:
    docs = REPOSITORY / "docs"
    dense, decoding, h100 = h200(*DENSE), h200("decode"), read("h100/dense-128", "h100/dense-256")
    summary = dated(summary_table(), dense, decoding=decoding)
    host = read("h200/short/host")
    choices = h200("dense-128", "hopper", "sparse")
    return update(
        {
            REPOSITORY / "README.md": {"speed": summary},
            docs / "performance.md": {
                "summary": summary,
                "forward": dated(speed_table("forward"), dense),
                "backward": dated(speed_table("backward"), dense),
                "memory": dated(memory_table(), h200("memory")),
                "host": dated(host_table(), host),
                "cpu": dated(cpu_table(), read("cpu/cpu-targets")),
            },
            docs / "performance-shapes.md": {
                "forward h100": dated(h100_table("forward"), h100),
                "backward h100": dated(h100_table("backward"), h100),
                "forward variants": dated(variants_table("forward"), h200("hopper")),
                "backward variants": dated(variants_table("backward"), h200("hopper")),
                "fa-readme": preset_block(
                    "fa-readme",
                    "head_dim",
                    (512, 2048, 16384),
                    "forward and backward against length, as in flash-attention's README",
                ),
                "lecture": preset_block(
                    "lecture",
                    "dtype",
                    (512, 2048, 8192),
                    "forward and backward against length, in float32 and float16",
                ),
            },
            docs / "performance-decoding.md": {
                "decode": dated(decode_table(), decoding),
                "cascade": mask_results.cascade(),
                "float8": dated(float8_table(), h200("float8")),
            },
            docs / "performance-masks.md": mask_results.blocks(),
            docs / "performance-models.md": {
                "models": dated(models_table(), of_preset("models")),
            },
            docs / "which-attention.md": {
                "choices": dated(
                    choices_table(), choices, decoding=decoding, float8=h200("float8"), host=host
                ),
            },
            docs / "learn" / "hopper.md": {
                "lesson timeline": lesson_tables.timeline(),
                "lesson ablation": lesson_tables.ablation(),
            },
        }
    )


if __name__ == "__main__":
    sys.exit(main())
