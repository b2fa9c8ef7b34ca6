"""Writes the support table into docs/hardware.md, from what the backends themselves say.

``python docs/support_table.py`` rewrites the lines between the two markers; with ``--check`` it
only says whether they are current. Each row is an `AttentionProblem` made up for it, each cell the
answer of a backend's `unsupported_reasons`, so the table cannot promise what a call would refuse.
The reasons stand in footnotes below the table.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from generated import update

from flashtile import cache_formats
from flashtile.call import dispatch
from flashtile.problem import AttentionProblem, Options

INT8 = cache_formats.int8(64)
PAGE = Path(__file__).parent / "hardware.md"

# Where each backend would run: device type, compute capability.
HOMES = {"cpu": ("cpu", None), "triton": ("cuda", (8, 0)), "hopper": ("cuda", (9, 0))}

BASE = AttentionProblem(
    device_type="cpu",
    capability=None,
    dtype=torch.bfloat16,
    layout="dense",
    B=2,
    M=1024,
    N=1024,
    Hq=8,
    Hk=8,
    D=64,
    Dv=64,
    page_size=0,
    options=Options(1024, 1024, 0.125),
    has_lengths=False,
    has_alibi=False,
    has_bias=False,
    has_sink=False,
    has_descale=False,
    block_tile=None,
    needs_grad=True,
    bias_needs_grad=False,
)


def options(**changes: object) -> dict[str, object]:
    """The change of a problem whose options change."""
    # Any option may change, so their types are not known here.
    return {"options": BASE.options._replace(**changes)}  # type: ignore[arg-type]


ROWS: dict[str, dict[str, object]] = {
    "forward and backward, float16 and bfloat16": {},
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
    "float8 e4m3 (forward)": {"dtype": torch.float8_e4m3fn, "needs_grad": False},
    "causal (bottom-right)": options(window_right=0),
    "sliding window": options(window_left=256, window_right=0),
    "chunked attention": options(attention_chunk=256),
    "grouped and multi-query heads": {"Hk": 2},
    "packed sequences (varlen)": {"layout": "packed"},
    "parts of sequences (context parallelism)": {"layout": "packed", "runs": 2, "is_partial": True},
    "seqused": {"has_lengths": True},
    "left padding": {"has_lengths": True, "has_cache_rows": True, "needs_grad": False},
    "paged key-value cache": {
        "layout": "packed_queries",
        "page_size": 16,
        "has_lengths": True,
        "needs_grad": False,
    },
    "float8 key-value cache": {
        "has_float8_keys": True,
        "has_lengths": True,
        "has_descale": True,
        "needs_grad": False,
    },
    "key-value cache of packed rows": options(
        k_unpack=INT8.program, v_unpack=INT8.program, value_head_dim=64
    )
    | {"has_lengths": True, "needs_grad": False},
    "softcap": options(softcap=20.0),
    "ALiBi": {"has_alibi": True},
    "dropout": options(dropout_p=0.1),
    "dropout with softcap": options(dropout_p=0.1, softcap=20.0),
    "learned ALiBi slopes": options(alibi_needs_grad=True) | {"has_alibi": True},
    "relative bias with gradient": options(relative_bias_needs_grad=True)
    | {"relative_distance": 128},
    "bias with gradient": {"has_bias": True, "bias_needs_grad": True},
    "sink with gradient": {"has_sink": True},
    "block masks, FlexAttention's too": {"block_tile": (128, 128)},
    "lists of keys of each query": {"has_key_index": True},
    "masks as spans": {"spans": 2},
    "score functions": options(score_mod="return s"),
    "score functions with gradients of what they capture": options(
        score_mod="t: float32 = values(0, (4,), h)\nreturn t",
        score_mod_gradient="t: float32 = values(0, (4,), h)\nreturn g, {t: g}",
    ),
    "value head dim other than the key's": {"Dv": 128},
    "head dim 1": {"D": 1, "Dv": 1},
    "head dim 256": {"D": 256, "Dv": 256},
    "head dim 512": {"D": 512, "Dv": 512},
    "key head dim 576 with value head dim 512 (MLA; forward)": {
        "D": 576,
        "Dv": 512,
        "needs_grad": False,
    },
    "decoding over latents whose values are a view (MLA)": {
        "M": 1,
        "Hk": 1,
        "D": 576,
        "Dv": 512,
        "needs_grad": False,
        "has_values_in_keys": True,
    },
}


def reasons_of(name: str, changes: dict[str, object]) -> list[str]:
    """Why a backend cannot run a row's problem."""
    device_type, capability = HOMES[name]
    problem = BASE._replace(device_type=device_type, capability=capability, **changes)
    # What the machine that writes the table lacks is no limit of the backend.
    reasons = dispatch.BACKENDS[name].unsupported_reasons(problem)
    return [reason for reason in reasons if "not installed" not in reason]


def table() -> str:
    """The table as Markdown, and its footnotes."""
    lines = ["| | " + " | ".join(f"`{name}`" for name in dispatch.ORDER) + " |"]
    lines.append("|---" * (1 + len(dispatch.ORDER)) + "|")
    notes: list[str] = []
    for row, changes in ROWS.items():
        cells = []
        for name in dispatch.ORDER:
            numbers = []
            for reason in reasons_of(name, changes):
                if reason not in notes:
                    notes.append(reason)
                numbers.append(str(notes.index(reason) + 1))
            cells.append(f"no <sup>{', '.join(numbers)}</sup>" if numbers else "yes")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    footnotes = ". ".join(f"<sup>{i}</sup> {note}" for i, note in enumerate(notes, start=1))
    return "\n".join(lines) + f"\n\n<sub>{footnotes}.</sub>"


if __name__ == "__main__":
    sys.exit(update({PAGE: {"support table": table()}}))
