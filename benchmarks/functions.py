"""A case written as functions of one score, or as spans: FlexAttention, and flashtile in its way.

FlexAttention and flashtile get the same functions, written as FlexAttention's users write them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtile import api
from flashtile.api import explain
from flashtile.masks import BlockMask, Spans

from .prepared import Prepared, Skip, heads_first, leaves_of, output_alone, refuse
from .shapes import BLOCK_TILE, Case, Inputs, document_lengths

OTHER_CACHE_DTYPE = "wants a cache of the queries' dtype"
NO_CACHE_OF_ITS_OWN = {"cache_dtype": OTHER_CACHE_DTYPE, "appends": "appends to no cache"}

Function = Callable[..., Tensor]


def flex(case: Case, inputs: Inputs) -> Prepared:
    """PyTorch's FlexAttention, compiled for exactly this case."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = inputs.q.device
    if device.type == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))):
        raise Skip("needs a C++ compiler")
    refuse(
        case,
        sink="has no sink",
        dropout="has no dropout",
        page_size="not set up for pages",
        **NO_CACHE_OF_ITS_OWN,
    )
    is_packed = inputs.cu_seqlens is not None
    leaves = leaves_of(inputs, Tensor.detach if is_packed else heads_first)
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    if is_packed:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    M, N, block_mask = q.shape[2], k.shape[2], None
    mask = mask_function(case, inputs, N - M)
    if mask is not None:
        block_mask = create_block_mask(mask, None, None, M, N, device=device.type)
    options: dict[str, Any] = {
        "score_mod": score_function(case, inputs, leaves, N - M),
        "block_mask": block_mask,
        "enable_gqa": case.heads_q != case.heads_kv,
    }
    torch._dynamo.reset()  # each case compiles a new program; the limit on recompiles is low
    torch._functorch.config.donated_buffer = False  # the backward is run again and again
    compiled = torch.compile(flex_attention, dynamic=False)

    def forward() -> Tensor:
        # On a CPU it refuses tensors that require a gradient, even under no_grad.
        qkv = (q, k, v) if torch.is_grad_enabled() else (q.detach(), k.detach(), v.detach())
        out = compiled(*qkv, **options)
        return out[0].transpose(0, 1) if is_packed else out

    if is_packed:
        return Prepared(forward, leaves, inputs.dout)
    return Prepared(forward, leaves, heads_first(inputs.dout), heads_first=True)


def flashtile_function(case: Case, inputs: Inputs) -> Prepared:
    """flashtile with a function: of the scores, with the mask as options of the call; or of the
    mask, as a block mask that is made beforehand."""
    _dense_alone(case)
    leaves = leaves_of(inputs, Tensor.detach)
    shift = case.seqlen_k - case.seqlen_q
    score_mod = score_function(case, inputs, leaves, shift)
    if score_mod is not None:
        refuse(case, prefix=_NO_OPTION, documents=_NO_OPTION, block_sparse=_NO_OPTION)
        window = {"causal": case.causal, "window_size": case.window}
        return _flashtile(inputs, leaves, score_mod=score_mod, **window)
    refuse(case, block_sparse="the function would give the block mask of flashtile's line")
    mask = mask_function(case, inputs, shift)
    if mask is None:
        raise Skip("no function describes full attention")
    lengths, device = (inputs.q.shape[-3], inputs.k.shape[-3]), inputs.q.device
    block_mask = BlockMask.from_function(mask, lengths, device=device)
    return _flashtile(inputs, leaves, block_mask=block_mask)


def flashtile_spans(case: Case, inputs: Inputs) -> Prepared:
    """flashtile with the mask as spans."""
    _dense_alone(case)
    refuse(
        case,
        block_sparse="its rows have too many intervals",
        softcap=_NO_MASK,
        alibi=_NO_MASK,
        relative=_NO_MASK,
        bias=_NO_MASK,
    )
    leaves = leaves_of(inputs, Tensor.detach)
    return _flashtile(inputs, leaves, mask=spans(case, inputs.q.device))


_NO_OPTION = "its mask is no option of a call"
_NO_MASK = "changes scores, which spans cannot"


def _dense_alone(case: Case) -> None:
    refuse(
        case,
        cached="not set up for caches",
        chunk="not set up for chunks",
        sink="not set up for a sink",
        dropout="not set up for dropout",
    )


def _flashtile(inputs: Inputs, leaves: dict[str, Tensor], **options: Any) -> Prepared:
    """A dense call; packed sequences are one sequence for it."""
    is_packed = inputs.cu_seqlens is not None
    q, k, v = (leaves[name][None] if is_packed else leaves[name] for name in "qkv")

    def forward() -> Tensor:
        out = output_alone(api.attention(q, k, v, **options))
        return out[0] if is_packed else out

    return Prepared(forward, leaves, inputs.dout, backend=explain(q, k, v, **options).chosen)


def spans(case: Case, device: torch.device) -> Spans:
    """The mask of the case's tokens, all in one sequence if they are packed.

    Raises:
        Skip: it is none of the masks that are set up here.
    """
    N, left = case.seqlen_k, case.window[0]
    if case.documents:
        lengths = torch.tensor([document_lengths(case)], device=device)
        return Spans.documents_of_lengths(lengths, case.batch * N, case.causal)
    if not case.causal or case.seqlen_q != N:
        raise Skip("not set up as spans")
    if left < 0:
        return Spans.prefix_lm(torch.tensor([case.prefix], device=device), N)
    row = torch.arange(N, dtype=torch.int32, device=device)[None, None, :, None]
    return Spans(row - left, row + 1)


def mask_function(case: Case, inputs: Inputs, shift: int) -> Function | None:
    """The case's mask as a function of a score's indices; None where every key is visible.

    `shift`: how many keys more than queries there are.
    """
    tiles, prefix, document = inputs.tiles, case.prefix, None
    facts = case.visibility(inputs.q.shape[-3], inputs.k.shape[-3]).facts
    is_causal = case.causal and case.window == (-1, -1) and not case.chunk
    if inputs.cu_seqlens is not None:
        ends = inputs.cu_seqlens[1:].contiguous()
        tokens = torch.arange(inputs.q.shape[0], device=ends.device)
        document = torch.bucketize(tokens, ends, right=True)
    if not facts and tiles is None and document is None:
        return None

    def in_structure(i: Tensor, j: Tensor) -> list[Tensor]:
        if is_causal:
            shown = i + shift >= j if shift else i >= j
            return [shown | (j < prefix) if prefix else shown]
        ranges = [fact.key_range(i + shift if shift else i, inputs.k.shape[-3]) for fact in facts]
        return [limit for start, stop in ranges for limit in (j >= start, j < stop)]

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        parts = in_structure(i, j)
        if tiles is not None:
            parts.append(tiles[i // BLOCK_TILE, j // BLOCK_TILE])
        if document is not None:
            parts.append(document[i] == document[j])
        shown = parts[0]
        for part in parts[1:]:
            shown = shown & part
        return shown

    return mask_mod


def score_function(
    case: Case, inputs: Inputs, leaves: dict[str, Tensor], shift: int
) -> Function | None:
    """The case's change of one score, in the order of `flashtile.attention`; None if there is
    none. It captures the tensors that are leaves."""
    slopes, cap, reach = inputs.alibi_slopes, case.softcap, case.relative
    bias, table = leaves.get("bias"), leaves.get("relative_bias")
    clamps, is_causal = reach < max(case.seqlen_q, case.seqlen_k) - 1, case.causal
    if slopes is None and bias is None and table is None and not cap:
        return None

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        distance = j - i - shift if shift else j - i
        if slopes is not None:
            score = score + slopes[h] * (distance if is_causal else -distance.abs())
        if bias is not None:
            score = score + bias[0, h, i, j]
        if table is not None:
            distance = distance.clamp(-reach, reach) if clamps else distance
            score = score + table[h, distance + reach]
        return score

    return score_mod


FUNCTIONS = {
    "flashtile-function": flashtile_function,
    "flashtile-spans": flashtile_spans,
    "flex": flex,
}
