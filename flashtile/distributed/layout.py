"""A rank's view of who owns which tokens: cutting tensors into shards and putting them together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import current_layout
from ..lru import Memo
from .buffers import stream_of
from .collectives import MOST_SIGNATURES, Communicator, VerifiedCalls
from .partition import Piece, ShardMap

PLANS = 128  # of a layout; some have tensors with a number for each token


class Layout:
    """Which tokens this rank holds, and in which order; made by `ContextParallel.layout`.

    A shard is padded at its end to the length of the longest one, so that all ranks have shards of
    one shape. Attention ignores the padding and returns zeros for it.

    Inside `with layout:` the attention of flashtile's own modules and models, and of transformers
    models that use flashtile, is attention over all ranks. Any other call of flashtile's attention
    raises there, and so does a block that ends without a call over all ranks.

    Attributes:
        context: the `ContextParallel` that made it, which imports this module.
        queries, keys: who owns which queries and keys; the same one for self-attention.
        sequences: of a dense batch; 0 for packed documents.
        local_tokens: rows of a shard, padding included: of each sequence of a dense batch, or of
            all packed documents together.
        positions: (local_tokens,) int64, the position of each row in its document, for rotary
            embedding; 0 for padding.
        ticket: an int64 scalar by which the ops of compiled calls find the layout.
        cu_seqlens: (documents here + 1,) int32, where the rows of each document begin; of packed
            documents only.
    """

    def __init__(
        self,
        context: Any,
        wire: Communicator,
        queries: ShardMap,
        keys: ShardMap,
        sequences: int,
        local_tokens: tuple[int, int],
    ) -> None:
        self.context, self.comm, self.sequences = context, wire, sequences
        self.queries, self.keys = queries, keys
        self.local_tokens, self.local_keys = local_tokens
        self.rank = wire.rank
        self.tokens = queries.tokens(self.rank), keys.tokens(self.rank)  # without padding
        documents = queries.documents(self.rank)
        positions = [torch.arange(p.start, p.stop) for p in self._pieces(self.rank)]
        padding = torch.zeros(self.local_tokens - sum(map(len, positions)), dtype=torch.int64)
        self.positions = torch.cat([*positions, padding])
        counts = [sum(b - a for a, b in queries.spans(self.rank, d)) for d in documents]
        self.cu_seqlens = torch.tensor([0, *counts]).cumsum(0).int()
        self.verified = VerifiedCalls(wire)
        self._digests: tuple[str, str] | None = None
        self.ticket = register_layout(self)
        self.calls = 0  # of attention over all ranks
        self._blocks: list[tuple[AbstractContextManager[None], int]] = []  # with calls before each
        self.plans: Memo[Any, Any] = Memo(PLANS)  # `Plan`s, whose module imports this one
        # By what they hold, device and stream.
        self._copies: Memo[Any, Tensor] = Memo(MOST_SIGNATURES + wire.ranks)

    def __repr__(self) -> str:
        count = self.sequences or len(self.queries.lengths)
        what = f"{count} {'sequence' if self.sequences else 'document'}{'s' if count != 1 else ''}"
        return (
            f"Layout({what}, {sum(self.queries.lengths)} tokens on {self.queries.ranks} ranks, "
            f"{self.local_tokens} rows on each)"
        )

    def shard(self, x: Tensor, dim: int | None = None, fill: float = 0.0) -> Tensor:
        """This rank's rows of `x`, which every rank has as a whole. No communication.

        Args:
            x: (batch, seq, ...) for a dense batch, (tokens, ...) for packed documents.
            dim: the dimension of tokens; by default 1 for a dense batch and 0 otherwise.
            fill: the value of padding.

        Raises:
            ValueError: the dimension has another length than the layout.
        """
        dim = self._token_dim() if dim is None else dim
        whole = self._whole()
        if x.shape[dim] != whole:
            raise ValueError(f"x: got {x.shape[dim]} tokens in dimension {dim}, want {whole}")
        rows = self._rows_on(self.rank, x.device)
        shard = x.index_select(dim, rows)
        missing = self.local_tokens - rows.numel()
        if not missing:
            return shard
        shape = [*shard.shape[:dim], missing, *shard.shape[dim + 1 :]]
        return torch.cat([shard, shard.new_full(shape, fill)], dim)

    def unshard(self, x: Tensor, dim: int | None = None) -> Tensor:
        """All rows in their original order, from the shards `x` of all ranks: the reverse of
        `shard`. Every rank has to call it. The gradient of a row goes to the rank that owns it; it
        is that of one rank's result, not the sum over the ranks.

        Raises:
            ValueError: the dimension has another length than `local_tokens`.
        """
        dim = self._token_dim() if dim is None else dim
        if x.shape[dim] != self.local_tokens:
            raise ValueError(
                f"x: got {x.shape[dim]} tokens in dimension {dim}, want {self.local_tokens}"
            )
        return _Unshard.apply(x, self, dim)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole batch of tokens; packed documents are one row."""
        return max(self.sequences, 1), self._whole()

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, over all ranks."""
        return max(self.queries.lengths, default=0)

    def batch(self, **tensors: Tensor) -> dict[str, Any]:
        """This rank's keyword arguments of a transformers model, from those of the whole batch.

        Args:
            tensors: `input_ids`, `labels` (not shifted) and others that have a token in dimension
                1, such as `inputs_embeds`: (batch, seq, ...), or (1, tokens, ...) for packed
                documents. An `attention_mask` without padding may be among them.

        Returns:
            The shards, and `position_ids`. With `labels` also

            - `shift_labels`: for each of this rank's tokens the label of the next token, which may
              be on another rank; -100 at the end of a document and at padding;
            - `num_items_in_batch`: the number of labels of the whole batch, so that the losses of
              all ranks, and their gradients, sum up to those of one process;
            - `labels`: without elements. They ask a model for its loss, which then reads
              `shift_labels`; a loss that does not know `shift_labels` fails on them.

        Raises:
            ValueError: a tensor has another number of tokens, or the layout makes it.
            NotImplementedError: the `attention_mask` has padding.
        """
        ends = None if self.sequences else [0, *accumulate(self.queries.lengths)]
        return local_inputs(self, ends, tensors)

    def positions_on(self, device: torch.device) -> Tensor:
        """`positions` on a device."""
        return self._on(device, "positions", lambda: self.positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """`ContextParallel.attention` in this layout, without the log-sum-exp."""
        out: Tensor = self.context.attention(q, k, v, self, **options)
        return out

    def together(self, what: str, check: Callable[[], None]) -> None:
        """Run `check`. When all ranks do this for the first time, they compare whether it raises,
        and raise the same error."""
        if what in self.verified:
            check()
            return

        def prepare() -> tuple[None, dict[str, Any]]:
            check()
            return None, {"the call": what}

        self.verified.verify(what, prepare)

    @property
    def digests(self) -> tuple[str, str]:
        """Texts that differ when others own the queries, or the keys."""
        if self._digests is None:
            self._digests = self.queries.digest()[:12], self.keys.digest()[:12]
        return self._digests

    def __enter__(self) -> Layout:
        block = current_layout.in_force(self)
        block.__enter__()
        self._blocks.append((block, self.calls))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        block, calls = self._blocks.pop()
        block.__exit__(None, None, None)
        if error is None and self.calls == calls:
            raise RuntimeError(
                "with layout: no attention over all ranks was called inside the block; does the "
                "model use flashtile? Other attention sees only the tokens of this rank"
            )

    def packed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shards of queries, keys and values as packed tokens.

        Raises:
            ValueError: one of them has another shape.
        """
        return (
            self.without_padding("q", q, self.queries, self.local_tokens),
            self.without_padding("k", k, self.keys, self.local_keys),
            self.without_padding("v", v, self.keys, self.local_keys),
        )

    def without_padding(self, name: str, x: Tensor, holders: ShardMap, rows: int) -> Tensor:
        """A shard (batch, rows, heads, head_dim) or (rows, heads, head_dim) as packed tokens.

        Raises:
            ValueError: it has another shape.
        """
        want = (self.sequences, rows) if self.sequences else (rows,)
        if x.dim() != len(want) + 2 or tuple(x.shape[: len(want)]) != want:
            shape = ", ".join(map(str, (*want, "heads", "head_dim")))
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want ({shape}) in this layout")
        tokens = self.tokens[0 if holders is self.queries else 1]
        return x[:, : tokens // self.sequences].flatten(0, 1) if self.sequences else x[:tokens]

    def with_padding(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Results for packed tokens, (tokens, heads, head_dim) and (heads, tokens), as a shard."""
        missing = self.local_tokens - out.shape[0] // max(self.sequences, 1)
        if self.sequences:
            sizes = (self.sequences, out.shape[0] // self.sequences)
            out, lse = out.unflatten(0, sizes), lse.unflatten(1, sizes).transpose(0, 1)
            if not missing:
                return out, lse
            out = out.transpose(0, 1)
        if missing:
            out = torch.cat([out, out.new_zeros(missing, *out.shape[1:])])
            lse = torch.cat([lse, lse.new_full((*lse.shape[:-1], missing), -torch.inf)], -1)
        return (out.transpose(0, 1), lse) if self.sequences else (out, lse)

    def of_own_keys(self, sums: Tensor) -> Tensor:
        """Column sums of packed keys (tokens, heads) as (heads, rows) or (batch, heads, rows), with
        zeros in padding."""
        batch = max(self.sequences, 1)
        # (batch, heads, tokens of a sequence)
        sums = sums.unflatten(0, (batch, len(sums) // batch)).mT
        sums = pad(sums, (0, self.local_keys - sums.shape[2]))
        return sums if self.sequences else sums[0]

    def flat(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shards (1, rows, heads, head_dim) or (rows, heads, head_dim) as packed tokens, with the
        padding at their end."""
        if self.sequences:
            return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        return q, k, v

    def flat_results(self, out: Tensor, lse: Tensor, wants_lse: bool) -> tuple[Tensor, Tensor]:
        """Results of shards that `flat` made: `out` with padding, `lse` without it."""
        missing = out.shape[0] - lse.shape[1]
        if missing and wants_lse:
            lse = torch.cat([lse, lse.new_full((lse.shape[0], missing), -torch.inf)], -1)
        return (out.unsqueeze(0), lse.unsqueeze(0)) if self.sequences else (out, lse)

    def results_without_padding(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The reverse of `with_padding`."""
        out = self.without_padding("out", out, self.queries, self.local_tokens)
        if self.sequences:
            lse = lse[:, :, : out.shape[0] // self.sequences].transpose(0, 1).flatten(1)
        return out, lse[:, : out.shape[0]]

    def _token_dim(self) -> int:
        return 1 if self.sequences else 0

    def _whole(self) -> int:
        return self.queries.lengths[0] if self.sequences else sum(self.queries.lengths)

    def rows_of(self, rank: int) -> Tensor:
        """A rank's rows without padding, as indices into the token dimension of the whole."""
        starts = [*accumulate(self.queries.lengths, initial=0)]
        parts = [torch.arange(p.start, p.stop) + starts[p.document] for p in self._pieces(rank)]
        return torch.cat([*parts, torch.arange(0)])

    def _pieces(self, rank: int) -> list[Piece]:
        """A rank's pieces, of one sequence of a dense batch: all are cut alike."""
        pieces = self.queries.pieces[rank]
        return [piece for piece in pieces if piece.document == 0 or not self.sequences]

    def _rows_on(self, rank: int, device: torch.device) -> Tensor:
        """`rows_of` on a device."""
        return self._on(device, rank, lambda: self.rows_of(rank))

    def _on(self, device: torch.device, key: int | str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor of the layout, copied to a device once: each copy makes the host wait."""
        if torch.compiler.is_compiling():
            return make().to(device)
        what = key, device, stream_of(device)
        copy = self._copies.get(what)
        if copy is None:
            with torch.inference_mode(False):  # later calls may need gradients
                copy = self._copies[what] = make().to(device)
        return copy


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, dim: int) -> Tensor:
        ctx.layout, ctx.dim = layout, dim
        comm = layout.comm
        shard = x.contiguous()
        others = [rank for rank in range(comm.ranks) if rank != comm.rank]
        parts = {rank: torch.empty_like(shard) for rank in others}
        comm.exchange(dict.fromkeys(others, shard), parts, "shards").wait()
        parts[comm.rank] = shard
        whole = x.new_empty([*x.shape[:dim], layout._whole(), *x.shape[dim + 1 :]])
        for rank, part in parts.items():
            rows = layout._rows_on(rank, x.device)
            whole.index_copy_(dim, rows, part.narrow(dim, 0, rows.numel()))
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.layout.shard(gradient, ctx.dim), None, None


IGNORED = -100  # the label of a token without a next one
_MADE_HERE = ("position_ids", "shift_labels", "num_items_in_batch")


def local_inputs(
    layout: Layout, cu_seqlens: Sequence[int] | None, tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """See `Layout.batch`; `cu_seqlens` are those of all packed documents, None if dense."""
    for name in _MADE_HERE:
        if tensors.get(name) is not None:
            raise ValueError(f"{name}: the layout makes it, pass none")
    whole = {name: x for name, x in tensors.items() if x is not None}
    _check(layout, whole)
    mask = whole.pop("attention_mask", None)
    if mask is not None and (mask.dim() != 2 or not bool(mask.all())):
        raise NotImplementedError(
            "attention_mask: got padding, which a layout does not have; pack the sequences as "
            "documents"
        )
    labels = whole.pop("labels", None)
    inputs: dict[str, Any] = {name: layout.shard(x, 1) for name, x in whole.items()}
    device = next((x.device for x in (*inputs.values(), labels) if x is not None), None)
    positions = layout.positions if device is None else layout.positions_on(device)
    positions = positions.repeat(max(layout.sequences, 1), 1)
    # The attention that gets this object knows that it belongs to a layout.
    positions.flashtile_layout = layout  # type: ignore[attr-defined]  # an attribute of our own
    inputs["position_ids"] = positions
    if labels is not None:
        shifted = shift_labels(labels, cu_seqlens, IGNORED)
        inputs["shift_labels"] = layout.shard(shifted, 1, IGNORED)
        inputs["num_items_in_batch"] = (shifted != IGNORED).sum().clamp(min=1)
        inputs["labels"] = labels[:, :0]
    return inputs


def _check(layout: Layout, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` for a tensor of another shape."""
    rows, tokens = layout.shape
    for name, x in tensors.items():
        if x.dim() < 2 or tuple(x.shape[:2]) != (rows, tokens):
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want ({rows}, {tokens}, ...)")


def shift_labels(
    labels: Tensor, cu_seqlens: Tensor | Sequence[int] | None = None, ignore_index: int = IGNORED
) -> Tensor:
    """Each token's label becomes that of the next token: what a causal language model predicts.

    Do this to whole sequences, before they are sharded: the next token may be on another rank.

    Args:
        labels: (batch, seq), or (tokens,) or (1, tokens) with `cu_seqlens`.
        cu_seqlens: where packed documents begin; the last token of each is ignored.
        ignore_index: the label of tokens without a next one.
    """
    shifted = torch.full_like(labels, ignore_index)
    shifted[..., :-1] = labels[..., 1:]
    if cu_seqlens is not None:
        ends = torch.as_tensor(cu_seqlens, device=labels.device).long()[1:] - 1
        shifted[..., ends[ends >= 0]] = ignore_index
    return shifted


KEPT = 256  # layouts that stay alive until a compiled backward has run

_layout_ids = count()
_layouts: WeakValueDictionary[int, Any] = WeakValueDictionary()
_recent: deque[Any] = deque(maxlen=KEPT)


def register_layout(layout: Any) -> Tensor:
    """A new ticket for a layout, an int64 scalar on the CPU."""
    layout_id = next(_layout_ids)
    _layouts[layout_id] = layout
    return torch.tensor(layout_id)


def layout_of(ticket: Tensor) -> Any:
    """The layout of a ticket. From now on it stays alive while the latest `KEPT` ones are used.

    Raises:
        RuntimeError: it is gone.
    """
    layout = _layouts.get(int(ticket))
    if layout is None:
        raise RuntimeError(
            f"layout: got number {int(ticket)}, whose layout no longer exists; keep the layout "
            "until the backward has run"
        )
    if not _recent or _recent[-1] is not layout:
        _recent.append(layout)
    return layout
