"""What is compared: a `Job` is one pass of one case by one clock; named sets of jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..peers import PEERS
from ..presets import (
    BOTH_PASSES,
    PRESETS,
    SEED,
    TOKENS,
    block_sparse_case,
    plain_case,
    preset_cases,
)
from ..rows import is_ours
from ..shapes import Case, vary

GPU, HOST, GRAPH = "gpu", "host", "graph"
CLOCKS = {
    GPU: "CUDA events around the call, on a CPU wall clock",
    HOST: "until an eager call returns, in bursts of 20",
    GRAPH: "CUDA events around the replay of a graph",
}
DIRECTIONS = ("forward", "backward", "both")

# 32 sequences; two of them have 20,000 of the 54,145 tokens.
SKEWED = (
    561, 727, 1619, 623, 3817, 12000, 968, 164, 656, 494, 492, 55, 774, 1485, 5251, 1904, 43,
    160, 2168, 196, 8000, 116, 1791, 2862, 968, 966, 871, 318, 1376, 663, 803, 1254,
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One pass of one case, timed by one clock; `peer` is one of flashtile's in `peers.PEERS`.

    The case's preset is the set that the job belongs to.
    """

    case: Case
    direction: str = "forward"
    clock: str = GPU
    peer: str = "flashtile"

    def __post_init__(self) -> None:
        for name, known in (("direction", DIRECTIONS), ("clock", CLOCKS), ("peer", PEERS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} {getattr(self, name)!r}, want one of {', '.join(known)}")
        if not is_ours(self.peer):
            raise ValueError(f"peer {self.peer!r} is not flashtile, so the trees share it")

    @property
    def kernels(self) -> tuple[object, ...]:
        """Roughly what decides which kernels run; jobs that share it compile little anew."""
        case = self.case
        sizes = case.head_dim, case.head_dim_v, case.heads_q == case.heads_kv, case.dtype
        masks = case.causal, max(case.window) >= 0, case.chunk > 0, case.block_sparse
        scores = case.softcap > 0, case.alibi, case.bias, case.sink, case.dropout > 0
        layout = case.documents > 0, case.cached, case.page_size, case.cache_dtype, case.appends
        work = self.direction == "forward", self.peer, case.layer, case.recipe
        return (*work, *sizes, *masks, *scores, *layout)


def passes(cases: Iterable[Case], *directions: str, **how: str) -> list[Job]:
    """A job for each case and direction."""
    return [Job(case, direction, **how) for case in cases for direction in directions]


def _papers() -> list[Job]:
    dense = preset_cases("gpu-dense")
    return passes((case for case in dense if case.seqlen_k in (1024, 4096, 16384)), *BOTH_PASSES)


def _models() -> list[Job]:
    """(query heads, key heads, tokens, causal) of language models with heads of 128."""
    shapes = (
        (24, 24, 5000, True),
        (24, 4, 5000, True),
        (24, 4, 5000, False),
        (32, 8, 4096, True),
        (32, 8, 16384, True),
        (8, 1, 8192, True),
        (8, 1, 32768, True),
        (28, 4, 6000, True),
    )
    cases = [
        plain_case(128, length, heads_q=heads, heads_kv=key_heads, causal=causal, variant="model")
        for heads, key_heads, length, causal in shapes
    ]
    return passes(cases, *BOTH_PASSES)


def _packed() -> list[Job]:
    """The preset's sequences of even lengths, skewed ones with other heads, many short ones."""
    even = [case for case in preset_cases("gpu-hopper") if case.documents]

    def packed(name: str, lengths: tuple[int, ...], **changes: Any) -> Case:
        total, packing = sum(lengths), {"documents": len(lengths), "lengths": lengths}
        return plain_case(128, total, variant=f"packed {name}", **packing, **changes)

    others = [
        packed("skewed", SKEWED),
        packed("skewed", SKEWED, causal=True),
        packed("skewed", SKEWED, causal=True, heads_q=32, heads_kv=8),
        packed("short", (128,) * 128, causal=True),
    ]
    return passes([*even, *others], *BOTH_PASSES)


def _sparse() -> list[Job]:
    masks = [block_sparse_case(share) for share in (0.05, 0.125, 0.25, 0.375, 0.5, 0.75)]
    return passes([plain_case(128, TOKENS), *masks], *BOTH_PASSES)


def _host() -> list[Job]:
    """The host's time of calls whose kernels take little, and the decoding ones by a graph."""
    dense = [plain_case(128, length, causal=True) for length in (128, 512, 1024)]
    packed = vary(dense[-1], "varlen")
    cached = plain_case(
        128, 8192, batch=16, heads_q=32, heads_kv=8, seqlen_q=1, cached=True, variant="decode"
    )
    appended = replace(cached, appends=True, variant="decode, append and rotary")
    return [
        *passes([*dense, packed], "forward", "both", clock=HOST),
        *passes([cached, appended], "forward", clock=HOST),
        *passes([cached, appended], "forward", clock=GRAPH),
    ]


def _deterministic() -> list[Job]:
    cases = preset_cases("gpu-deterministic")
    return passes(cases, "backward", peer="flashtile-deterministic")


def _head_dims() -> list[Job]:
    cases = [
        plain_case(head_dim, 4096, batch=4, causal=causal)
        for head_dim in (80, 96, 112, 144, 160, 176, 192)
        for causal in (False, True)
    ]
    narrow = [
        plain_case(192, 4096, batch=4, heads_q=16, heads_kv=16, head_dim_v=128, causal=causal)
        for causal in (False, True)
    ]
    return passes(cases + [replace(case, variant="values of 128") for case in narrow], *BOTH_PASSES)


SETS: dict[str, Callable[[], list[Job]]] = {
    "papers": _papers,
    "models": _models,
    "packed": _packed,
    "sparse": _sparse,
    "host": _host,
    "deterministic": _deterministic,
    "headdims": _head_dims,
}
FIELD = "field"


def jobs_of(name: str) -> list[Job]:
    """The jobs of a set, a preset, ``field:SEED`` or ``field:SEED:I,J``, or a JSON file.

    Raises:
        ValueError: there is no such set, or the file holds something else.
    """
    if name.partition(":")[0] == FIELD:
        return _field(name)
    if name in PRESETS:
        return _preset(name)
    if name in SETS:
        jobs = SETS[name]()
    elif Path(name).is_file():
        jobs = _read(Path(name))
    else:
        known = ", ".join([*SETS, f"{FIELD}:SEED:I,J", *PRESETS])
        raise ValueError(f"no set of cases and no file {name!r}; sets: {known}")
    cases = dict.fromkeys(replace(job.case, preset="", index=0) for job in jobs)
    numbered = {
        case: replace(case, preset=Path(name).stem, index=number)
        for number, case in enumerate(cases, 1)
    }
    return [replace(job, case=numbered[replace(job.case, preset="", index=0)]) for job in jobs]


def _field(name: str) -> list[Job]:
    try:
        seed, wanted = [*name.split(":")[1:], "", ""][:2]
        chosen = {int(number) for number in wanted.split(",") if number}
        cases = preset_cases("gpu-field", int(seed or SEED))
    except ValueError:
        raise ValueError(f"{name!r}, want {FIELD}, {FIELD}:SEED or {FIELD}:SEED:I,J") from None
    return passes((c for c in cases if not chosen or c.index in chosen), *BOTH_PASSES)


def _preset(name: str) -> list[Job]:
    """The passes of a preset by those of its peers that are flashtile and choose the backend."""
    settings = PRESETS[name].settings
    clocks = [HOST] if settings.host else [GRAPH] if settings.cuda_graph else [GPU]
    ours = [peer for peer in settings.peers if is_ours(peer) and peer != "flashtile-triton"]
    return [
        Job(case, direction, clock, peer)
        for case in preset_cases(name)
        for direction in settings.directions
        for clock in clocks
        for peer in ours
    ]


def _read(path: Path) -> list[Job]:
    """A list of objects: fields of `Case`, ``passes``, ``clock``, ``peer``."""
    try:
        return [job for entry in json.loads(path.read_text()) for job in _entry(dict(entry))]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _entry(entry: dict[str, Any]) -> list[Job]:
    directions = entry.pop("passes", ["forward"])
    how = {name: entry.pop(name) for name in ("clock", "peer") if name in entry}
    entry |= {name: tuple(entry[name]) for name in ("window", "lengths") if name in entry}
    return passes([Case(**entry)], *directions, **how)
