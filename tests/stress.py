"""Long runs of calls, in a process that can be killed when a kernel never ends.

    python tests/stress.py repeats HEAD_DIM DROPOUT_P DTYPE COUNT
    python tests/stress.py alone NUMBER FOLDER
    python tests/stress.py threads COUNT FOLDER

`test_stress.py` starts it. `repeats` makes one call again and again while other streams work, with
every buffer poisoned. `alone` keeps the results of one case, in a process that made no other call;
`threads` makes the calls of all cases from many threads and streams, and by replaying graphs, and
expects these results. Each line is printed before what it says. Without a GPU all this runs on the
CPU, without streams and graphs.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from poison import poisoned_makers
from torch import Tensor

import flashtile
from flashtile.layers.rotary import apply_rotary_emb
from flashtile.testing import (
    STRIDE_STYLES,
    allowed_error,
    attention_reference,
    attention_varlen_reference,
    cu_seqlens,
    drawn_keep,
    generator,
    normal,
    strided,
)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
NAMES = ("out", "lse", "dq", "dk", "dv")
LENGTHS = [300, 0, 65, 1, 900, 257]  # of packed sequences

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Call:
    """A call; its tensors come from its seed."""

    head_dim: int
    packed: bool
    causal: bool
    M: int = 1000
    N: int = 1000
    heads: tuple[int, int] = (8, 2)
    layout: str = "contiguous"  # one of STRIDE_STYLES
    wanted: str = "qkv"  # the tensors that require a gradient
    deterministic: bool = True
    dropout_p: float = 0.0  # each call draws the mask of the seed
    dtype: torch.dtype = torch.bfloat16
    decodes: bool = False  # also a decoding step, with append and rotary embedding, and a rotation
    seed: int = 0

    def tensors(self, device: str = DEVICE) -> list[Tensor]:
        """q, k, v and dout."""
        g, (Hq, Hk) = generator(self.seed), self.heads
        rows, keys = ((sum(LENGTHS),),) * 2 if self.packed else ((2, self.M), (2, self.N))
        shapes = [(*rows, Hq), (*keys, Hk), (*keys, Hk), (*rows, Hq)]
        made = [normal(g, *shape, self.head_dim, dtype=self.dtype) for shape in shapes]
        return [strided(x.to(device), self.layout) for x in made]

    def function(self, dense: Callable[..., Any], packed: Callable[..., Any]) -> Callable[..., Any]:
        """The function for this layout, with the arguments that both have."""
        if not self.packed:
            return partial(dense, causal=self.causal)
        cu, longest = cu_seqlens(LENGTHS), max(LENGTHS)
        starts = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        if packed is flashtile.attention_varlen:
            starts = {name: x.to(DEVICE) for name, x in starts.items()}
        return partial(packed, **starts, **lengths, causal=self.causal)

    def prepared(self, deterministic: bool) -> Callable[[], Results]:
        """The call and its backward on tensors made here, for all gradients that are wanted."""
        function = self.function(flashtile.attention, flashtile.attention_varlen)
        *qkv, dout = self.tensors()
        named = dict(zip("qkv", qkv, strict=True))
        leaves = {f"d{name}": x for name, x in named.items() if name in self.wanted}
        for x in leaves.values():
            x.requires_grad_()

        extra = self._ops(*qkv) if self.decodes else dict

        def run() -> Results:
            if self.dropout_p > 0:
                torch.manual_seed(self.seed)
            out, lse = function(
                **named, dropout_p=self.dropout_p, deterministic=deterministic, return_lse=True
            )
            found = {"out": out.detach(), "lse": lse.detach()}
            if leaves:
                gradients = torch.autograd.grad(out, list(leaves.values()), dout)
                found |= dict(zip(leaves, gradients, strict=True))
            return found | extra()

        return run

    def _ops(self, *qkv: Tensor) -> Callable[[], Results]:
        """Two tokens that are appended at the same place by each call, and the rotated queries."""
        q, k, v = (x.detach() for x in qkv)
        k_cache, v_cache = k.clone(), v.clone()
        angles = torch.arange(2000, device=DEVICE)[:, None] / torch.arange(1, 9, device=DEVICE)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        lengths = torch.full((len(q),), self.N - 5, dtype=torch.int32, device=DEVICE)

        def run() -> Results:
            step: Any = flashtile.attention_with_kvcache(
                q[:, :2], k_cache, v_cache, k[:, :2], v[:, :2], cache_seqlens=lengths,
                rotary_cos=cos, rotary_sin=sin, causal=True,
            )  # fmt: skip
            return {"step": step, "rotated": apply_rotary_emb(q, cos, sin)}

        return run

    def reference(self, dtype: torch.dtype) -> Results:
        """The same by the reference that computes in `dtype`, on the CPU."""
        function = self.function(attention_reference, attention_varlen_reference)
        *qkv, dout = (x.to(dtype) for x in self.tensors("cpu"))
        leaves = [x.requires_grad_() for x in qkv]
        M, N = (max(LENGTHS),) * 2 if self.packed else (self.M, self.N)
        sizes = len(LENGTHS) if self.packed else 2, self.heads[0], M, N
        keep = drawn_keep(self.seed, self.dropout_p, sizes, DEVICE) if self.dropout_p > 0 else None
        result = function(*leaves, dropout_p=self.dropout_p, keep=keep, compute_dtype=dtype)
        gradients = torch.autograd.grad(result.out, leaves, dout.to(result.out.dtype))
        results = (result.out.detach(), result.lse.detach(), *gradients)
        return dict(zip(NAMES, results, strict=True))


class Load:
    """Other work on two more streams of the GPU: products and fills of random sizes."""

    def __init__(self) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(2 * ON_GPU)]
        self.matrix = torch.randn((2048,) * 2, device=DEVICE, dtype=torch.bfloat16)
        self.random = random.Random(0)

    def add(self) -> None:
        """A little more of it."""
        for stream in self.streams:
            size = 64 * self.random.randint(1, 32)
            with torch.cuda.stream(stream):
                if self.random.random() < 0.5:
                    torch.mm(self.matrix[:size], self.matrix)
                else:
                    torch.empty(size << 10, device=DEVICE).normal_()


def repeats(head_dim: int, dropout_p: float, dtype: torch.dtype, count: int) -> None:
    """`count` times each call: bitwise equal, but the default dQ only within the rule."""
    for packed, causal in ((False, True), (True, True), (False, False)):
        call = Call(head_dim, packed=packed, causal=causal, dropout_p=dropout_p, dtype=dtype)
        truth, plain = call.reference(torch.float64), call.reference(dtype)
        allowed = {x: allowed_error(dtype, truth[x], plain[x]) for x in truth}
        truth = {name: x.to(DEVICE) for name, x in truth.items()}
        for deterministic in (True, False):
            what = f"head dim {head_dim}, {call}, deterministic={deterministic}"
            print(what, flush=True)
            run = call.prepared(deterministic)
            first = run()
            far = {name: x for name, x in _errors(first, truth).items() if not x <= allowed[name]}
            assert not far, f"{what}: errors {far}, allowed {allowed}"
            same = [name for name in NAMES if deterministic or name != "dq"]
            _repeat(run, count, first, same, (truth["dq"], allowed["dq"]), what)


def _errors(got: Results, truth: Results) -> dict[str, float]:
    """The largest differences; a log-sum-exp of -inf is right where the truth is."""
    gaps = {name: (x.double() - truth[name]).abs() for name, x in got.items()}
    return {
        name: gap.masked_fill(torch.isinf(truth[name]) & (got[name] == truth[name]), 0).max().item()
        for name, gap in gaps.items()
    }


def _repeat(
    run: Callable[[], Results],
    count: int,
    first: Results,
    same: list[str],
    rule: tuple[Tensor, float],
    what: str,
) -> None:
    load, (truth, allowed) = Load(), rule
    wrong = torch.zeros(len(same) + 1, dtype=torch.int64, device=DEVICE)
    for repeat in range(1, count + 1):
        load.add()
        again = run()
        for index, name in enumerate(same):
            wrong[index] += (_bits(again[name]) != _bits(first[name])).any()
        if "dq" not in same:
            wrong[-1] += ~((again["dq"] - truth).abs().max() <= allowed)
        if repeat % 100 == 0 or repeat == count:  # waits, so that no more than that is under way
            bad = dict(zip([*same, "dq by the rule"], wrong.tolist(), strict=True))
            assert not any(bad.values()), f"{what}: wrong in repeats up to {repeat}: {bad}"


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


# Threads

CASES = 24
THREADS, STREAMS = 8, 4


def case(number: int) -> Call:
    """A number always gives the same call; the calls share sizes, and differ in the rest."""
    chance = random.Random(number)
    M, N = [(300, 300), (129, 700), (1000, 1000)][number % 3]
    return Call(
        head_dim=[64, 128, 96, 256][number % 4],
        packed=number % 5 == 0,
        causal=number % 2 == 0,
        M=M,
        N=N,
        heads=chance.choice([(8, 2), (4, 4)]),
        layout=chance.choice(STRIDE_STYLES),
        wanted=chance.choice(["qkv", "qkv", "", "q", "kv"]),
        deterministic=chance.random() < 0.7,
        decodes=number % 2 == 1 and number % 5 > 0,
        seed=number,
    )


def repeatable(call: Call, results: Results) -> Results:
    """The results that do not depend on the order in which programs end."""
    return {name: x for name, x in results.items() if call.deterministic or name != "dq"}


def alone(number: int, folder: Path) -> None:
    """Keep the results of a case."""
    call = case(number)
    print(call, flush=True)
    results = call.prepared(call.deterministic)()
    kept = {name: x.cpu() for name, x in repeatable(call, results).items()}
    torch.save(kept, folder / f"{number}.pt")


@dataclass
class Prepared:
    """A case that is ready to run, eagerly and, on a GPU, as a graph."""

    call: Call
    expected: Results
    run: Callable[[], Results]
    graph: Any = None
    captured: Results | None = None

    def __post_init__(self) -> None:
        self.lock = threading.Lock()  # of the graph, whose results lie in one place

    @classmethod
    def of(cls, number: int, folder: Path) -> Prepared:
        """With the results that `alone` kept."""
        call = case(number)
        expected = torch.load(folder / f"{number}.pt", map_location=DEVICE)
        made = cls(call, expected, call.prepared(call.deterministic))
        if ON_GPU and number % 2:
            with torch.cuda.stream(torch.cuda.Stream()):
                made.run()
            torch.cuda.synchronize()
            made.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(made.graph):
                made.captured = made.run()
        return made

    def wrong(self, replays: bool) -> list[str]:
        """The names of the results that are not the expected ones, after waiting for them."""
        if self.graph is None or not replays:
            return self._differing(self.run())
        with self.lock:
            self.graph.replay()
            assert self.captured is not None
            return self._differing(self.captured)

    def _differing(self, results: Results) -> list[str]:
        got = repeatable(self.call, results)
        return [name for name, x in got.items() if not torch.equal(x, self.expected[name])]


def threads(count: int, folder: Path) -> None:
    """`count` calls in each thread."""
    print("preparing the cases", flush=True)
    cases = [Prepared.of(number, folder) for number in range(CASES)]
    streams = [torch.cuda.Stream() if ON_GPU else None for _ in range(STREAMS)]
    if ON_GPU:
        torch.cuda.synchronize()
    failures: list[str] = []

    def work(thread: int) -> None:
        chance = random.Random(thread)
        for number in range(count):
            prepared, stream = chance.choice(cases), chance.choice(streams)
            replays = chance.random() < 0.5
            what = f"thread {thread}, call {number}, replays={replays}: {prepared.call}"
            if number % 20 == 0:
                print(what, flush=True)
            try:
                with torch.cuda.stream(stream) if stream else nullcontext():
                    if wrong := prepared.wrong(replays):
                        failures.append(f"{what}: {wrong}")
            except Exception as error:
                failures.append(f"{what}: {error!r}")
                return

    workers = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, "\n".join([f"{len(failures)} calls failed", *failures[:5]])


def main(mode: str, *arguments: str) -> None:
    """One of the modes above."""
    for owner, name, replacement in poisoned_makers():
        setattr(owner, name, replacement)
    if mode == "repeats":
        head_dim, dropout_p, dtype, count = arguments
        repeats(int(head_dim), float(dropout_p), getattr(torch, dtype), int(count))
    else:
        {"alone": alone, "threads": threads}[mode](int(arguments[0]), Path(arguments[1]))


if __name__ == "__main__":
    main(*sys.argv[1:])
    # PyTorch's autograd threads can abort an interpreter that ends (pytorch/pytorch#190489), and
    # the exit status is only about the calls.
    os._exit(0)
