"""The float64 reference of a call that is described as operands and options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashtile.dropout import keep_mask
from flashtile.masks import BlockMask, Spans, Window
from flashtile.problem import AttentionProblem, Operands, Options
from flashtile.score_mod import parsed
from flashtile.score_mod.evaluate import evaluate
from flashtile.testing import Reference, attention_varlen_reference


def reference(operands: Operands, options: Options, **how: Any) -> Reference:
    """`how`: `compute_dtype` and `attend` of `flashtile.testing.attention_reference`."""
    q, k, v = operands.q, *(_rows(x, operands) for x in (operands.k, operands.v))
    used = operands.seqused_k
    if operands.leftpad_k is not None:  # keys count from the first one after the pad
        assert used is not None
        k, v = (_shifted(x, operands.leftpad_k) for x in (k, v))
        used = used - operands.leftpad_k
    M, N, lead = options.max_seqlen_q, options.max_seqlen_k, q.shape[0]
    result = attention_varlen_reference(
        q, k, v, operands.cu_seqlens_q, operands.cu_seqlens_k, M, N,
        seqused_q=operands.seqused_q,
        seqused_k=used,
        softmax_scale=options.softmax_scale,
        window_size=Window(options.window_left, options.window_right),
        attention_chunk=options.attention_chunk,
        softcap=options.softcap,
        alibi_slopes=operands.alibi_slopes,
        bias=operands.bias,
        relative_bias=operands.relative_bias,
        sink=operands.sink,
        block_mask=_listed(operands, options) if operands.key_index is not None
        else _tiles(operands, M, N),
        mask=_spans(operands),
        dropout_p=options.dropout_p,
        keep=_keep(operands, options),
        score_mod=_score_mod(operands, options),
        q_descale=operands.q_descale,
        k_descale=operands.k_descale,
        v_descale=operands.v_descale,
        **how,
    )  # fmt: skip
    if operands.cu_seqlens_q is None:
        return result
    unused = lead - result.out.shape[0]  # tokens of no sequence
    empty = 0.0 if "attend" in how else -torch.inf
    return Reference(
        F.pad(result.out, (0, 0, 0, 0, 0, unused)),
        F.pad(result.lse, (0, unused), value=empty),
        result.probs,
    )


def _rows(x: Tensor, operands: Operands) -> Tensor:
    """Keys or values of each sequence, (B, N, Hk, D), from pages or rows of a cache."""
    if operands.page_table is not None:
        x = x[operands.page_table.long()].flatten(1, 2)
    return x if operands.cache_batch_idx is None else x[operands.cache_batch_idx.long()]


def _shifted(x: Tensor, leftpad: Tensor) -> Tensor:
    """`x` (B, N, Hk, D) without the first `leftpad` rows of each sequence; the end repeats."""
    at = (torch.arange(x.shape[1]) + leftpad.long()[:, None]).clamp(max=x.shape[1] - 1)
    return x[torch.arange(x.shape[0])[:, None], at]


def _tiles(operands: Operands, M: int, N: int) -> Tensor | None:
    if operands.tile_kinds is None:
        return None
    assert operands.partial_index is not None and operands.partial_tiles is not None
    tensors = operands.tile_kinds, operands.partial_index, operands.partial_tiles
    return BlockMask(*tensors, lengths=(M, N)).to_dense(M, N)


def _listed(operands: Operands, options: Options) -> Tensor:
    """The dense mask (B, Hq, M, N) of a list of keys for each query."""
    index, starts, M, N = operands.key_index, operands.cu_seqlens_q, *options[:2]
    assert index is not None
    keys = index.long()[..., None] * options.key_run + torch.arange(options.key_run)
    seen = keys.masked_fill(index[..., None] < 0, -1).flatten(3)[..., None] == torch.arange(N)
    seen = seen.any(-2)  # (B or 1, rows, Hk or 1, N)
    if starts is not None:
        rows = (starts[:-1, None] + torch.arange(M)).clamp(max=seen.shape[1] - 1)
        seen = seen[0, rows]
    heads = operands.q.shape[-2]
    return seen.transpose(1, 2).repeat_interleave(heads // seen.shape[2], 1)


def _spans(operands: Operands) -> Spans | None:
    starts, stops = operands.span_starts, operands.span_stops
    return None if starts is None or stops is None else Spans(starts, stops)


def _score_mod(operands: Operands, options: Options) -> Callable[..., Tensor] | None:
    """The score function as a function of all scores."""
    if not options.score_mod:
        return None
    program = parsed(options.score_mod)

    def function(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        inputs = {"s": score, "b": b, "h": h[None], "i": i[None, None], "j": j.view(1, 1, 1, -1)}
        found = evaluate(program, inputs, operands.captured, operands.captured_integers)
        return found[program.result]

    return function


def _keep(operands: Operands, options: Options) -> Tensor | None:
    if operands.rng_state is None:
        return None
    problem = AttentionProblem.of(operands, options)
    sizes = problem.B, problem.Hq, problem.M, problem.N
    return keep_mask(operands.rng_state, options.dropout_p, *map(torch.arange, sizes))
