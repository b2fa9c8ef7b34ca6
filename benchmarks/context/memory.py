"""Peak memory and time of one forward and backward, by the number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from .cases import ContextCase
from .peers import alone, flashtile
from .rows import ALONE, ContextRow
from .timing import Timed
from .together import Team

TOKENS = (1 << 16, 1 << 17, 1 << 18)  # of all ranks together


def memory_rows(case: ContextCase, team: Team) -> Iterator[ContextRow]:
    """The rows of a case with `TOKENS`: of one process with all of them, and of flashtile.

    Every rank draws its own tokens, so nothing but the pass itself depends on the whole.
    """
    ranks = dist.get_world_size()
    for whole in TOKENS:
        sized = case._replace(tokens=whole // ranks)
        lengths = sized.lengths(ranks)
        row = ContextRow(
            "", "both", documents=1, ranks=ranks, process_group=dist.get_backend(),
            **sized._asdict(),
        )  # fmt: skip
        times: dict[str, float] = {}
        for name in (ALONE, "flashtile"):
            found: list[tuple[float, float, str]] = []

            # Called before the loop goes on, so it sees the `sized` and `lengths` of its own turn.
            def step(name: str = name) -> None:
                if name == ALONE:
                    found.append((*_peak(sized, whole, alone(sized, lengths), team), ""))  # noqa: B023
                    return
                ready = flashtile(sized, lengths)  # noqa: B023
                assert ready.layout is not None
                tokens = ready.layout.local_tokens
                found.append((*_peak(sized, tokens, ready.call, team), ready.way))  # noqa: B023

            mine = replace(row, peer=name)
            if problem := team.problem(step):
                yield replace(mine, skipped=problem)
                continue
            of_ranks = team.tell(found[0])
            # Of one process the fastest one, as they all compute the same.
            times[name] = (min if name == ALONE else max)(ms for ms, _, _ in of_ranks)
            efficiency = None
            if name != ALONE and ALONE in times:
                efficiency = times[ALONE] / ranks / times[name]
            yield replace(
                mine,
                way=found[0][2],
                single_ms=times[name],
                single_efficiency=efficiency,
                peak_mib=max(peak for _, peak, _ in of_ranks),
            )


def _peak(
    case: ContextCase, tokens: int, call: Callable[..., Tensor], team: Team
) -> tuple[float, float]:
    """Milliseconds of a forward and backward, the second one, and the peak in MiB."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    heads = (case.heads_q, case.heads_kv, case.heads_kv, case.heads_q)
    dtype = getattr(torch, case.dtype)
    q, k, v, dout = (
        torch.randn(1, tokens, count, case.head_dim, device="cuda", dtype=dtype) for count in heads
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def both() -> None:
        torch.autograd.grad(call(*leaves), leaves, dout)

    both()
    timed = Timed(team, both, nullcontext)
    milliseconds = timed.once()
    return milliseconds, (torch.cuda.max_memory_allocated() - before) / 2**20
