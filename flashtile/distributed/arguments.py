"""What a rank passes to `ContextParallel.attention`, checked: its own rows as packed tokens.

Masks and biases have the rows of the rank's own queries, and all keys of the document by their
position in it. The other options mean what they mean in one process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..autocast import autocast_dtype, cast_inputs, is_autocasting, without_autocast
from ..autograd import is_transformed
from ..call import checks
from ..call.converted_masks import as_bias
from ..call.dispatch import BackendName
from ..call.layouts import Packed
from ..call.options import LISTS, AttentionOptions, VarlenOptions, unexpected_keywords
from ..call.prepare import CAPTURED, describe, with_score_mod
from ..masks import BlockMask, Spans
from ..problem import DIFFERENTIABLE, FLOAT8, Operands, Options, lse_dtype, tile_operands
from ..score_mod import Described, described
from .layout import Layout
from .partition import ShardMap, TileMap

# Those of `attention`, except the scales of float8 inputs, which no rank takes; lists of keys,
# which would have to be divided as the keys are; and equal bits in every layout: results are merged
# in parts whose borders depend on the ranks.
MISSING = {"q_descale", "k_descale", "v_descale", "batch_invariant", *LISTS}
OPTIONS = [name for name in AttentionOptions.__annotations__ if name not in MISSING]
OPTIONS.append("return_stats")  # a sorted tuple of names
# Options that are added to the scores.
SCORE_MASKS = ("bias", "attn_mask", "key_padding_mask")
USED = ("seqused_q", "seqused_k")


Qkv = tuple[Tensor, Tensor, Tensor]


class Arguments(NamedTuple):
    """What a rank passes to `ContextParallel.attention`, as it is."""

    qkv: Qkv
    layout: Layout
    options: Mapping[str, Any]
    return_lse: bool = False
    backend: BackendName | None = None

    def with_program(self) -> Arguments:
        """The program of the score function and what it captures replace the function: equal calls
        have equal programs."""
        q, function = self.qkv[0], self.options.get("score_mod")
        if not callable(function) or not isinstance(q, Tensor):
            return self
        try:
            program = described(function, lse_dtype(q.dtype), q.device)
        except Exception:  # the function is the caller's
            return self  # the check of the call raises it again, where all ranks hear of it
        return self._replace(options={**self.options, "score_mod": program})

    def has_only_qkv(self) -> bool:
        """Whether `call_signature` says everything about a call besides the contents of q, k and v:
        the options have neither tensors nor masks nor functions, and autocast does not change
        dtypes."""
        parts = (x if type(x) is tuple else (x,) for x in self.options.values())
        are_numbers = all(
            x is None or type(x) in (int, float, bool, str) for part in parts for x in part
        )
        return are_numbers and not is_autocasting(self.qkv[0])

    def needs_gradients(self) -> bool:
        """Whether a backward may follow for some of the tensors: on all ranks or on none."""
        q, k, v = self.qkv
        return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


class UsedTokens(NamedTuple):
    """Who owns which tokens of those that `seqused_q` and `seqused_k` leave, and which rows of this
    rank's packed tokens they are; None for all of them."""

    queries: ShardMap
    keys: ShardMap
    query_rows: Tensor | None = None
    key_rows: Tensor | None = None

    def facts(self) -> list[tuple[tuple[int, ...], str]]:
        """The lengths, short enough for a note of a rank: the first ones, and a digest of all."""
        lengths = self.queries.lengths, self.keys.lengths
        return [(x[:8], digest(str(x))) for x in lengths]

    def of_used(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Results of the used ones of this rank's packed tokens."""
        if self.query_rows is None:
            return out, lse
        return out.index_select(0, self.query_rows), lse.index_select(1, self.query_rows)

    def with_unused(self, out: Tensor, lse: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Results for all `tokens` of this rank: out 0 and lse -inf for those that are not used."""
        if self.query_rows is None:
            return out, lse
        rows = self.query_rows
        return (
            out.new_zeros(tokens, *out.shape[1:]).index_copy(0, rows, out),
            lse.new_full((lse.shape[0], tokens), -torch.inf).index_copy(1, rows, lse),
        )

    def with_unused_keys(self, sums: Tensor, tokens: int) -> Tensor:
        """Column sums (used keys, heads) for all `tokens` keys of this rank, with zeros."""
        if self.key_rows is None:
            return sums
        return sums.new_zeros(tokens, sums.shape[1]).index_copy(0, self.key_rows, sums)


class PackedCall(NamedTuple):
    """A checked call over a rank's own tokens that take part."""

    operands: Operands  # packed, without padding, without lengths
    options: Options
    used: UsedTokens
    tiles: TileMap | None
    bias_has_rows: bool  # one for each query, not one for all

    @property
    def heads(self) -> tuple[int, int]:
        """Those of queries and of keys."""
        return self.operands.q.shape[1], self.operands.k.shape[1]


def refuse_unknown(options: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise for an option that `function`, attention over ranks, does not have.

    Raises:
        NotImplementedError: attention in one process has it.
        TypeError: it does not exist.
    """
    for name in options:
        if name in OPTIONS:
            continue
        if name in AttentionOptions.__optional_keys__ | VarlenOptions.__optional_keys__:
            raise missing(name)
        raise unexpected_keywords([name], function)


def missing(name: str) -> NotImplementedError:
    """The error to raise for an option that only attention in one process has."""
    return NotImplementedError(f"{name}: context parallelism does not have this option")


def refuse_transforms(arguments: Arguments) -> None:
    """Raise under transforms of torch.func, and for tensors with tangents: they would need other
    exchanges.

    Raises:
        NotImplementedError: there is one.
    """
    if is_transformed():
        raise NotImplementedError(
            "context parallelism: got a transform of torch.func, such as vmap; want a plain call, "
            "with gradients by backward() or torch.autograd.grad"
        )
    if forward_ad._current_level >= 0:
        names = Operands._fields[:DIFFERENTIABLE]
        others = (arguments.options.get(name) for name in names[3:])
        for name, x in zip(names, (*arguments.qkv, *others), strict=True):
            if x is not None and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(
                    f"context parallelism: {name} got a forward-mode tangent; expected none, with "
                    "gradients by backward() or torch.autograd.grad"
                )


def packed_call(arguments: Arguments) -> PackedCall:
    """Check the tensors and options of a rank.

    Raises:
        ValueError, TypeError, NotImplementedError: an argument does not fit.
    """
    qkv, layout, options, *_ = arguments
    q, k, v = cast_inputs(*qkv)
    if any(x.dtype in FLOAT8 for x in (q, k, v)):
        raise NotImplementedError(f"q, k, v: got {q.dtype}, context parallelism has no float8")
    padded = q
    q, k, v = layout.packed(q, k, v)
    qv, spans, tiles = (options.get(name) for name in ("qv", "mask", "block_mask"))
    if qv is not None:
        qv = packed_qv(qv, padded, v, layout)
    bias = score_bias(options, padded, layout)
    bias_has_rows = bias is not None and has_rows(bias, layout)
    if bias is not None and bias_has_rows:
        bias = bias[:, :, : q.shape[0] // max(layout.sequences, 1)]
    if spans is not None:
        spans = packed_spans(spans, padded, layout)
    used = used_tokens(options, q, layout)
    if tiles is not None:
        tiles = tile_map(tiles, q, used)
    if used.query_rows is not None:
        q = q.index_select(0, used.query_rows)
        qv = None if qv is None else qv.index_select(0, used.query_rows)
        if bias is not None and bias_has_rows and not layout.sequences:
            bias = bias.index_select(2, used.query_rows)
        spans = spans and Spans(*(x.index_select(2, used.query_rows) for x in spans))
    if used.key_rows is not None:
        k, v = (x.index_select(0, used.key_rows) for x in (k, v))
    apart = {*SCORE_MASKS, *USED, "block_mask", "alibi_slopes", "score_mod", "qv", "return_stats"}
    keywords = {n: x for n, x in options.items() if n not in apart}
    if options.get("score_mod") is not None:
        keywords |= score_function(options["score_mod"], padded)
    keywords["mask"] = spans
    slopes, documents = options.get("alibi_slopes"), len(layout.queries.lengths)
    if slopes is not None:
        checks.tensor("alibi_slopes", slopes)
    if slopes is not None and slopes.dim() == 2 and slopes.shape[0] != documents:
        raise ValueError(
            f"alibi_slopes: got shape {tuple(slopes.shape)}, want {documents} rows or one dimension"
        )
    if slopes is not None:
        one = slopes[0] if documents else slopes.sum(0)  # slopes of some row, or zeros
        keywords["alibi_slopes"] = one if slopes.dim() == 2 else slopes
    # Not from numbers on the host, for whose copy it would wait.
    both_ends = torch.arange(2, dtype=torch.int32, device=q.device)
    ends_q, ends_k = both_ends * q.shape[0], both_ends * k.shape[0]
    packed = Packed(ends_q, ends_k, q.shape[0], k.shape[0])
    described_k = k
    if qv is not None:  # a call gets keys and values side by side; values travel once
        q = without_autocast(torch.cat)((q, qv), dim=-1)
        described_k = k.detach()[..., :1].expand(*k.shape[:-1], q.shape[-1])
    operands, call_options = describe((q, described_k, v), packed, keywords)
    operands = operands._replace(
        k=k, cu_seqlens_q=None, cu_seqlens_k=None, alibi_slopes=slopes, bias=bias
    )
    if tiles is not None:
        operands = operands._replace(**tile_operands(options["block_mask"]))
    return PackedCall(operands, call_options, used, tiles, bias_has_rows)


def packed_qv(qv: Any, q: Tensor, v: Tensor, layout: Layout) -> Tensor:
    """The packed tokens of `qv`, whose products with the values are added to the scores.

    Args:
        q: the queries as the rank passes them, with padding.

    Raises:
        ValueError, TypeError: it does not fit.
    """
    (qv,) = cast_inputs(qv)
    checks.folded_qv(qv, q, v)
    return layout.without_padding("qv", qv, layout.queries, layout.local_tokens)


def score_function(function: Any, q: Tensor) -> Mapping[str, Any]:
    """The options that describe a score function, a `Described` or the caller's own.

    Raises:
        TypeError, ValueError, NotImplementedError: it cannot be traced.
    """
    if isinstance(function, Described):
        return dict(zip(("score_mod", *CAPTURED), function, strict=True))
    return with_score_mod(q, q, {"score_mod": function})


def used_tokens(options: Mapping[str, Any], q: Tensor, layout: Layout) -> UsedTokens:
    """The tokens that take part. The host reads the lengths, from which it plans the exchanges.

    Raises:
        ValueError, TypeError: a tensor of lengths does not fit.
    """
    queries, keys, rows = layout.queries, layout.keys, {}
    for name, shards in zip(USED, (queries, keys), strict=True):
        x = options.get(name)
        checks.per_sequence(name, x, q, len(shards.lengths))
        if x is None:
            continue
        lengths = [
            min(max(used, 0), length)
            for used, length in zip(x.tolist(), shards.lengths, strict=True)
        ]
        rows[name] = torch.tensor(shards.rows_of_first(lengths, layout.rank), device=q.device)
        rows[name] = rows[name].long()
        if name == "seqused_q":
            queries = queries.first_tokens(lengths)
        else:
            keys = keys.first_tokens(lengths)
    return UsedTokens(queries, keys, rows.get("seqused_q"), rows.get("seqused_k"))


def score_bias(options: Mapping[str, Any], q: Tensor, layout: Layout) -> Tensor | None:
    """A bias (batch or 1, heads or 1, rows or 1, keys or 1) that applies the masks of
    `SCORE_MASKS`, with the rows of padding.

    Raises:
        ValueError, TypeError: a mask does not fit.
        NotImplementedError: a mask of dense batches is given for packed documents.
    """
    masks = {name: options[name] for name in SCORE_MASKS if options.get(name) is not None}
    if not masks:
        return None
    for name in masks:
        if not layout.sequences and name != "bias":
            raise NotImplementedError(f"{name}: got packed documents, want a dense batch or a bias")
    heads, longest = q.shape[-2], max(layout.keys.lengths, default=0)
    sizes = (layout.sequences, heads, layout.local_tokens, longest)
    if not layout.sequences:
        shape = list(getattr(masks["bias"], "shape", ()))
        has_batch = len(shape) == 4 and shape[2] == 1
        sizes = (len(layout.queries.lengths), heads, 1, longest) if has_batch else (1, *sizes[1:])
    return as_bias(q, sizes, **masks)


def has_rows(bias: Tensor, layout: Layout) -> bool:
    """Whether a bias has a row for each query of a rank, padding included. All ranks agree on it.
    Where every rank has one query, a single row belongs to that query, unless the bias is of
    several documents."""
    if bias.shape[2] != layout.local_tokens:
        return False
    return bool(layout.sequences) or bias.shape[0] == 1


def packed_spans(mask: Any, q: Tensor, layout: Layout) -> Spans:
    """The intervals of a rank's packed tokens, (1, heads or 1, tokens, intervals).

    Args:
        q: the queries as the rank passes them, with padding.

    Raises:
        ValueError, TypeError: the mask does not fit.
    """
    checks.spans(mask, q)
    rows = layout.queries.tokens(layout.rank) // max(layout.sequences, 1)
    local = Spans(*(x[:, :, :rows] for x in mask))
    return local.pack(layout.sequences) if layout.sequences else local


def tile_map(mask: Any, q: Tensor, used: UsedTokens) -> TileMap:
    """The plan of a block mask, whose tiles all pieces of documents have to begin at.

    Raises:
        ValueError, TypeError, NotImplementedError: the mask does not fit.
    """
    if not isinstance(mask, BlockMask):
        checks.flex_mask(mask)
        raise NotImplementedError(
            "block_mask: got a mask of FlexAttention, want BlockMask.from_flex(mask), made once"
        )
    queries, keys = used.queries, used.keys
    checks.block_mask_kinds(mask.kinds, q, len(queries.lengths))
    checks.block_mask_lengths(mask, max(queries.lengths, default=0), max(keys.lengths, default=0))
    for shards, size in zip((queries, keys), mask.tile_size, strict=True):
        starts = [piece.start for owned in shards.pieces for piece in owned if piece.start % size]
        if starts:
            raise ValueError(
                f"block_mask: got tiles of {mask.tile_size} and a layout with a piece that begins "
                f"at token {starts[0]}; pass the mask in `masks` of the layout"
            )
    return TileMap.of(mask)


def shapes(options: Mapping[str, Any]) -> dict[str, list[int]]:
    """The shapes of optional tensors, which are equal on all ranks."""
    tensors = {name: x.starts if isinstance(x, Spans) else x for name, x in options.items()}
    return {n: list(x.shape) for n, x in sorted(tensors.items()) if isinstance(x, Tensor)}


def digest(text: str) -> str:
    """12 hexadecimal digits that differ when texts differ; none for no text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12] if text else ""


def lengths_of(name: str, cu_seqlens: Tensor | Sequence[int]) -> tuple[int, ...]:
    """The lengths of documents, from cumulative ones."""
    ends = [int(x) for x in torch.as_tensor(cu_seqlens).tolist()]
    lengths = tuple(b - a for a, b in pairwise(ends))
    if not ends or ends[0] != 0 or any(length < 0 for length in lengths):
        raise ValueError(f"{name}: got {ends}, want lengths that start with 0 and never decrease")
    return lengths


def call_signature(tensors: Sequence[Any], options: Mapping[str, Any], *settings: Any) -> Any:
    """What decides which messages a call has and whether it is refused, and nothing in which ranks
    may differ. Otherwise one of them would compare a call that the others have compared before.
    Which of the tensors require gradients is up to each rank, unless `settings` say it."""
    return (
        *settings,
        autocast_dtype(tensors[0]),
        *[(x.shape, x.dtype, x.device.type) if isinstance(x, Tensor) else repr(x) for x in tensors],
        *[(name, value_signature(name, x)) for name, x in sorted(options.items())],
    )


def plan_key(signature: Any, qkv: Qkv, reserved_processors: int) -> tuple[Any, ...]:
    """What decides how a rank runs a call, together with the values of its options."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return signature, *[x.device for x in qkv], reserved_processors, deterministic


def value_signature(name: str, x: Any) -> Any:
    """What decides whether two values of an argument need one agreement of the ranks or two. It is
    equal on all ranks, whose GPUs have numbers of their own."""
    if isinstance(x, Tensor):
        needs_grad = x.requires_grad and torch.is_grad_enabled()
        facts = tuple(x.shape), x.dtype, x.device.type, needs_grad
        is_read = name in USED and checks.is_readable(x)
        return (*facts, tuple(x.tolist())) if is_read else facts
    if isinstance(x, BlockMask):
        of_tiles = TileMap.of(x).digest if checks.is_readable(x.kinds) else None
        return x.lengths, x.tile_size, of_tiles
    if isinstance(x, tuple):
        return tuple(value_signature(name, part) for part in x)
    return repr(x)
