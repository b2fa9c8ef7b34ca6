"""Compare a call over ranks with the definition of attention, evaluated in one process.

The tools for it are those that test every backend: `flashtile.testing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..masks import Spans
from ..testing import attention_reference, attention_varlen_reference
from ..testing.error_model import floor_of, rounding_variance
from ..testing.tolerance import allowed_error, assert_close, plain_dtype
from .arguments import SCORE_MASKS, has_rows, score_bias
from .collectives import all_gather_objects
from .layout import Layout

Results = dict[str, Tensor]
# What changes how the kernels run, not what they compute.
WITHOUT_EFFECT = ("deterministic", "backend", "num_splits", "pack_gqa", "sm_margin")
WEIGHTS = ("sink", "alibi_slopes", "relative_bias")  # which every rank has as a whole
MOST_TEXT = 900  # characters of a report, or of a problem


class _Leaf(NamedTuple):
    """A tensor that has a gradient."""

    shard: Tensor
    layout: Layout | None  # of its tokens; None for one that all ranks have


def checked(layout: Layout, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> str:
    """A report of the largest errors of a call over all ranks.

    Raises:
        AssertionError: an output or a gradient is wrong. All ranks raise it.
        NotImplementedError: the call has dropout.
    """
    if options.get("dropout_p", 0.0):
        raise NotImplementedError("dropout_p: check compares calls without dropout")
    context, comm = layout.context, layout.comm
    keys = Layout(
        context, comm, layout.keys, layout.keys, layout.sequences, (layout.local_keys,) * 2
    )
    leaves = {"q": _Leaf(q, layout), "k": _Leaf(k, keys), "v": _Leaf(v, keys)}
    if options.get("qv") is not None:
        leaves["qv"] = _Leaf(options["qv"], layout)
    for name in WEIGHTS:
        x = options.get(name)
        if x is not None and (name == "sink" or x.requires_grad):
            leaves[name] = _Leaf(x, None)
    inputs = {n: leaf.shard.detach().clone().requires_grad_() for n, leaf in leaves.items()}
    with torch.enable_grad():
        out, lse = context.attention(**{**options, **inputs}, layout=layout, return_lse=True)
        g = torch.Generator().manual_seed(comm.rank)
        dout, dlse = (torch.randn(x.shape, generator=g).to(x) for x in (out, lse))
        gradients = torch.autograd.grad((out, lse), tuple(inputs.values()), (dout, dlse))
    last = lse.dim() - 1
    whole = {name: _whole(leaf) for name, leaf in leaves.items()}
    cotangents = layout.unshard(dout), layout.unshard(dlse, last)
    got = {"out": layout.unshard(out.detach()), "lse": layout.unshard(lse.detach(), last)}
    floors: Results = {}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        if leaf.layout is None:  # the ranks have parts of a sum, each rounded to the leaf's dtype
            parts = torch.stack(comm.all_gather(gradient)).double()
            floors[f"d{name}"] = parts.abs().sum(0) * torch.finfo(gradient.dtype).eps / 2
            gradient = parts.sum(0)
        got[f"d{name}"] = _whole(leaf._replace(shard=gradient))
    others = _whole_options(layout, q, {n: x for n, x in options.items() if n not in leaves})
    problem, report, reason = "", "", None
    if comm.rank == 0:
        try:
            report = _compared(leaves, whole, others, got, floors, cotangents)
        except Exception as error:  # whatever it is, the other ranks wait to be told
            problem, reason = str(error) or repr(error), error
    record = {"problem": problem[:MOST_TEXT], "report": report[:MOST_TEXT]}
    answer = all_gather_objects(comm, record)[0]
    if answer["problem"]:
        raise AssertionError(f"context parallel: {answer['problem']}") from reason
    return str(answer["report"])


def _whole(leaf: _Leaf) -> Tensor:
    """The tensor of all ranks."""
    shard = leaf.shard.detach()
    return shard if leaf.layout is None else leaf.layout.unshard(shard)


def _whole_options(layout: Layout, q: Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the call in one process, as the reference takes them."""
    left = (*SCORE_MASKS, *WITHOUT_EFFECT)
    whole_options = {name: x for name, x in options.items() if name not in left and x is not None}
    if isinstance(options.get("mask"), Spans):
        whole_options["mask"] = Spans(*(layout.unshard(x, 2) for x in options["mask"]))
    masks = {name: options[name] for name in SCORE_MASKS if options.get(name) is not None}
    if masks:
        bias = score_bias(options, q, layout)
        assert bias is not None
        whole_options["bias"] = layout.unshard(bias, 2) if has_rows(bias, layout) else bias
        if has_rows(bias, layout) and not layout.sequences:
            rows = whole_options["bias"][0].split(layout.queries.lengths, dim=1)
            missing = (layout.longest - x.shape[1] for x in rows)
            padded = [pad(x, (0, 0, 0, n)) for x, n in zip(rows, missing, strict=True)]
            whole_options["bias"] = torch.stack(padded)
    return whole_options


def _compared(
    leaves: dict[str, _Leaf],
    whole: Results,
    options: dict[str, Any],
    got: Results,
    floors: Results,
    cotangents: tuple[Tensor, Tensor],
) -> str:
    """A line for each tensor.

    Args:
        floors: errors that are always allowed, of some tensors.

    Raises:
        AssertionError: one is wrong.
    """
    dtype, layout = whole["q"].dtype, leaves["q"].layout
    assert layout is not None

    def reference(compute_dtype: torch.dtype, **how: Any) -> Results:
        results = _reference(layout, whole, options, cotangents, compute_dtype, **how)
        return {name: x.to(got[name].device) for name, x in results.items()}

    truth, plain = reference(torch.float64), reference(plain_dtype(dtype))
    variance = reference(torch.float64, attend=rounding_variance(dtype))
    ranks, width = layout.queries.ranks, max(map(len, got)) + 2
    lines = [f"{ranks} ranks give what one process gives, by float64:"]
    for name, x in got.items():
        allowed = allowed_error(dtype, truth[name], plain[name])
        floor = floor_of(variance[name]).clamp(min=allowed)  # the rule for the whole tensor
        leaf = leaves.get(name[1:]) if name.startswith("d") else leaves["q"]
        assert leaf is not None
        of_tokens = leaf.layout
        if of_tokens is None:
            floor = floor + floors[name]
            assert_close(name, x, truth[name], plain[name], floor=floor, dtype=dtype)
        else:
            dim = x.dim() - 1 if name == "lse" else x.dim() - 3
            for rank in range(ranks):
                rows = of_tokens.rows_of(rank).to(x.device)
                got_rows, want, simple, least = (
                    y.index_select(dim, rows) for y in (x, truth[name], plain[name], floor)
                )
                what = f"{name} of rank {rank}"
                assert_close(what, got_rows, want, simple, floor=least, dtype=dtype)
        error = (x.double() - truth[name]).nan_to_num(nan=0.0).abs()
        largest = error.max().item() if error.numel() else 0.0
        what = f"largest error {largest:.1e}, at least {allowed:.1e} is allowed"
        lines.append(f"{name:>{width}}: {what}")
    return "\n".join(lines)


def _reference(
    layout: Layout,
    whole: Results,
    options: dict[str, Any],
    cotangents: tuple[Tensor, Tensor],
    compute_dtype: torch.dtype,
    **how: Any,
) -> Results:
    """out, lse and gradients by the definition, on the device of the tensors."""
    leaves = {n: x.detach().to(compute_dtype).requires_grad_() for n, x in whole.items()}
    call: dict[str, Any] = {**leaves, **options, **how, "compute_dtype": compute_dtype}
    with torch.enable_grad():
        if layout.sequences:
            result = attention_reference(**call)
        else:
            sides = layout.queries.lengths, layout.keys.lengths
            for side, lengths in zip("qk", sides, strict=True):
                ends = list(accumulate(lengths, initial=0))
                call[f"cu_seqlens_{side}"] = torch.tensor(ends, device=whole["q"].device)
                call[f"max_seqlen_{side}"] = max(lengths, default=0)
            result = attention_varlen_reference(**call)
        results = {"out": result.out, "lse": result.lse}
        outputs = tuple(results.values())
        targets = tuple(c.to(x.dtype) for c, x in zip(cotangents, outputs, strict=True))
        gradients = torch.autograd.grad(outputs, tuple(leaves.values()), targets)
    return results | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
