"""A memo of the decisions for earlier calls.

The checks, the description of the problem and the choice of a backend depend on shapes, dtypes,
devices and numbers, never on the values of tensors. If a call agrees with an earlier one in all of
these, it reuses that decision, because short calls on a GPU take less time than the checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backend_interface import PreparedForward
from ..gpu.rows import ALIGNMENT
from ..lru import Memo, memoised
from ..masks import BlockMask, Spans, Window
from ..problem import AttentionProblem, Operands, allows_tf32, tile_operands
from . import dispatch
from .layouts import Cached, Layout

QKV = tuple[Tensor, Tensor, Tensor]
Keywords = Mapping[str, Any]  # options that the caller passed, by the names in `options`
Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]  # the operands, of the arguments and None


class Decision(NamedTuple):
    """A call that has passed all checks."""

    problem: AttentionProblem  # with the backend
    has_optional_tensors: bool  # tensors besides q, k and v
    pick: Pick | None  # of a call whose operands are arguments themselves
    forward: PreparedForward | None  # of such a call, if it consists of launches


_MASKS = frozenset(("block_mask", "mask"))
_OPERANDS = {"cache_seqlens": "seqused_k", "cache_leftpad": "leftpad_k"}  # by the names in `Cached`
_PLAIN = frozenset((bool, int, float, str, type(None)))
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_TUPLES = frozenset((tuple, Window))
_is_grad_enabled = torch.is_grad_enabled
_is_deterministic = torch._C._get_deterministic_algorithms
_is_transformed = torch._C._are_functorch_transforms_active
decisions: Memo[Any, Decision] = Memo(4096)  # by the keys of calls


def arguments_of(qkv: QKV, layout: Layout, keywords: Keywords, further: Any) -> tuple[Any, ...]:
    """The arguments of the call that decide it, with `further` ones, of which the last is None."""
    if isinstance(layout, Cached):
        # It grows with each new token, and is checked separately.
        if type(layout.cache_seqlens) is int:
            further = "a number of tokens", *further
            layout = layout._replace(cache_seqlens=None)
        if layout.formats is not None:  # which `keywords` describe
            layout = layout._replace(formats=None)
    if _MASKS.isdisjoint(keywords):
        return (*qkv, *layout, *keywords.values(), *further)
    values, mask = dict(keywords), keywords.get("block_mask")
    if isinstance(mask, BlockMask):  # not the object: its tensors decide as all others do
        values["block_mask"] = None
        further = *tile_operands(mask).values(), mask.lengths, *further
    if isinstance(keywords.get("mask"), Spans):
        values["mask"] = None
        further = *keywords["mask"], *further
    return (*qkv, *layout, *values.values(), *further)


def key_of(names: tuple[Any, ...], arguments: tuple[Any, ...], with_strides: bool = False) -> Any:
    """A key of all that decides a call, and on a GPU also its launches: what its `arguments` are
    like, and the global state.

    Args:
        names: those of the arguments, which differ from call to call.
        with_strides: whether strides decide the call even where it has no launches.

    Returns:
        None if there is no such key: for arguments of other types (a subclass of Tensor, or one
        that a check will refuse). Under a tracer, whose sizes are symbols, there is none either;
        callers do not ask there.
    """
    types = tuple(map(type, arguments))  # True is no number here, though it equals 1
    indices = _indices_by_type(types)
    if indices is None:
        return None
    q, records = arguments[0], _is_grad_enabled()
    with_launches, gpu, last = _has_launches(q), q.get_device(), 0
    facts: list[Any] = [
        gpu,
        records,
        _is_deterministic(),
        _is_transformed(),
        dispatch.forced(),
        dispatch.is_batch_invariant(),
        names,
        types,
        indices.plain_values(arguments),
    ]
    if with_launches and q.dtype is torch.float32:
        facts.append(allows_tf32())
    try:
        for index in indices.tensors:
            x = arguments[index]
            # Under a transform `requires_grad` does not say whether gradients are recorded.
            facts += (x.shape, x.dtype, records and x.requires_grad)
            if not with_launches:
                facts += (x.device, x.layout, with_strides and x.stride())
                continue
            # Its memory holds the numbers with the opposite sign, or is elsewhere.
            if x.is_neg() or x.get_device() != gpu:
                return None
            address = x.data_ptr()
            facts += (
                # Its shape gives the strides of a contiguous tensor, except for dimensions of size
                # 1, along which nothing steps. Asking takes less time than making the strides.
                x.is_contiguous() or x.stride(),
                address % ALIGNMENT,
                address == last,  # of k and v: `problem.has_values_in_keys`
            )
            last = address
    except RuntimeError:  # a tensor of another layout has no shape, strides or address
        return None
    for index in indices.tuples:
        item_types = tuple(map(type, arguments[index]))
        if not _PLAIN.issuperset(item_types):
            return None
        facts += (item_types, arguments[index])
    return tuple(facts)


def _has_launches(x: Tensor) -> bool:
    """Whether a call with this tensor consists of launches on a GPU. A tensor under a transform of
    torch.func has no address, and its call is no launch.
    """
    return x.is_cuda and not _is_transformed()


class ArgumentIndices(NamedTuple):
    """The indices of the arguments that their types do not determine, as None does."""

    plain_values: Pick  # the arguments whose value is part of the key
    tensors: tuple[int, ...]
    tuples: tuple[int, ...]


@memoised(1024)
def _indices_by_type(types: tuple[type, ...]) -> ArgumentIndices | None:
    """None if one argument has another type, or the first one is no tensor."""

    if types[0] not in _TENSORS or not (_PLAIN | _TENSORS | _TUPLES).issuperset(types):
        return None
    plain, tensors, tuples = (
        tuple(index for index, kind in enumerate(types) if kind in wanted)
        for wanted in (_PLAIN - {type(None)}, _TENSORS, _TUPLES)
    )
    pick = itemgetter(*plain) if plain else lambda arguments: ()
    return ArgumentIndices(pick, tensors, tuples)


def decision_of(
    problem: AttentionProblem,
    operands: Operands,
    layout: Layout,
    keywords: Keywords,
    arguments: tuple[Any, ...],
) -> Decision:
    """The decision for a checked call, whose `arguments` are those of `arguments_of`."""
    has_optional_tensors = any(x is not None for x in (*operands[3:], keywords.get("qv")))
    pick = _pick(operands, layout, keywords, arguments)
    prepares = problem.device_type == "cuda" and pick is not None
    if isinstance(layout, Cached):
        # Nothing is appended before the forward, and the keys stay where they are.
        appends_in_it = layout.k_new is None or problem.appending is not None
        prepares = prepares and appends_in_it and problem.layout != "packed"
    forward = None
    if prepares:
        forward = PreparedForward(problem, dispatch.BACKENDS[problem.options.backend])
    return Decision(problem, has_optional_tensors, pick, forward)


def _pick(
    operands: Operands, layout: Layout, keywords: Keywords, arguments: tuple[Any, ...]
) -> Pick | None:
    """How to find the operands of calls like this one among their arguments, so that the key has
    all that decides their launches; None if an operand is none of the arguments.
    """
    names = ("q", "k", "v", *(_OPERANDS.get(name, name) for name in layout._fields), *keywords)
    by_name = dict(zip(names, enumerate(arguments), strict=False))
    by_identity = {id(x): index for index, x in enumerate(arguments)}
    times = Counter(map(id, arguments))
    indices = []
    for name, x in operands._asdict().items():
        index, same = by_name.get(name, (-1, None))
        if x is not None and same is not x:  # an argument that is given twice has to have its name
            if times[id(x)] != 1:
                return None
            index = by_identity[id(x)]
        indices.append(-1 if x is None else index)
    return itemgetter(*indices)
