"""The output of the demo: four checks, each with its table and its verdict."""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flashtile import __version__, attention
from flashtile.cli.machine import busy, device_name
from flashtile.integrations.transformers import register
from flashtile.problem import dtype_name

from . import inputs, layer, model_checks
from .picture import draw
from .progress import Progress
from .turns import ROUNDS, RUNS

LABELS = {"eager": "standard", "sdpa": "SDPA"}


class Size(NamedTuple):
    """How much the demo does."""

    tokens: int  # for the loss
    new_tokens: int
    lengths: tuple[int, ...]  # of the attention layer


FULL = Size(1024, 32, (512, 1024, 2048, 4096, 8192))
QUICK = Size(512, 12, (512, 1024, 2048))


class Results(NamedTuple):
    """Everything that was measured."""

    device: str
    loss: model_checks.Loss
    continuation: model_checks.Continuation
    prompt: str  # its last line
    continuation_text: str  # what follows it
    layers: layer.Layers
    packed: model_checks.Packed


def show(args: argparse.Namespace, size: Size | None = None) -> int:
    """Run everything; returns the exit status."""
    start = time.perf_counter()
    size = size or (QUICK if args.quick else FULL)
    console = Console(highlight=False)
    path, play = inputs.find_model(args.model), inputs.find_play(args.data)
    device = args.device or usable_device(console)
    _greet(console, device)
    with Progress(console) as progress:
        progress.begin("loading SmolLM2-135M from its GGUF file", total=1)
        model, tokenizer = inputs.load(path, device)
        text = play.read_text(encoding="utf-8", errors="replace")
        cut = inputs.cut(text, tokenizer, size.tokens, device)
        progress.advance()
        results = _measure(console, progress, model, tokenizer, cut, size, device)
    passed = _conclude(console, results, args.output, time.perf_counter() - start)
    return 0 if passed else 1


def usable_device(console: Console) -> str:
    """A GPU when there is one and flashtile has a backend for it, else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    try:
        attention(*torch.zeros(3, 1, 16, 1, 64, device="cuda").unbind())
    except NotImplementedError as error:
        console.print(f"There is a GPU, but flashtile cannot use it: {error}\n", style="yellow")
        return "cpu"
    return "cuda"


def _greet(console: Console, device: str) -> None:
    console.print(
        Panel(
            "Standard attention stores a (length x length) matrix of scores. flashtile computes "
            "the same result tile by tile, without this matrix.\n"
            "Here a real language model, SmolLM2-135M, reads Shakespeare's Hamlet with both, and "
            f"with PyTorch's SDPA. They take turns; each time is the best of {ROUNDS} runs.",
            title=f"flashtile {__version__}",
            subtitle=f"{device_name(device)}, torch {torch.__version__}, float32",
            box=box.ROUNDED,
        )
    )
    if warning := (busy() if device == "cpu" else ""):
        console.print(f"Note: {warning}.", style="yellow")


def _measure(
    console: Console,
    progress: Progress,
    model: Any,
    tokenizer: Any,
    cut: inputs.Text,
    size: Size,
    device: str,
) -> Results:
    """The four checks, each printed when it is done."""
    name = register()
    names = ("eager", "sdpa", name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries; flashtile's are printed

        progress.begin("1 reading", RUNS * len(names))
        loss = model_checks.loss(model, cut.passage, names, progress.advance)
        _print_loss(console, loss, cut.passage.shape[1])

        progress.begin("2 writing", RUNS * len(names) * size.new_tokens)
        continuation = model_checks.continuation(
            model, cut.prompt, names, size.new_tokens, progress.advance
        )
        text = tokenizer.decode(continuation.tokens[name], skip_special_tokens=True)
        prompt = tokenizer.decode(cut.prompt[0]).splitlines()[-1]
        _print_continuation(console, continuation, prompt, text)

        progress.begin("3 measuring", len(size.lengths) * len(layer.LAYERS) * len(layer.PASSES))
        rows = []
        for row in layer.measure(size.lengths, device):
            rows.append(row)
            progress.advance()
        layers = layer.Layers(rows, layer.DTYPES[device])
        _print_layers(console, layers)

        progress.begin("4 packing", RUNS * 3)
        packed = model_checks.packed(model, cut.sentences, name, progress.advance)
        _print_packed(console, packed)
    return Results(device, loss, continuation, prompt, text, layers, packed)


def _label(name: str) -> str:
    return LABELS.get(name, name)


def _table(*headings: str) -> Table:
    table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _print_check(console: Console, title: str, table: Table, passed: bool, verdict: str) -> None:
    console.print(f"\n[bold]{title}[/bold]")
    console.print(table)
    mark, style = ("equal", "bold green") if passed else ("FAILED", "bold red")
    console.print(Text.assemble((mark, style), f": {verdict}"))


def _print_loss(console: Console, loss: model_checks.Loss, tokens: int) -> None:
    table = _table("attention", "loss, nats per token", "seconds")
    for name, mean in loss.mean.items():
        table.add_row(_label(name), f"{mean:.7f}", f"{loss.seconds[name]:.2f}")
    verdict = f"the losses differ by at most {loss.difference:.1e} (allowed: 1e-5)"
    _print_check(console, f"1. The model reads {tokens:,} tokens", table, loss.passed, verdict)


def _print_continuation(
    console: Console, continuation: model_checks.Continuation, prompt: str, text: str
) -> None:
    table = _table("attention", "new tokens", "tokens per second")
    for name, tokens in continuation.tokens.items():
        speed = len(tokens) / continuation.seconds[name]
        table.add_row(_label(name), str(len(tokens)), f"{speed:.1f}")
    verdict = "all three write the same tokens, with the key-value cache"
    if not continuation.passed:
        verdict = "the tokens differ"
    _print_check(
        console,
        "2. The model continues the text (greedy generation)",
        table,
        continuation.passed,
        verdict,
    )
    console.print(Text.assemble(("  ... " + prompt, "dim"), (text, "italic")))


def _print_layers(console: Console, layers: layer.Layers) -> None:
    console.print("\n[bold]3. One attention layer of the model, at growing length[/bold]")
    for direction in layer.PASSES:
        table = _table(
            "tokens",
            *(f"{_label(name)}\nms" for name in layer.LAYERS),
            *(f"{_label(name)}\nMiB" for name in layer.LAYERS),
            "times\nfaster",
            "times\nsmaller",
        )
        dtype = dtype_name(layers.dtype)
        console.print(f"  [italic]{direction}[/italic]: time and peak memory, {dtype}")
        for length in sorted({row.length for row in layers.rows}):
            table.add_row(*_layer_cells(layers, direction, length))
        console.print(table)
    growths = ", ".join(
        f"length^{layers.growth(name, layer.PASSES[1]):.2f} ({_label(name)})"
        for name in layer.LAYERS
    )
    mark, style = ("as expected", "bold green") if layers.passed else ("FAILED", "bold red")
    console.print(
        Text.assemble(
            (mark, style),
            f": equal results (they differ by {layers.error:.0e}), and over the last doubling of "
            f"the length the memory of training grows as {growths}: quadratic is 2, linear 1",
        )
    )


def _layer_cells(layers: layer.Layers, direction: str, length: int) -> list[str]:
    rows = {
        row.name: row for row in layers.rows if (row.direction, row.length) == (direction, length)
    }
    times = [row.milliseconds for row in rows.values()]
    peaks = [row.peak_mib for row in rows.values()]
    faster, smaller = "-", "-"  # if standard attention takes too long, or too much memory
    if times[0] is not None and peaks[0] is not None:
        faster = f"{times[0] / cast(float, times[-1]):.1f}"
        smaller = f"{peaks[0] / cast(float, peaks[-1]):.0f}"
    return [
        f"{length:,}",
        *("-" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.1f}" for x in times),
        *("-" if x is None else f"{x:,.0f}" for x in peaks),
        faster,
        smaller,
    ]


def _print_packed(console: Console, packed: model_checks.Packed) -> None:
    table = _table("attention", "tokens computed", "seconds", "logits differ by")
    for way, seconds in packed.seconds.items():
        computed = packed.real if way == model_checks.PACKED_ROW else packed.padded
        difference = packed.differences.get(way)
        shown = "" if difference is None else f"{difference:.1e}"
        table.add_row(way.replace("eager", "standard"), f"{computed:,}", f"{seconds:.2f}", shown)
    lengths = f"{min(packed.lengths)} to {max(packed.lengths)}"
    worst = max(packed.differences.values())
    verdict = (
        f"the logits of all {packed.real:,} real tokens differ by at most {worst:.0e} "
        "(allowed: 1e-3), and the most likely next tokens are the same"
    )
    title = f"4. A batch of {len(packed.lengths)} speeches, {lengths} tokens long"
    _print_check(console, title, table, packed.passed, verdict)


def _conclude(console: Console, results: Results, output: Path, seconds: float) -> bool:
    """The picture, and the last lines; returns whether every check holds."""
    draw(output, results)
    checks = {
        "loss": results.loss.passed,
        "continuation": results.continuation.passed,
        "memory": results.layers.passed,
        "padded batch": results.packed.passed,
    }
    failed = [name for name, passed in checks.items() if not passed]
    summary = f"All four checks hold. {_comparison(results.layers, results.device)}"
    style = "green" if not failed else "red"
    console.print(
        Panel(
            summary if not failed else f"These checks FAILED: {', '.join(failed)}.",
            subtitle=f"{seconds:.0f} seconds in all",
            border_style=style,
            box=box.ROUNDED,
        )
    )
    console.print(f"picture: {output}", soft_wrap=True)  # a path must survive being copied
    return not failed


def _comparison(layers: layer.Layers, device: str) -> str:
    """flashtile's attention beside the two others, at the longest length of standard attention."""
    length = layers.column("standard", layer.PASSES[1])[-1].length
    standard, sdpa, ours = (
        next(row for row in layers.column(name, layer.PASSES[1]) if row.length == length)
        for name in layer.LAYERS
    )
    text = (
        f"Training on {length:,} tokens, flashtile's attention is "
        f"{_times_as_fast(standard, ours):.1f} times as fast as standard attention and takes "
        f"{ours.peak_mib:,.0f} MiB instead of {standard.peak_mib:,.0f}; it is "
        f"{_times_as_fast(sdpa, ours):.2f} times as fast as PyTorch's SDPA, which takes "
        f"{sdpa.peak_mib:,.0f} MiB."
    )
    if device == "cpu":
        text += (
            " The two are equal up to noise: on a CPU flashtile runs such a plain call with SDPA's "
            "own kernel. It gains with packed sequences (check 4), windows, masks and caches, and "
            "on a GPU (last panel of the picture)."
        )
    return text


def _times_as_fast(other: layer.Row, ours: layer.Row) -> float:
    return cast(float, other.milliseconds) / cast(float, ours.milliseconds)
