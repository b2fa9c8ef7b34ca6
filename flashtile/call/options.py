"""The options of a call, in one table: the type, the default and the check of each.

A line of a class below is an option. Its `Option` determines where its value goes: a number is
checked and becomes a field of `problem.Options` with the same name, a tensor becomes a field of
`Operands`. The public functions accept the classes as keywords (`**options: Unpack[...]`), so an
option is defined once for all of them.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import Parameter
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypedDict, TypeVar, get_type_hints

from torch import Tensor

from ..cache_formats import CacheFormat
from ..masks import Spans
from ..score_mod import ScoreFunction
from . import checks
from .dispatch import BackendName


class HasToList(Protocol):
    """A tensor or a NumPy array."""

    def tolist(self) -> Any:
        """Its values as Python numbers."""
        ...


WindowSize = Sequence[int | None] | HasToList | None


class Option(NamedTuple):
    """The kind of an option, its default, and the check that returns its normalised value."""

    kind: Literal["number", "tensor", "mask", "query", "function", "format", "hint"]
    default: Any = None
    check: Callable[[str, Any], Any] = lambda name, x: x
    takes_none: bool = False  # None means the default


def number(
    default: Any, check: Callable[..., Any], takes_none: bool = False, **limits: Any
) -> Option:
    """An option that becomes a field of `problem.Options`, by ``check(name, value, **limits)``."""
    return Option("number", default, partial(check, **limits) if limits else check, takes_none)


TENSOR = Option("tensor")  # becomes a field of `Operands`
MASK = Option("mask")  # becomes a window, a bias, tiles or spans
HINT = Option("hint")  # changes no result


class FlashOptions(TypedDict, total=False):
    """Options that every function of FlashAttention-2 has."""

    softmax_scale: Annotated[
        float | None, number(None, checks.number, True, wanted="a finite number, or None")
    ]
    causal: Annotated[bool, Option("mask", False)]
    window_size: Annotated[WindowSize, Option("mask", (-1, -1))]
    softcap: Annotated[
        float, number(0.0, checks.number, True, wanted="a number >= 0 (0: off)", least=0.0)
    ]
    alibi_slopes: Annotated[Tensor | None, TENSOR]


class ScoreOptions(TypedDict, total=False):
    """Options beyond FlashAttention-2 that every function has."""

    attention_chunk: Annotated[int, number(0, checks.length, True)]
    bias: Annotated[Tensor | None, TENSOR]
    relative_bias: Annotated[Tensor | None, TENSOR]
    sink: Annotated[Tensor | None, TENSOR]
    block_mask: Annotated[Any, MASK]
    mask: Annotated[Spans | None, MASK]
    score_mod: Annotated[ScoreFunction | None, Option("function")]
    pack_gqa: Annotated[bool | None, HINT]
    sm_margin: Annotated[int, Option("hint", 0)]


class NewerOptions(ScoreOptions, total=False):
    """Options beyond FlashAttention-2 of every function except the one that quantises."""

    qv: Annotated[Tensor | None, Option("query")]
    q_descale: Annotated[Tensor | None, TENSOR]
    k_descale: Annotated[Tensor | None, TENSOR]
    v_descale: Annotated[Tensor | None, TENSOR]
    batch_invariant: Annotated[bool | None, number(None, checks.flag, True)]


class SplitOptions(TypedDict, total=False):
    """An option that FlashAttention-2 has only for caches."""

    num_splits: Annotated[int, number(0, checks.splits)]


class LengthOptions(TypedDict, total=False):
    """Numbers of valid tokens."""

    seqused_q: Annotated[Tensor | None, TENSOR]
    seqused_k: Annotated[Tensor | None, TENSOR]


class NewerTrainingOptions(NewerOptions, SplitOptions, LengthOptions, total=False):
    """Options beyond FlashAttention-2 of every function except the one for caches."""


class DropoutOptions(TypedDict, total=False):
    """Options that only training has."""

    dropout_p: Annotated[
        float, number(0.0, checks.number, wanted="a probability in [0, 1)", least=0.0, below=1.0)
    ]
    deterministic: Annotated[bool, number(False, checks.flag)]


class TrainingOptions(FlashOptions, NewerTrainingOptions, DropoutOptions, total=False):
    """Options of every function except the one for caches."""


class ServingOptions(TypedDict, total=False):
    """Options of calls whose keys may be in pages."""

    scheduler_metadata: Annotated[Tensor | None, HINT]
    workspace: Annotated[Tensor | None, TENSOR]


class PaddedMaskOptions(TypedDict, total=False):
    """Masks of padded batches."""

    attn_mask: Annotated[Tensor | None, MASK]
    key_padding_mask: Annotated[Tensor | None, MASK]


class ListedOptions(TypedDict, total=False):
    """Lists of the keys that each query sees."""

    key_blocks: Annotated[Tensor | None, MASK]
    block_size: Annotated[tuple[int, int] | None, MASK]
    key_index: Annotated[Tensor | None, TENSOR]


class AttentionOptions(TrainingOptions, PaddedMaskOptions, ListedOptions, total=False):
    """Options of `attention`."""


class VarlenOptions(TrainingOptions, ServingOptions, ListedOptions, total=False):
    """Options of `attention_varlen`."""


class FormatOptions(TypedDict, total=False):
    """An option that only caches have."""

    cache_format: Annotated[CacheFormat | tuple[CacheFormat, CacheFormat] | None, Option("format")]


class CacheOptions(
    FlashOptions,
    NewerOptions,
    SplitOptions,
    ServingOptions,
    ListedOptions,
    FormatOptions,
    total=False,
):
    """Options of `attention_with_kvcache`."""


class Float8Options(
    FlashOptions,
    ScoreOptions,
    SplitOptions,
    LengthOptions,
    DropoutOptions,
    PaddedMaskOptions,
    total=False,
):
    """Options of `attention_fp8`."""


class Extras(NewerTrainingOptions, total=False):
    """Keyword-only options beyond FlashAttention-2 of the functions for training."""

    return_lse: bool
    out: Tensor | None
    backend: BackendName | None


class PaddedExtras(Extras, PaddedMaskOptions, total=False):
    """`Extras` of the functions for padded batches."""


class CacheExtras(NewerOptions, ServingOptions, FormatOptions, total=False):
    """Keyword-only options beyond FlashAttention-2 of `flash_attn_with_kvcache`."""

    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | Tensor | None
    cu_seqlens_k_new: Tensor | None
    rotary_seqlens: Tensor | None
    out: Tensor | None
    backend: BackendName | None


# The options of all classes; those of the others are among these.
OPTIONS: dict[str, Option] = {
    name: hint.__metadata__[0]
    for kind in (AttentionOptions, ServingOptions, FormatOptions)
    for name, hint in get_type_hints(kind, include_extras=True).items()
}
NUMBERS = {name: option for name, option in OPTIONS.items() if option.kind == "number"}
# Numbers that say how a score is made, or which ones count, in every function.
SCORE_NUMBERS = NUMBERS.keys() & (FlashOptions.__optional_keys__ | ScoreOptions.__optional_keys__)
LISTS = ListedOptions.__optional_keys__
TENSORS = frozenset(name for name, option in OPTIONS.items() if option.kind == "tensor")


def options_of(kind: Any) -> dict[str, Option]:
    """The options of one of the classes above."""
    return {name: OPTIONS[name] for name in kind.__annotations__}


def refuse_unknown(keywords: Mapping[str, Any], kind: Any, function: Callable[..., Any]) -> None:
    """Raise TypeError for options that `function`, whose class of options is `kind`, lacks."""
    if not kind.__optional_keys__.issuperset(keywords):
        unknown = [name for name in keywords if name not in kind.__optional_keys__]
        raise unexpected_keywords(unknown, function)


_Function = TypeVar("_Function", bound=Callable[..., Any])


def accepts(kind: Any) -> Callable[[_Function], _Function]:
    """Decorate a function of ``**options: Unpack[kind]`` so that `help` and `inspect.signature`
    list each option as a keyword.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not Parameter.VAR_KEYWORD]
        leading = [p for p in own if p.kind is not Parameter.KEYWORD_ONLY]
        keywords = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=option.default, annotation=text)
            for (name, option), text in zip(
                options_of(kind).items(), map(type_text, kind.__annotations__.values()), strict=True
            )
        ]
        parameters = [*leading, *keywords, *own[len(leading) :]]
        # `inspect` reads this attribute, which the type of functions lacks.
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def type_text(annotation: Any) -> str:
    """The source text of an option's type in the classes above: ``float`` for ``Annotated[float,
    ...]``.
    """
    node: Any = ast.parse(annotation.__forward_arg__, mode="eval").body
    is_annotated = isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated"
    return ast.unparse(node.slice.elts[0] if is_annotated else node)


# The TypeError for an unknown keyword, which suggests the one that was probably meant. Functions
# without ``**options`` end with ``**unknown: Never``: their signatures stay explicit, and type
# checkers still reject an unknown keyword.

# Arguments that hide keys from queries, and arguments that mark padding; no function has all.
MASKS = ("attn_mask", "bias", "block_mask")
PADDING = ("key_padding_mask", "seqused_k", "cache_seqlens")

# Names of arguments in other libraries and functions, and our arguments with the same purpose.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "attention_bias": ("bias",),
    "attention_mask": MASKS + PADDING,
    "attn_bias": ("bias",),
    "attn_mask": MASKS,
    "block_table": ("page_table",),
    "cache_seqlens": ("seqused_k",),
    "centre_k": ("smooth_k",),  # the name until 0.1, like `rotate` and `rotate_v`
    "dropout": ("dropout_p",),
    "is_causal": ("causal",),
    "key_padding_mask": PADDING,
    "learnable_sink": ("sink",),
    "mask": MASKS + PADDING,
    "mask_mod": ("block_mask",),
    "need_weights": ("return_attn_probs",),
    "output_attentions": ("return_attn_probs",),
    "padding_mask": PADDING,
    "rotate": ("hadamard",),
    "rotate_v": ("hadamard_v",),
    "return_softmax_lse": ("return_lse",),
    "s_aux": ("sink",),
    "scale": ("softmax_scale",),
    "scaling": ("softmax_scale",),
    "seqused_k": ("cache_seqlens",),
    "sinks": ("sink",),
    "sliding_window": ("window_size",),
    "sm_scale": ("softmax_scale",),
    "window": ("window_size",),
}

# Differences that the suggested name does not show.
REMARKS = {
    "enable_gqa": "not needed; it follows from the numbers of heads",
    "is_causal": "it aligns to the bottom-right corner, PyTorch's to the top-left corner",
    "sliding_window": "(sliding_window - 1, 0)",
}


def unexpected_keywords(unknown: Iterable[str], function: Callable[..., Any]) -> TypeError:
    """The error to raise for the keywords `unknown`, which `function` does not have.

    It names the function that the user called: the outermost running function of this package,
    because `flash_attn_func` and others pass their keywords on.
    """
    accepted = list(inspect.signature(function).parameters)
    return TypeError(
        f"{_called_function()}() got an unexpected keyword argument "
        + ", ".join(_described(name, accepted) for name in unknown)
    )


def _called_function() -> str:
    """The name of the outermost running function of this package."""
    package = __name__.partition(".")[0] + "."
    frame = sys._getframe(1)
    while frame.f_back and frame.f_back.f_globals.get("__name__", "").startswith(package):
        frame = frame.f_back
    return frame.f_code.co_name


def _described(name: str, accepted: list[str]) -> str:
    """An unknown name, and the accepted names that may have been meant."""
    if name in OTHER_NAMES:
        meant = [other for other in OTHER_NAMES[name] if other in accepted]
    else:
        meant = difflib.get_close_matches(name, accepted, n=1)
    advice = [f"want {' or '.join(meant)}"] if meant else []
    advice += [REMARKS[name]] if name in REMARKS else []
    return f"{name!r} ({'; '.join(advice)})" if advice else repr(name)
