"""Convert a caller's arguments to the problem and the operands that a backend gets.

Every call goes through `prepare`: dense, packed, cached and float8 calls, and calls that are only
explained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .. import current_layout
from ..autocast import cast_input, is_any_autocast_on, is_autocasting
from ..backend_interface import PreparedForward
from ..dropout import draw_rng_state
from ..invariance_check import checks_everything
from ..masks import BlockMask, Window
from ..problem import (
    FLOAT8,
    AttentionProblem,
    Operands,
    Options,
    lse_dtype,
    tile_operands,
)
from ..score_mod import derivative, described, windowed
from . import checks, dispatch, memo
from .converted_masks import with_key_lists, with_masks
from .dispatch import Checked, decide
from .fold_qv import with_folded_qv, with_placeholders
from .layouts import Cached, Dense, Layout, Packed
from .memo import QKV, Keywords
from .options import LISTS, NUMBERS, TENSORS


class Prepared(NamedTuple):
    """A call that has passed all checks."""

    problem: AttentionProblem  # `options.backend` names the backend
    operands: Operands  # a cached call's new tokens and `qv` are not applied yet
    layout: Layout  # as given, but in the dtypes that autocast requires
    keywords: Keywords  # likewise
    forward: PreparedForward | None = None  # if an equal call has been made before


# Options that `read` converts, besides windows.
_READ = LISTS | {"cache_format", "attn_mask", "key_padding_mask", "score_mod"}
CAPTURED = ("captured", "captured_integers")  # operands that the caller does not name
new_tuple = tuple.__new__  # of a named tuple, in half the time of its own function


# What gets a call instead of `decide`: `explain` sets it, and it does not return.
instead_of_decide: ContextVar[Callable[[Checked], NoReturn] | None]
instead_of_decide = ContextVar("instead_of_decide", default=None)


def prepare(
    qkv: QKV,
    layout: Layout,
    keywords: Keywords,
    backend: str | None = None,
    out: Tensor | None = None,
    wants_probabilities: bool = False,
    has_statistics: bool = False,
    is_read: bool = False,
) -> Prepared:
    """Check and describe a call and choose its backend, or reuse the decision of an equal call.

    Args:
        qkv: queries, keys and values, or queries and the two caches.
        out: the tensor to write the result to, None for a new tensor.
        is_read: whether the arguments are results of `read`.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: no backend can run the call; the message lists each with its reasons.
        RuntimeError: a layout of context parallelism is in force.
    """
    if current_layout.blocks:
        current_layout.refuse_local_attention()
    if not is_read:
        qkv, layout, keywords = read(qkv, layout, keywords)
    compiling = torch.compiler.is_compiling()
    stop = None if compiling else instead_of_decide.get()
    key = None
    if not compiling and stop is None:
        further = backend, wants_probabilities, has_statistics, None
        arguments = memo.arguments_of(qkv, layout, keywords, further)
        # The strides of caches determine whether they already are packed sequences.
        is_cached = isinstance(layout, Cached)
        key = memo.key_of((type(layout), *keywords), arguments, with_strides=is_cached)
        decision = None if key is None else memo.decisions.get(key)
        if decision is not None:
            return _decided(decision, arguments, qkv, layout, keywords, out)
    operands, options = describe(qkv, layout, keywords)
    checks.memory_and_values(layout, operands, options, out, keywords.get("seqused_k"))
    if backend is not None:
        dispatch.check_name(backend)
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(
        wants_probabilities=wants_probabilities,
        has_statistics=has_statistics,
        # The memo does not know whether k and v are neighbours, so that `fold_qv` copies nothing.
        has_values_in_keys=problem.has_values_in_keys and keywords.get("qv") is None,
    )
    call = Checked(problem, operands, layout, keywords, backend)
    if stop is not None:
        stop(call)
    problem = decide(call)
    if key is not None:  # a tracer, for which there is none, cannot follow `decision_of`
        decision = memo.decision_of(problem, operands, layout, keywords, arguments)
        memo.decisions[key] = decision
    if isinstance(layout, Cached):  # replace the placeholders of `with_placeholders`
        operands = operands._replace(q=qkv[0], k=qkv[1])
    return Prepared(problem, operands, layout, keywords)


def _decided(
    decision: memo.Decision,
    arguments: tuple[Any, ...],
    qkv: QKV,
    layout: Layout,
    keywords: Keywords,
    out: Tensor | None,
) -> Prepared:
    """A call like an earlier one."""
    problem, has_optional_tensors, pick, forward = decision
    if isinstance(layout, Cached):
        checks.length_on_host(qkv[1], layout)
    if pick is not None:
        operands = new_tuple(Operands, pick(arguments))
    else:
        operands = _operands(qkv, layout, keywords)
        qv = keywords.get("qv")
        if qv is not None and not isinstance(layout, Cached):
            operands = with_folded_qv(operands, qv)
    has_values_to_check = has_optional_tensors and (
        operands.workspace is not None or problem.device_type != "cuda" or checks_everything()
    )
    if has_values_to_check or out is not None:
        checks.memory_and_values(layout, operands, problem.options, out, keywords.get("seqused_k"))
    return new_tuple(Prepared, (problem, operands, layout, keywords, forward))


def describe(qkv: QKV, layout: Layout, keywords: Keywords) -> tuple[Operands, Options]:
    """Check a call, except for memory and values, and describe it.

    Returns:
        Its tensors (placeholders for a cached call with `qv`), and its numbers without a backend.
    """
    q, k, v = qkv
    qv = keywords.get("qv")
    if isinstance(layout, Dense):
        checks.dense(q, k, v)
    elif isinstance(layout, Packed):
        checks.packed(q, k, v, layout.cu_seqlens_q, layout.cu_seqlens_k, layout.page_table)
        batch = layout.cu_seqlens_q.shape[0] - 1
        checks.per_sequence("seqused_k", keywords.get("seqused_k"), q, batch)
        checks.per_sequence("leftpad_k", layout.leftpad_k, q, batch)
        for name in ("max_seqlen_q", "max_seqlen_k"):
            layout = layout._replace(**{name: checks.length(name, getattr(layout, name))})
    else:
        checks.cached(q, k, v, layout)
    if qv is not None:
        checks.folded_qv(qv, q, v)
    metadata = keywords.get("scheduler_metadata")
    checks.performance_hints(keywords.get("pack_gqa"), keywords.get("sm_margin", 0), metadata, q)
    if keywords.get("mask") is not None:
        checks.spans(keywords["mask"], q)
    if keywords.get("block_mask") is not None:
        keywords = {**keywords, "block_mask": _block_mask(keywords["block_mask"], layout, q, k)}
    operands = _operands(qkv, layout, keywords)
    B, M, N = layout.sizes(q, k)
    if qv is not None:
        fold = with_placeholders if isinstance(layout, Cached) else with_folded_qv
        operands = fold(operands, qv)
    options = _options(keywords, operands.q.shape[-1], M, N)
    checks.optional_tensors(operands, B, M, N)
    has_tables = operands.alibi_slopes is not None or operands.relative_bias is not None
    if torch.is_grad_enabled() and (has_tables or options.score_mod):
        options = _with_gradients(options, operands)
    return operands, options


def _block_mask(mask: Any, layout: Layout, q: Tensor, k: Tensor) -> BlockMask:
    """Our own or FlexAttention's block mask as ours, after a check that it is large enough."""
    _, M, N = layout.sizes(q, k)
    if not isinstance(mask, BlockMask):
        checks.flex_mask(mask)
        if isinstance(layout, Dense):
            checks.flex_mask_lengths(mask, M, N)
        mask = BlockMask.from_flex(mask)
    checks.block_mask_lengths(mask, M, N)
    return mask


def with_dropout_seed(
    problem: AttentionProblem, operands: Operands, generator: torch.Generator | None
) -> Operands:
    """The operands of a call with dropout, with the numbers that it draws.

    Raises:
        IndexError: as `check_indices`, before anything is drawn.
    """
    if problem.options.score_mod:
        check_indices(problem, operands)
    return operands._replace(rng_state=draw_rng_state(operands.q.device, generator))


def check_indices(problem: AttentionProblem, operands: Operands) -> None:
    """Raise IndexError if the score function of a call reads outside of a captured tensor and the
    backend refuses that. Every call refuses it; one that appends or draws numbers has to do so
    before.
    """
    if not checks.checking_values(operands):
        return
    checker = dispatch.index_checker(problem.options.backend)
    if checker is not None:
        checker.check_indices(problem, operands)


def read(qkv: QKV, layout: Layout, keywords: Keywords) -> tuple[QKV, Layout, Keywords]:
    """Cast the arguments as autocast requires, make numbers plain so that a memo can use them in a
    key, combine the mask tensors and trace the score function.
    """
    if is_any_autocast_on() and is_autocasting(qkv[0]):
        qkv, layout, keywords = _cast(qkv, layout, keywords)
    sides = keywords.get("window_size")
    if sides is not None and type(sides) is not tuple:
        keywords = {**keywords, "window_size": checks.window(sides)}
    if (
        isinstance(layout, Cached)
        and layout.cu_seqlens_q is not None
        and type(layout.max_seqlen_q) is not int
    ):
        longest = ("max_seqlen_q", layout.max_seqlen_q, "cu_seqlens_q", layout.cu_seqlens_q)
        layout = layout._replace(max_seqlen_q=checks.longest(*longest, qkv[0]))
    if _READ.isdisjoint(keywords):
        return qkv, layout, keywords
    if isinstance(layout, Cached) and "cache_format" in keywords:
        layout, keywords = _with_formats(qkv[0], layout, keywords)
    if not LISTS.isdisjoint(keywords):
        describe(qkv, layout, {})  # a check of what the lists are for
        keywords = with_key_lists(*qkv[:2], layout, keywords)
    if "attn_mask" in keywords or "key_padding_mask" in keywords:
        keywords = with_masks(*qkv[:2], keywords)
    if "score_mod" in keywords:
        keywords = with_score_mod(*qkv[:2], keywords)
        if keywords.get("score_mod") and not isinstance(layout, Cached):
            keywords = _under_window(*qkv[:2], layout, keywords)
    return qkv, layout, keywords


def _cast(qkv: QKV, layout: Layout, keywords: Keywords) -> tuple[QKV, Layout, Keywords]:
    """Cast as autocast casts the inputs of PyTorch's own operations. A cache never changes: queries
    and new tokens get its dtype or, if the cache is float8, the dtype of autocast.
    """
    q, k, v = qkv
    dtype = torch.get_autocast_dtype(q.device.type)
    if isinstance(layout, Cached):
        if isinstance(k, Tensor) and k.dtype not in (*FLOAT8, torch.uint8):
            dtype = k.dtype
        new = (cast_input(x, dtype) for x in (layout.k_new, layout.v_new))
        layout = layout._replace(**dict(zip(("k_new", "v_new"), new, strict=True)))
    else:
        k, v = cast_input(k, dtype), cast_input(v, dtype)
    if keywords.get("qv") is not None:
        keywords = {**keywords, "qv": cast_input(keywords["qv"], dtype)}
    return (cast_input(q, dtype), k, v), layout, keywords


def _with_formats(q: Any, layout: Cached, keywords: Keywords) -> tuple[Cached, Keywords]:
    """A cached call with its formats in the layout; its `cache_format` is what decides the call:
    programs, bytes of rows and head dims.
    """
    if keywords["cache_format"] is None:
        return layout, keywords
    k, v = formats = checks.cache_format(keywords["cache_format"])
    head_dim = q.shape[-1] if isinstance(q, Tensor) and q.dim() else 0
    sizes = (k.bytes_per_row, v.bytes_per_row, k.head_dim or head_dim, v.head_dim or head_dim)
    plain = (k.program, v.program, *sizes)
    return layout._replace(formats=formats), {**keywords, "cache_format": plain}


def outside_of_graphs(function: Callable[..., Any]) -> Any:
    """`function` without the tracer of torch.compile, whose graph ends before the call; with
    ``fullgraph=True`` this raises an error.
    """
    torch._dynamo.graph_break(msg="flashtile: a call with cache_format runs outside of the graph")
    return torch.compiler.disable(function)


def with_score_mod(q: Any, k: Any, keywords: Keywords) -> Keywords:
    """The options of a call, with the program of its score function and the operands in `CAPTURED`.

    Raises:
        TypeError, ValueError: it is no function, or its result is not one score.
        NotImplementedError: it cannot be traced; the message names the operation.
    """
    options = dict(keywords)
    function = options.pop("score_mod")
    if function is None:
        return options
    if not callable(function):
        raise TypeError(
            f"score_mod: got {type(function).__name__}, want a function (score, b, h, i, j) -> "
            "score"
        )
    if not isinstance(q, Tensor) or not isinstance(k, Tensor):  # which are refused later
        return options
    if q.numel() == 0 or k.numel() == 0:  # there are no scores
        return options
    program, *tensors = described(function, lse_dtype(q.dtype), q.device)
    return {**options, "score_mod": program, **dict(zip(CAPTURED, tensors, strict=True))}


def _under_window(q: Tensor, k: Tensor, layout: Dense | Packed, keywords: Keywords) -> Keywords:
    """The options of a call, with a window in place of what its score function hides, if the
    function hides keys as a window does and every sequence has the same number of keys more than
    queries.
    """
    program, first, last = windowed(keywords["score_mod"])
    others = ("seqused_q", "seqused_k", "mask", "block_mask")
    if program == keywords["score_mod"] or any(keywords.get(x) is not None for x in others):
        return keywords
    if isinstance(layout, Dense):
        more = k.shape[1] - q.shape[1] if q.dim() == k.dim() == 4 else None
    else:
        is_same = layout.cu_seqlens_q is layout.cu_seqlens_k and layout.page_table is None
        more = 0 if is_same and layout.leftpad_k is None else None
    given = checks.window(keywords.get("window_size"))
    if type(more) is not int or any(side is not None and side < 0 for side in given):
        return keywords
    sides = (
        (int(own) if side is None else min(int(own), side)) if own < math.inf else side
        for own, side in zip((more - first, last - more), given, strict=True)
    )
    window = Window(*sides)
    if any(side is not None and side < 0 for side in window):
        return keywords
    keywords = {**keywords, "score_mod": program, "window_size": window}
    return keywords if program else {**keywords, **dict.fromkeys(CAPTURED)}


def _operands(qkv: QKV, layout: Layout, keywords: Keywords) -> Operands:
    """The tensors of a call, without `qv`; a block mask is one of ours."""
    operands = layout.operands(*qkv)
    tensors = {name: x for name, x in keywords.items() if x is not None and name in TENSORS}
    mask = keywords.get("block_mask")
    if mask is not None:
        tensors |= tile_operands(mask)
    spans = keywords.get("mask")
    if spans is not None:
        tensors |= {"span_starts": spans.starts, "span_stops": spans.stops}
    tensors |= {name: keywords[name] for name in CAPTURED if keywords.get(name) is not None}
    if not tensors:
        return operands
    bias = tensors.get("bias")
    if isinstance(bias, Tensor) and bias.dim() < 4:  # add dimensions, as broadcasting would
        tensors["bias"] = bias[(None,) * (4 - bias.dim())]
    if "seqused_k" in tensors and operands.seqused_k is not None:  # packed sequences in pages
        tensors["seqused_k"] = torch.minimum(tensors["seqused_k"], operands.seqused_k)
    return operands._replace(**tensors)


def _options(keywords: Keywords, head_dim: int, M: int, N: int) -> Options:
    """The numbers of a call, checked and normalised.

    The defaults that are floats stand here as literals: `torch.compile(dynamic=True)` makes floats
    that it finds in a table inputs of the graph, and then traces and compiles the call twice.
    """
    numbers: dict[str, Any] = {"softmax_scale": None, "softcap": 0.0, "dropout_p": 0.0}
    numbers["key_run"] = keywords.get("key_run", 1)
    for name, option in NUMBERS.items():
        if name in keywords and not (keywords[name] is None and option.takes_none):
            numbers[name] = option.check(name, keywords[name])
    if keywords.get("cache_format") is not None:
        k_unpack, v_unpack, *_, value_head_dim = keywords["cache_format"]
        numbers |= {"k_unpack": k_unpack, "v_unpack": v_unpack, "value_head_dim": value_head_dim}
    if torch.are_deterministic_algorithms_enabled():
        numbers["deterministic"] = True
    causal = checks.flag("causal", keywords.get("causal", False))
    left, right = checks.window(keywords.get("window_size")).under(causal)
    if numbers["softmax_scale"] is None:
        numbers["softmax_scale"] = head_dim**-0.5  # of the true, unpadded head dim
    numbers["score_mod"] = keywords.get("score_mod") or ""
    return Options(M, N, window_left=left, window_right=right, **numbers)


def _with_gradients(options: Options, operands: Operands) -> Options:
    """The options of a call with the gradients that it records of its scores: those of tables by
    distance, and the derivative of the score function.
    """
    transforms = torch._C._are_functorch_transforms_active()

    def records(x: Tensor | None) -> bool:
        return x is not None and (transforms or x.requires_grad)

    options = options._replace(
        alibi_needs_grad=records(operands.alibi_slopes),
        relative_bias_needs_grad=records(operands.relative_bias),
    )
    if not (options.score_mod and any(map(records, operands))):
        return options
    dtype = lse_dtype(operands.q.dtype)
    program = derivative(options.score_mod, dtype, records(operands.captured))
    return options._replace(score_mod_gradient=program)
