"""Under ``FLASHTILE_CHECK=1``: does a call that is `batch_invariant` keep its promise?"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from .problem import AttentionProblem, Operands

Forward = Callable[[AttentionProblem, Operands], tuple[Tensor, ...]]
# Operands with a row for each sequence, if they have more than one.
BY_SEQUENCE = ("seqused_k", "leftpad_k", "page_table", "cache_batch_idx", "k_descale", "v_descale")


def checks_everything() -> bool:
    """Whether ``FLASHTILE_CHECK=1`` asks for the checks that make the host wait."""
    return os.environ.get("FLASHTILE_CHECK", "") not in ("", "0")


def check_bits(
    forward: Forward, problem: AttentionProblem, operands: Operands, out: Tensor, lse: Tensor
) -> None:
    """Compute the last query of the last sequence by itself, from a batch of one, and compare.

    Raises:
        RuntimeError: the bits of its output or of its log-sum-exp differ.
    """
    o, options, b = operands, problem.options, problem.B - 1
    # A mask that is data and a score function count queries from the first one of the call.
    counts_rows = problem.block_tile or problem.spans or problem.has_bias or options.score_mod
    rows = slice(0, problem.M)
    if o.cu_seqlens_q is not None and b >= 0:
        rows = slice(*o.cu_seqlens_q[b:].tolist())
    if o.seqused_q is not None and b >= 0:
        rows = slice(rows.start, min(rows.stop, rows.start + int(o.seqused_q[b])))
    if counts_rows or o.q.is_meta or b < 0 or rows.start >= rows.stop:
        return
    row, at = rows.stop - 1, () if o.cu_seqlens_q is not None else (b,)
    named = ((name, getattr(o, name)) for name in BY_SEQUENCE)
    own = {name: x[b : b + 1] for name, x in named if x is not None and len(x) > 1}
    if o.alibi_slopes is not None and o.alibi_slopes.dim() == 2:
        own["alibi_slopes"] = o.alibi_slopes[b : b + 1]
    if o.cu_seqlens_k is not None:
        keys = slice(*o.cu_seqlens_k[b:].tolist())
        own |= {"k": o.k[None, keys], "v": o.v[None, keys]}
    elif o.page_table is None and o.cache_batch_idx is None:
        own |= {"k": o.k[b : b + 1], "v": o.v[b : b + 1]}
    nothing = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "workspace"))
    # Only optional fields are None.
    alone = o._replace(q=o.q[(*at, row)][None, None], **own, **nothing)  # type: ignore[arg-type]
    longest = alone.k.shape[1] if o.cu_seqlens_k is not None else options.max_seqlen_k
    options = options._replace(max_seqlen_q=1, max_seqlen_k=longest)
    with torch.no_grad():
        one, one_lse, *_ = forward(AttentionProblem.of(alone, options), alone)
    pairs = {
        "output": (one[0, 0], out[(*at, row)]),
        "log-sum-exp": (one_lse[0, :, 0], lse[at][:, row]),
    }
    for name, (x, y) in pairs.items():
        if not torch.equal(x.nan_to_num(), y.nan_to_num()):
            raise RuntimeError(
                f"batch_invariant: the {name} of query {row - rows.start} of sequence {b} has "
                f"other bits when computed alone, off by up to {(x - y).abs().max().item():.2g}"
            )
