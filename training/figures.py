"""FlashAttention's two figures of training: its speed, and its memory against the context.

`python -m training.figures [speed] [memory] [--models gpt2s ...] [--attn eager flashtile ...]`
takes training steps on random tokens; it needs neither a text nor Hydra nor Lightning. A step is
that of training.train: forward, loss, backward, clipping and AdamW, with float32 weights, and
bfloat16 autocast on a GPU.

Each model has a process of its own. In it the attentions take turns on the same weights; the first
steps of a turn are not timed. All train on equally many windows in a step; one that runs out of
memory takes half as many at a time, and its row says so if one window is too much. `--ahead N`
first compiles the kernels in N processes. `--models gpt2s-hf` is the GPT-2 of transformers.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn

from benchmarks.measure import peak_bytes
from flashtile.cli.machine import missing_device, provenance
from flashtile.losses.cross_entropy import CrossEntropyLoss
from flashtile.models.gpt import GPTConfig, GPTLMHeadModel

from .attention import ATTENTIONS, attention_named
from .hugging_face import HuggingFaceGPT2
from .metrics import NAN, known_peak_tflops

MODELS = Path(__file__).parent / "config" / "model"
CONTEXTS: dict[str, dict[str, tuple[int, ...]]] = {  # tokens
    "speed": {
        "gpt2s": (1024, 2048),
        "gpt2m": (1024, 2048),
        "gpt2l": (1024, 2048),
        "gpt3xl": (2048, 8192),
    },
    "memory": {"gpt2s": tuple(1024 << doubled for doubled in range(7))},
}
THEIRS = "-hf"  # after the name of a GPT-2: that of transformers
COMPILED = ("flex", "flashtile")  # in the first call, for seconds
COLOURS = {
    "eager": "#7f7f7f",
    "sdpa": "#cc79a7",
    "sdpa-flash": "#d55e00",
    "sdpa-cudnn": "#e69f00",
    "flex": "#009e73",
    "flashtile": "#0072b2",
}


@dataclass(frozen=True)
class Point:
    """What all attentions are measured on."""

    figure: str
    model: str  # a file of config/model
    context: int  # tokens of a window
    windows: int  # of a step
    layers: int | None = None  # None: the model's own


@dataclass(frozen=True)
class Plan:
    """How every point is measured."""

    attentions: tuple[str, ...]
    device: str
    vocab_size: int
    rounds: int  # turns of each attention
    steps: int  # timed steps of a turn
    deadline: float  # seconds since the epoch; no turn begins later


@dataclass(frozen=True)
class Row:
    """One attention at one point; NaN where it did not run or the device has no known peak."""

    figure: str
    model: str
    context: int
    windows: int
    attn: str
    micro_batch: int = 0  # windows of one forward pass
    seconds: float = NAN  # median of the timed steps
    tokens_per_second: float = NAN
    tflops: float = NAN  # of the model, as FlashAttention counts: `counted_flops`
    mfu: float = NAN  # these over the device's peak
    mfu_unmasked: float = NAN  # without the scores that the causal mask hides
    peak_memory_mib: float = NAN  # with weights, gradients and optimizer state
    note: str = ""


@dataclass
class Turns:
    """What is measured of one attention."""

    micro_batch: int
    seconds: list[float] = field(default_factory=list)
    memory: int = 0  # bytes beyond weights and optimizer state
    failure: str = ""


def main(arguments: list[str] | None = None) -> None:
    """Measure, a line for each row; figures.csv and the pictures go to the folder."""
    asked = parse(arguments)
    asked.folder.mkdir(parents=True, exist_ok=True)
    path = asked.rows or asked.folder / "figures.csv"
    if not asked.rows:
        measure_figures(asked, path)
    rows = read_csv(path)
    pictures = draw(rows, asked.folder)
    print(f"\n{as_text(rows)}\n{path}{pictures}")
    if any(row.attn == "flashtile" and row.note.startswith("failed") for row in rows):
        sys.exit(1)


def measure_figures(asked: argparse.Namespace, path: Path) -> None:
    """Write the rows to `path` as they are measured, a process for each figure and model."""
    began = time.time()
    plan = Plan(
        tuple(asked.attn),
        asked.device,
        asked.vocab_size,
        asked.rounds,
        asked.steps,
        deadline=began + asked.seconds,
    )
    points = points_of(asked)
    start_csv(path)
    if asked.ahead:
        compile_ahead(points, plan, asked.ahead)
        print(f"{time.time() - began:.0f} s: compiled ahead", flush=True)
    for (figure, model), own in groupby(points, lambda point: (point.figure, point.model)):
        if time.time() > plan.deadline:
            print(f"{figure}, {model}: no time left", flush=True)
            continue
        print(f"{time.time() - began:.0f} s: {figure}, {model}", flush=True)
        process = get_context("spawn").Process(target=measure_all, args=(list(own), plan, path))
        process.start()
        process.join()
        if process.exitcode:
            print(f"{figure}, {model}: the process ended with status {process.exitcode}")
    print(f"{time.time() - began:.0f} s", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    known = sorted(path.stem for path in MODELS.glob("*.yaml"))
    known += [f"{name}{THEIRS}" for name in known if name.startswith("gpt2")]
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m training.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("figures", nargs="*", metavar="speed|memory", help="which figure (default: both)")
    add("--models", nargs="+", choices=known, metavar="NAME", help=f"some of {', '.join(known)}")
    add("--contexts", nargs="+", type=int, metavar="N", help="tokens of a window")
    add(
        "--attn",
        nargs="+",
        choices=ATTENTIONS,
        default=list(COLOURS),
        metavar="NAME",
        help=f"attentions (default: {' '.join(COLOURS)})",
    )
    add("--batch-tokens", type=int, default=16384, metavar="N", help="of a step of speed")
    add("--rounds", type=int, default=2, metavar="N", help="turns of each attention (speed)")
    add("--steps", type=int, default=3, metavar="N", help="timed steps of a turn (speed)")
    add("--vocab-size", type=int, default=50304, metavar="N", help="tokens (default: GPT-2's)")
    add("--device", default="cuda" if cuda else "cpu", help="(default: %(default)s)")
    add("--ahead", type=int, default=0, metavar="N", help="processes that compile first")
    add("--seconds", type=float, default=3600.0, metavar="S", help="no turn begins later")
    add("--folder", type=Path, default=Path("runs/figures"), metavar="DIR", help="of the results")
    add("--rows", type=Path, metavar="FILE", help="draw this figures.csv, and measure nothing")
    asked = parser.parse_args(arguments)
    for figure in asked.figures:
        if figure not in CONTEXTS:
            parser.error(f"{figure!r} is neither speed nor memory")
    if asked.models and not asked.contexts:
        for figure in asked.figures or CONTEXTS:
            for model in set(asked.models) - set(CONTEXTS[figure]):
                parser.error(f"--models {model}: pass --contexts; {figure} has none for it")
    if reason := missing_device(asked.device):
        parser.error(f"--device {asked.device}: {reason}")
    return asked


def points_of(asked: argparse.Namespace) -> list[Point]:
    """The points in the order of measuring."""
    points = []
    for figure in asked.figures or CONTEXTS:
        for model in asked.models or CONTEXTS[figure]:
            for context in asked.contexts or CONTEXTS[figure][model]:
                windows = max(1, asked.batch_tokens // context) if figure == "speed" else 1
                points.append(Point(figure, model, context, windows))
    return points


def compile_ahead(points: Sequence[Point], plan: Plan, processes: int) -> None:
    """Run one layer of every point once, so that the kernels are in the caches on disk.

    Failures are not reported, because they occur again in the measurement.
    """
    attentions = tuple(name for name in plan.attentions if name in COMPILED)
    quick = replace(plan, attentions=attentions, rounds=1, steps=0)
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_quietly) as pool:
        wait([pool.submit(measure_all, [replace(p, layers=1)], quick, None) for p in points])


def _quietly() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # instead of one for each core
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def measure_all(points: Sequence[Point], plan: Plan, path: Path | None) -> None:
    """Measure points one after another; append their rows to `path`."""
    for point in points:
        if time.time() > plan.deadline:
            return
        if "flex" in plan.attentions:  # a second length would make it compile for any length
            torch.compiler.reset()
        rows = measure(point, plan)
        if path is not None:
            append_csv(path, rows)
        for row in rows:
            print(f"  {line(row)}", flush=True)


def measure(point: Point, plan: Plan) -> list[Row]:
    """Let the attentions take turns at one point."""
    device = torch.device(plan.device)
    config = model_config(point, plan.vocab_size)
    torch.manual_seed(0)
    with device:
        model = build(point.model, config)
        tokens = torch.randint(plan.vocab_size, (point.windows, point.context + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    # Memory needs no timed steps, and only one turn.
    speed = point.figure == "speed"
    rounds, steps = (plan.rounds, plan.steps) if speed else (1, min(1, plan.steps))
    shuffled = Random(0)
    turns = {name: Turns(point.windows) for name in plan.attentions}
    for done in range(rounds):
        for name in shuffled.sample(plan.attentions, len(plan.attentions)):
            if not turns[name].failure and time.time() < plan.deadline:
                untimed = 1 if done else 2  # the first one compiles
                take_turn(model, optimizer, tokens, name, turns[name], untimed, steps)
    held = sum(p.nbytes for p in model.parameters()) * 3  # AdamW has two numbers for each weight
    flops = counted_flops(config, point.context), model.flops_per_token(point.context)
    peak = known_peak_tflops(device)
    return [row_of(point, name, turn, held, flops, peak) for name, turn in turns.items()]


def build(name: str, config: GPTConfig) -> GPTLMHeadModel | HuggingFaceGPT2:
    """The model of a point; its first turn decides on the attention."""
    if name.endswith(THEIRS):
        return HuggingFaceGPT2(config, "eager", activation_checkpointing=False)
    return GPTLMHeadModel(config)


def use(model: GPTLMHeadModel | HuggingFaceGPT2, name: str, context: int) -> None:
    """Let the model attend with another attention."""
    if isinstance(model, HuggingFaceGPT2):
        model.attend_with(name)
        return
    layers: list[Any] = list(model.transformer.layers)
    for layer in layers:
        layer.mixer.attend = attention_named(name, context)


def model_config(point: Point, vocab_size: int) -> GPTConfig:
    """The model of a point: its file in config/model, whose table of positions fits the context."""
    name = point.model.removesuffix(THEIRS)
    own: dict[str, Any] = yaml.safe_load((MODELS / f"{name}.yaml").read_text("utf-8"))
    if "max_position_embeddings" in own:
        own["max_position_embeddings"] = point.context
    if point.layers is not None:
        own["num_layers"] = point.layers
    return GPTConfig(**own, vocab_size=vocab_size)


def take_turn(
    model: GPTLMHeadModel | HuggingFaceGPT2,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    name: str,
    turn: Turns,
    untimed: int,
    timed: int,
) -> None:
    """Some steps with one attention, in fewer windows at a time when memory runs out."""

    def step() -> None:
        train_step(model, optimizer, tokens, turn.micro_batch)

    while not turn.failure:
        release(optimizer)
        try:
            use(model, name, context=tokens.shape[1] - 1)
            for _ in range(untimed - 1):
                step()
            turn.memory = max(turn.memory, peak_bytes(step, str(tokens.device)))
            for _ in range(timed):
                turn.seconds.append(seconds_of(step, tokens.device))
            return
        except torch.OutOfMemoryError:
            turn.seconds.clear()
            turn.memory = 0
            turn.micro_batch //= 2
            if turn.micro_batch == 0:
                turn.failure = "out of memory"
        except (RuntimeError, ValueError, NotImplementedError) as error:
            reason = f"{error}".strip().split("\n")[0] or type(error).__name__
            turn.failure = f"failed: {reason}"
    release(optimizer)


def release(optimizer: torch.optim.Optimizer) -> None:
    """Give back gradients and memory that an earlier turn left behind."""
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, micro_batch: int
) -> None:
    """One step of the optimizer on `tokens` (windows, context + 1)."""
    parts = tokens.split(micro_batch)
    for part in parts:
        inputs, targets = part[:, :-1].contiguous(), part[:, 1:].contiguous()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            loss: Any = model(inputs, targets=targets, loss=CrossEntropyLoss())
        (loss.loss * (len(part) / len(tokens))).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def seconds_of(step: Any, device: torch.device) -> float:
    """Seconds that one step takes, launches by the host included."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - began


def counted_flops(config: GPTConfig, context: int) -> float:
    """Model FLOPs of a token as FlashAttention's README counts them.

    Narayanan et al. 2021, section 5.1, times 3/4 because nothing is recomputed. Scores that the
    causal mask hides count, and of the head only three quarters.
    """
    hidden, layers = config.hidden_size, config.num_layers
    shares = 1 + context / (6 * hidden) + config.vocab_size / (16 * layers * hidden)
    return 0.75 * 96 * layers * hidden**2 * shares


def row_of(
    point: Point,
    attn: str,
    turn: Turns,
    held: int,
    flops: tuple[float, float],
    peak_tflops: float | None,
) -> Row:
    """The row of one attention."""
    row = Row(point.figure, point.model, point.context, point.windows, attn, note=turn.failure)
    if turn.failure or not turn.seconds:
        return replace(row, note=row.note or "no time left")
    seconds = statistics.median(turn.seconds)
    speed = point.windows * point.context / seconds
    counted, unmasked = (speed * each / 1e12 for each in flops)
    peak = NAN if peak_tflops is None else peak_tflops
    return replace(
        row,
        micro_batch=turn.micro_batch,
        seconds=seconds,
        tokens_per_second=speed,
        tflops=counted,
        mfu=counted / peak,
        mfu_unmasked=unmasked / peak,
        peak_memory_mib=(held + turn.memory) / 2**20,
    )


def start_csv(path: Path) -> None:
    """Write the heading, of the rows' columns and of machine, versions and command."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerow([*(f.name for f in fields(Row)), *provenance("cpu", "")])


def append_csv(path: Path, rows: Sequence[Row]) -> None:
    """Append rows; they are on the disk when this returns."""
    command = shlex.join(["python", "-m", "training.figures", *sys.argv[1:]])
    where = provenance("cuda" if torch.cuda.is_available() else "cpu", command)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerows([*asdict(row).values(), *where.values()] for row in rows)


def read_csv(path: Path) -> list[Row]:
    """The rows of a figures.csv."""
    kinds = {f.name: {"int": int, "float": float, "str": str}[str(f.type)] for f in fields(Row)}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Row(**{name: kind(entry[name]) for name, kind in kinds.items()})
            for entry in csv.DictReader(file)
        ]


def line(row: Row) -> str:
    """One row as text."""
    text = f"{row.figure:6} {row.model:8} {row.context:6,} {row.attn:10}"
    if row.note:
        return f"{text}  {row.note}"
    text += f" {row.micro_batch:7} {row.seconds * 1e3:8,.1f} {row.tokens_per_second:11,.0f}"
    text += f" {row.tflops:7.1f} {row.mfu:6.1%} {row.mfu_unmasked:6.1%}"
    return f"{text} {row.peak_memory_mib / 1024:7.2f}"


def as_text(rows: Sequence[Row]) -> str:
    """All rows as a table, with the speed as a multiple of eager attention's."""
    eager = {(r.figure, r.model, r.context): r.seconds for r in rows if r.attn == "eager"}
    heading = f"{'figure':6} {'model':8} {'tokens':>6} {'attn':10} {'at once':>7} {'ms':>8} "
    heading += f"{'tokens/s':>11} {'TFLOP/s':>7} {'MFU':>6} {'seen':>6} {'GiB':>7} {'x eager':>7}"
    lines = [heading]
    for row in rows:
        ratio = eager.get((row.figure, row.model, row.context), NAN) / row.seconds
        lines.append(line(row) + (f" {ratio:7.2f}" if ratio == ratio else ""))
    lines.append("at once: windows of a forward pass; seen: MFU without the scores that are masked")
    return "\n".join(lines)


def draw(rows: Sequence[Row], folder: Path) -> str:
    """Draw speed.png and memory.png, as far as there are rows; the names of the files."""
    try:
        import matplotlib
    except ImportError:
        return " (no pictures: matplotlib is not installed)"
    matplotlib.use("agg")
    drawn = ""
    for figure, picture in (("speed", draw_speed), ("memory", draw_memory)):
        if own := [row for row in rows if row.figure == figure]:
            picture(own, folder / f"{figure}.png")
            drawn += f", {folder / f'{figure}.png'}"
    return drawn


def draw_speed(rows: Sequence[Row], path: Path) -> None:
    """Draw a group of bars for each model and context, a bar for each attention."""
    from matplotlib import pyplot as plt

    places = list(dict.fromkeys((row.model, row.context) for row in rows))
    names = list(dict.fromkeys(row.attn for row in rows))
    figure, axes = plt.subplots(figsize=(2 + 1.4 * len(places), 4.5), constrained_layout=True)
    for number, name in enumerate(names):
        own = {(row.model, row.context): row for row in rows if row.attn == name}
        x = [place + (number - (len(names) - 1) / 2) * 0.16 for place in range(len(places))]
        heights = [0.0 if own[p].note else own[p].tflops for p in places]
        bars = axes.bar(x, heights, 0.15, color=COLOURS.get(name), label=name)
        labels = [own[p].note.split(":")[0] or f"{own[p].tflops:.3g}" for p in places]
        axes.bar_label(bars, labels, rotation=90, padding=3, fontsize=7)
    axes.set_xticks(range(len(places)), [f"{model}\n{context:,}" for model, context in places])
    axes.set(ylabel="model TFLOP/s", xlabel="model, tokens of a window")
    axes.margins(y=0.15)
    axes.legend(ncols=len(names), fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_memory(rows: Sequence[Row], path: Path) -> None:
    """Draw memory against context; the line of an attention ends where memory runs out."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), constrained_layout=True)
    for name in dict.fromkeys(row.attn for row in rows):
        own = [row for row in rows if row.attn == name]
        fits = [row for row in own if not row.note]
        ends = [f", {row.note.split(':')[0]} at {row.context:,}" for row in own if row.note]
        memory = [row.peak_memory_mib / 1024 for row in fits]
        style = {"color": COLOURS.get(name), "label": name + "".join(ends[:1])}
        axes.loglog([row.context for row in fits], memory, "o-", base=2, **style)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set(xlabel="context (tokens)", ylabel="peak memory of a training step (GiB)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
