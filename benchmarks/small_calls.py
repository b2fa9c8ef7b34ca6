"""Small forward calls on a CPU, where the host's own work takes more time than attention.

A call may take 60 microseconds, or 1.1 times as long as PyTorch's `scaled_dot_product_attention` on
the same tensors in the same run, whichever is more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flashtile.cli.timing import cpu_timer

from .peers import flashtile, sdpa
from .rows import Row
from .run import Settings, time_calls
from .shapes import Case, make_inputs
from .targets import Outcome

LEAST_US = 60.0
RATIO = 1.1
SETTINGS = Settings(peers=("flashtile",), seconds=0.5, min_rounds=20)


def cases() -> list[Case]:
    """Two short sequences, and a step of a small language model that generates text."""
    tiny = Case(heads_q=4, heads_kv=4, seqlen_q=16, seqlen_k=16, head_dim=16, head_dim_v=16)
    short = Case(heads_q=12, heads_kv=12, seqlen_q=128, seqlen_k=128)
    step = Case(variant="step", heads_q=9, heads_kv=3, seqlen_q=1, seqlen_k=201, causal=True)
    plain = [
        replace(case, dtype=dtype, causal=causal)
        for case in (tiny, short)
        for dtype in ("float32", "bfloat16")
        for causal in (False, True)
    ]
    return [*plain, step, replace(step, variant="step, cache", cached=True)]


def measure(case: Case) -> list[Outcome]:
    """The call, alternating with PyTorch's, which chooses its kernel."""
    inputs = make_inputs(case)
    ours = flashtile(case, inputs)
    calls = {"flashtile": ours.call("forward")}
    calls["sdpa"] = sdpa(case, inputs, as_views=True).call("forward")
    samples = time_calls(calls, cpu_timer, SETTINGS)
    rows = [Row.of(case, name, "forward").timed(case, samples[name]) for name in calls]
    row, native = replace(rows[0], backend=ours.backend or ""), rows[1]
    assert native.median_ms is not None
    limit = max(RATIO, LEAST_US / (1e3 * native.median_ms))
    return [Outcome(case.variant, row, native, native.median_ms, limit)]


def summary(outcomes: Iterable[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Headings and a line for each call."""
    lines = []
    for o in outcomes:
        row = o.row
        shape = f"({row.batch}, {row.seqlen_q}, {row.heads_q}, {row.head_dim})"
        if row.seqlen_k != row.seqlen_q:
            shape += f" over {row.seqlen_k} keys of {row.heads_kv} heads"
        subject = [row.variant, row.dtype, shape, "causal" if row.causal else "full"]
        times = [f"{1e3 * ms:.1f}" for ms in (row.median_ms or 0.0, o.native_ms)]
        verdict = "met" if o.met else "missed"
        lines.append([*subject, *times, f"{o.ratio:.2f}", f"{o.limit:.2f}", verdict])
    return ["call", "dtype", "queries", "mask", "µs", "SDPA µs", "ratio", "limit", "target"], lines
