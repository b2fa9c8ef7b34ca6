"""Multi-head attention layers, with the names of ``flash_attn.modules.mha``."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import current_layout
from ..api import attention_with_kvcache
from ..call.checks import ignored
from ..layers.rotary import RotaryEmbedding, apply_rotary_emb
from ..layers.tensor_parallel import Group, get_dim_for_local_rank, linears, local_size
from .alibi import alibi_slopes
from .alibi import get_alibi_slopes as get_alibi_slopes
from .attend import Attend, WindowSize
from .attend import flash_attend as flash_attend
from .inference import InferenceParams

Packing = dict[str, Any]  # cu_seqlens and max_seqlen of packed sequences, or None and None
Angles = tuple[Tensor, Tensor, bool]  # cos, sin, interleaved


class _Options(nn.Module):
    """The options that the attention layers without parameters share."""

    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: WindowSize = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        *,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.window_size = window_size
        self.deterministic = deterministic
        self.softcap = softcap
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def options(self, causal: bool | None) -> dict[str, Any]:
        """Keywords of `flash_attend`."""
        slopes = self.alibi_slopes
        return {
            "causal": self.causal if causal is None else causal,
            "softmax_scale": self.softmax_scale,
            "dropout_p": self.drop.p if self.training else 0.0,
            "window_size": self.window_size,
            # model.half() casts buffers too.
            "alibi_slopes": None if slopes is None else slopes.float(),
            "deterministic": self.deterministic,
            "softcap": self.softcap,
        }


class FlashSelfAttention(_Options):
    """Self-attention of packed projections, without its own parameters.

    Args:
        causal, softmax_scale, window_size, softcap, deterministic: as in `flashtile.attention`.
        attention_dropout: dropout rate of the attention probabilities in training mode.
        alibi_slopes: (heads,) or (batch, heads).
    """

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """The results of attention, (batch, seq, heads, head_dim), or (total, heads, head_dim).

        Args:
            qkv: (batch, seq, 3, heads, head_dim), or (total, 3, heads, head_dim) if packed.
            causal: overrides the layer's own setting.
            cu_seqlens, max_seqlen: of packed sequences, as in `flashtile.attention_varlen`.
        """
        q, k, v = qkv.unbind(-3)
        options = self.options(causal)
        return flash_attend(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, **options)


class FlashCrossAttention(_Options):
    """Attention of queries over other tokens' keys, without its own parameters.

    Its arguments are those of `FlashSelfAttention`; as in flash_attn, `alibi_slopes` comes before
    `window_size`.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: WindowSize = (-1, -1),
        deterministic: bool = False,
        *,
        softcap: float = 0.0,
    ) -> None:
        common = (causal, softmax_scale, attention_dropout)
        super().__init__(*common, window_size, alibi_slopes, deterministic, softcap=softcap)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """The results of attention, in the shape of q.

        Args:
            q: (batch, seq_q, heads, head_dim), or (total_q, heads, head_dim) if packed.
            kv: (batch, seq_k, 2, kv_heads, head_dim), or (total_k, 2, kv_heads, head_dim).
            causal: overrides the layer's own setting; aligned to the bottom-right corner.
            cu_seqlens, max_seqlen, cu_seqlens_k, max_seqlen_k: of packed queries and keys, as in
                `flashtile.attention_varlen`.
        """
        options = self.options(causal)
        options |= {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        options |= {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
        return flash_attend(q, *kv.unbind(-3), **options)


class SelfAttention(_Options):
    """`FlashSelfAttention` of dense batches with padding instead of packed sequences; the arguments
    are as there.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout)

    def forward(
        self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """`FlashSelfAttention.forward` of qkv (batch, seq, 3, heads, head_dim). `key_padding_mask`
        (batch, seq) bool is True for the keys that take part; a query that sees none of them gets
        0.
        """
        options = self.options(causal) | _padding(key_padding_mask)
        return flash_attend(*qkv.unbind(-3), **options)


class CrossAttention(SelfAttention):
    """`FlashCrossAttention` of dense batches with padding; the arguments of `SelfAttention`."""

    def forward(  # type: ignore[override]  # queries and keys are given apart
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """`FlashCrossAttention.forward` of q (batch, seq_q, heads, head_dim) and kv (batch, seq_k,
        2, kv_heads, head_dim), with the `key_padding_mask` (batch, seq_k) of `SelfAttention`. With
        `causal` the last query sees as many keys as take part, which is right where the padding
        comes last.
        """
        options = self.options(causal)
        options |= _padding(key_padding_mask, q.shape[1] if options["causal"] else None)
        return flash_attend(q, *kv.unbind(-3), **options)


class MHA(nn.Module):
    """Multi-head attention: projections, rotary embedding, attention, output projection.

    Self-attention projects with `Wqkv`, whose output holds the query heads, then the key heads,
    then the value heads. Cross-attention projects with `Wq` and `Wkv`. ValueError names an argument
    that does not fit the others.

    Args:
        embed_dim: number of features of a token.
        num_heads: number of query heads.
        num_heads_kv: number of key and value heads, a divisor of num_heads; num_heads by default.
        cross_attn: queries and keys come from different tokens.
        qkv_proj_bias, out_proj_bias: whether the projections have a bias.
        dropout: dropout rate of the attention probabilities in training mode.
        softmax_scale, causal, window_size, softcap: as in `flashtile.attention`.
        layer_idx: index of the layer in its model; needed with `inference_params`.
        dwconv: convolve the projections of each feature over the current token and the two before
            it (`dwconv_qkv`; `dwconv_q` and `dwconv_kv` with fewer key heads or cross-attention).
        rotary_emb_dim: number of features of a head to rotate; 0 for no rotation.
        rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved: base, scale_base and
            interleaved of `RotaryEmbedding`.
        use_alibi: penalise distance with the slopes of `alibi_slopes`.
        return_residual: return (result, x).
        fused_bias_fc, use_flash_attn, checkpointing: which kernels `flash_attn` takes, and what it
            keeps for the backward; they change no result here.
        device, dtype: of the parameters.
        head_dim: ``embed_dim / num_heads`` by default.
        attend: function that computes self-attention; flashtile by default. May be changed later.
        process_group, sequence_parallel: as in `ParallelMHA`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: WindowSize = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        softcap: float = 0.0,
        head_dim: int | None = None,
        attend: Attend = flash_attend,
        process_group: Group | None = None,
        sequence_parallel: bool = True,
    ) -> None:
        super().__init__()
        kernels = {"fused_bias_fc": fused_bias_fc, "use_flash_attn": use_flash_attn}
        ignored(type(self).__name__, **kernels, checkpointing=checkpointing)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        self.head_dim = _head_dim(embed_dim, num_heads, self.num_heads_kv, head_dim)
        # Each process has whole groups of query heads with their key head.
        group_size = num_heads // self.num_heads_kv
        self.num_heads_kv_per_rank = local_size(self.num_heads_kv, process_group)
        self.num_heads_per_rank = group_size * self.num_heads_kv_per_rank
        if process_group is not None and (cross_attn or dwconv):
            raise NotImplementedError("process_group: want None with cross_attn or dwconv")
        if rotary_emb_dim > self.head_dim:
            raise ValueError(f"rotary_emb_dim: {rotary_emb_dim} exceeds head_dim {self.head_dim}")
        self.cross_attn = cross_attn
        self.softmax_scale = softmax_scale
        self.causal = causal
        self.layer_idx = layer_idx
        self.dwconv = dwconv
        self.return_residual = return_residual
        self.use_alibi = use_alibi
        self.window_size = window_size
        self.softcap = softcap
        self.dropout = dropout
        self.attend = attend
        self.rotary_emb: RotaryEmbedding | None = None
        if rotary_emb_dim > 0:
            rotary = (rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved)
            self.rotary_emb = RotaryEmbedding(*rotary, rotary_emb_scale_base, device)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.process_group = process_group
        column, row = linears(process_group, sequence_parallel)
        q_dim, kv_dim = num_heads * self.head_dim, self.num_heads_kv * self.head_dim
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, q_dim, qkv_proj_bias, **where)
            self.Wkv = nn.Linear(embed_dim, 2 * kv_dim, qkv_proj_bias, **where)
        else:
            sizes, unit = (embed_dim, q_dim + 2 * kv_dim), (group_size + 2) * self.head_dim
            self.Wqkv = column(*sizes, bias=qkv_proj_bias, multiple_of=unit, **where)
        if dwconv and not self._kv_apart:
            self.dwconv_qkv = _dwconv(q_dim + 2 * kv_dim, where)
        elif dwconv:
            self.dwconv_q, self.dwconv_kv = _dwconv(q_dim, where), _dwconv(2 * kv_dim, where)
        self.out_proj = row(
            q_dim, embed_dim, bias=out_proj_bias, multiple_of=group_size * self.head_dim, **where
        )

    @property
    def _kv_apart(self) -> bool:
        """Whether keys and values are projected or convolved apart from the queries."""
        return self.cross_attn or self.num_heads_kv != self.num_heads

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Memory for keys and values, (batch_size, max_seqlen, 2, kv_heads, head_dim), not
        initialised, for `InferenceParams.key_value_memory_dict`; in the dtype of `out_proj` by
        default.
        """
        shape = (batch_size, max_seqlen, 2, self.num_heads_kv_per_rank, self.head_dim)
        return self.out_proj.weight.new_empty(shape, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: InferenceParams | None = None,
        *,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
        causal: bool | None = None,
        seqlen: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """A result in the shape of x, of `mixer_subset` if given; with return_residual (result, x).

        Args:
            x: (batch, seq, embed_dim), or (total, embed_dim) with cu_seqlens, or inside `with
                layout:` of packed documents, which takes the place of cu_seqlens.
            x_kv: the tokens that cross-attention attends to, shaped like x; x by default.
            key_padding_mask: (batch, seq) bool, True for the tokens whose keys take part. A query
                that sees none of them gets 0 before the output projection. With causal
                cross-attention as in `CrossAttention.forward`.
            cu_seqlens, max_seqlen: of packed sequences, as in `flashtile.attention_varlen`.
                Positions count from the start of each sequence.
            cu_seqlens_k, max_seqlen_k: the same for x_kv; needed with packed x_kv.
            mixer_subset: index of the tokens of x (batch, seq, embed_dim) that are queries; of
                cross-attention.
            inference_params: the cache to append to; x attends to all tokens that it then holds.
                No gradient is recorded.
            causal: overrides the layer's own setting; not with inference_params.
            seqlen: x is (batch * seqlen, embed_dim), or with sequence parallelism a part of these
                rows.

        Raises:
            ValueError: the arguments do not fit together.
            NotImplementedError: cross-attention or a cache inside `with layout:`.
        """
        self._check(
            x_kv=x_kv,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            mixer_subset=mixer_subset,
            inference_params=inference_params,
            causal=causal,
        )
        q, k, v = self._project(x, x_kv, mixer_subset)
        if seqlen is not None:
            q, k, v = (part.unflatten(0, (-1, seqlen)) for part in (q, k, v))
        packing = _packing(q, cu_seqlens, max_seqlen)
        if inference_params is not None:
            out = self._attend_cached(q, k, v, inference_params)
        else:
            options = self._options(q, causal)
            options["dropout_p"] = self.dropout if self.training else 0.0
            if self.cross_attn:
                if x_kv is None and cu_seqlens_k is None:
                    cu_seqlens_k, max_seqlen_k = cu_seqlens, max_seqlen
                packing_k = _packing(k, cu_seqlens_k, max_seqlen_k, of_keys="_k")
                q, k = self._rotate(q, k, packing, packing_k)
                lengths_k = {f"{name}_k": value for name, value in packing_k.items()}
                options |= _padding(key_padding_mask, q.shape[1] if options["causal"] else None)
                out = flash_attend(q, k, v, **packing, **lengths_k, **options)
            else:
                q, k = self._rotate(q, k, packing, packing)
                out = self.attend(q, k, v, **packing, **options, **_padding(key_padding_mask))
        out = out.flatten(-2)
        result = self.out_proj(out if seqlen is None else out.flatten(0, 1))
        return (result, x) if self.return_residual else result

    def _check(self, **given: Any) -> None:
        """Raise if one of the given arguments of `forward` does not fit the layer or another."""
        causal = self.causal if given["causal"] is None else given["causal"]
        names = {name for name, value in given.items() if value is not None}
        has_distances = self.use_alibi or tuple(self.window_size) != (-1, -1)
        for name, is_refused, reason in (
            ("x_kv", not self.cross_attn, "with cross_attn=False"),
            ("mixer_subset", not self.cross_attn, "with cross_attn=False"),
            ("cu_seqlens", self.dwconv, "with dwconv=True"),
            ("inference_params", self.dwconv, "with dwconv=True"),
            ("key_padding_mask", "cu_seqlens" in names, "with cu_seqlens"),
            ("key_padding_mask", "inference_params" in names, "with inference_params"),
            ("causal", "inference_params" in names, "with inference_params"),
            (
                "key_padding_mask",
                self.cross_attn and causal and has_distances,
                "in causal cross-attention with ALiBi or a window, whose distances a mask does not "
                "move",
            ),
        ):
            if name in names and is_refused:
                raise ValueError(f"{name}: got a value, want None {reason}")
        if current_layout.get() is not None:
            for name in ("cross_attn", "dwconv", "inference_params"):
                if name in names or getattr(self, name, False):
                    raise NotImplementedError(f"{name}: not supported inside `with layout:`")

    def _project(
        self, x: Tensor, x_kv: Tensor | None, subset: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (..., heads, head_dim), k and v (..., kv_heads, head_dim)."""
        heads, kv_heads = self.num_heads_per_rank, self.num_heads_kv_per_rank
        q_dim, kv_dim = heads * self.head_dim, kv_heads * self.head_dim
        if self.cross_attn:
            q = self.Wq(x if subset is None else x[:, subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
        else:
            qkv = self.Wqkv(x)
            if self.dwconv and not self._kv_apart:
                qkv = _convolved(self.dwconv_qkv, qkv)
            q, kv = qkv.split((q_dim, 2 * kv_dim), dim=-1)
        if self.dwconv and self._kv_apart:
            q, kv = _convolved(self.dwconv_q, q), _convolved(self.dwconv_kv, kv)
        k, v = kv.split(kv_dim, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        return q, k, v

    def _options(self, q: Tensor, causal: bool | None = None) -> dict[str, Any]:
        """The options that calls with and without a cache share."""
        return {
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "softcap": self.softcap,
            "softmax_scale": self.softmax_scale,
            # Computed for each call, because model.half() would round a buffer.
            "alibi_slopes": self._slopes(q.device) if self.use_alibi else None,
        }

    def _slopes(self, device: torch.device) -> Tensor:
        """ALiBi's slopes of this process's heads."""
        slopes = alibi_slopes(self.num_heads, device)
        if self.process_group is None:
            return slopes
        group_size, world = self.num_heads // self.num_heads_kv, self.process_group.size()
        parts = (get_dim_for_local_rank(self.num_heads_kv, world, rank) for rank in range(world))
        return slopes.split([group_size * part for part in parts])[self.process_group.rank()]

    def _rotate(
        self, q: Tensor, k: Tensor, packing: Packing, packing_k: Packing
    ) -> tuple[Tensor, Tensor]:
        """Apply RoPE to q and k for the positions in their sequences."""
        if self.rotary_emb is None:
            return q, k
        layout = current_layout.get()
        if layout is not None:
            of_q, of_k = self._angles(q, layout.longest)
            positions = layout.positions_on(q.device)
            return _rotated_rows(q, positions, *of_q), _rotated_rows(k, positions, *of_k)
        longest = max(
            x.shape[1] if lengths["max_seqlen"] is None else lengths["max_seqlen"]
            for x, lengths in ((q, packing), (k, packing_k))
        )
        of_q, of_k = self._angles(q, longest)
        return apply_rotary_emb(q, *of_q, **packing), apply_rotary_emb(k, *of_k, **packing_k)

    def _angles(self, q: Tensor, length: int) -> tuple[Angles, Angles]:
        """(cos, sin, interleaved) for queries and for keys, of positions below `length`."""
        rotary = cast(RotaryEmbedding, self.rotary_emb)
        # Rounding a cosine to 16 bits would cause as large an error as rounding the result.
        dtype = torch.promote_types(q.dtype, torch.float32)
        cos, sin, cos_k, sin_k = rotary.tables(length, q.device, dtype)
        of_q = cos, sin, rotary.interleaved
        return of_q, of_q if cos_k is None or sin_k is None else (cos_k, sin_k, rotary.interleaved)

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, cached: InferenceParams) -> Tensor:
        """Append k and v to the layer's cache, then attend to all tokens in it."""
        if self.cross_attn or not self.causal or self.layer_idx is None or q.dim() != 4:
            raise ValueError(
                "inference_params: the cache is for causal self-attention of (batch, seq, "
                "embed_dim) in a layer that has a layer_idx; got "
                f"cross_attn={self.cross_attn}, causal={self.causal}, layer_idx={self.layer_idx}, "
                f"x with {q.dim() - 1} dimensions"
            )
        if self.rotary_emb is not None:
            of_q, of_k = self._angles(q, cached.max_seqlen)
            q = apply_rotary_emb(q, *of_q, seqlen_offsets=cached.lengths)
            k = apply_rotary_emb(k, *of_k, seqlen_offsets=cached.lengths)
        k_cache, v_cache = cached.cache(self.layer_idx, k)
        out = attention_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=cached.lengths, **self._options(q)
        )
        return cast(Tensor, out)


class ParallelMHA(MHA):
    """Self-attention of which each process of a group computes some of the heads.

    Args:
        process_group: of torch.distributed.
        sequence_parallel: x and the result are this process's part of the rows, that is of the
            first dimension; if not, all processes have all of them.

    The other arguments are those of `MHA`, over all processes.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        process_group: Group,
        num_heads_kv: int | None = None,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: WindowSize = (-1, -1),
        use_flash_attn: bool = False,
        checkpointing: bool = False,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        given = locals()
        shared = inspect.signature(MHA).parameters.keys() & given.keys()  # in another order there
        super().__init__(**{name: given[name] for name in shared}, **options)

    def forward(  # type: ignore[override]  # flash_attn's order
        self,
        x: Tensor,
        seqlen: int | None = None,
        inference_params: InferenceParams | None = None,
        **options: Any,
    ) -> Any:
        """`MHA.forward`; the result has the shape of x."""
        return super().forward(x, inference_params=inference_params, seqlen=seqlen, **options)


def _dwconv(features: int, where: dict[str, Any]) -> nn.Conv1d:
    """A convolution of each feature by itself over three tokens."""
    return nn.Conv1d(features, features, kernel_size=3, padding=2, groups=features, **where)


def _convolved(conv: nn.Module, x: Tensor) -> Tensor:
    """x (batch, seq, features), each token with the two before it; the last two results of `conv`
    are of positions after the sequence."""
    return conv(x.transpose(1, 2))[..., :-2].transpose(1, 2)


def _rotated_rows(
    x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    """x rotated for rows that stand at any `positions` (rows,)."""
    batch = x if x.dim() == 4 else x.unsqueeze(0)
    return apply_rotary_emb(batch, cos[positions], sin[positions], interleaved).view_as(x)


def _padding(mask: Tensor | None, causal_queries: int | None = None) -> dict[str, Any]:
    """Options of `flash_attend` that hide padding keys.

    With `causal_queries`, the number of queries of causal cross-attention, the diagonal ends at
    the number of keys that take part, not at the number of keys.
    """
    if mask is None:
        return {}
    if causal_queries is None:
        return {"key_padding_mask": mask}
    row = torch.arange(causal_queries, device=mask.device).unsqueeze(-1)
    column = torch.arange(mask.shape[-1], device=mask.device)
    last = row + mask.sum(-1).view(-1, 1, 1, 1) - causal_queries  # (batch, 1, seq_q, 1)
    return {"attn_mask": (column <= last) & mask[:, None, None, :], "causal": False}


def _head_dim(embed_dim: int, num_heads: int, num_heads_kv: int, head_dim: int | None) -> int:
    """The head dim; raises ValueError if the numbers do not fit together."""
    for name, heads in (("num_heads", num_heads), ("num_heads_kv", num_heads_kv)):
        if heads < 1:
            raise ValueError(f"{name}: must be positive, got {heads}")
    if num_heads % num_heads_kv:
        raise ValueError(f"num_heads_kv: {num_heads_kv} does not divide num_heads {num_heads}")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(
            f"num_heads: {num_heads} does not divide embed_dim {embed_dim}; pass head_dim"
        )
    return embed_dim // num_heads if head_dim is None else head_dim


def _packing(
    x: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, of_keys: str = ""
) -> Packing:
    """`cu_seqlens` and `max_seqlen` of x (..., heads, head_dim) as keywords; both None if dense."""
    packed = cu_seqlens is not None
    if packed != (max_seqlen is not None):
        raise ValueError(f"cu_seqlens{of_keys}, max_seqlen{of_keys}: pass both or none")
    layout = current_layout.get()
    if layout is not None and not packed:
        packed = not layout.sequences
    if x.dim() != (3 if packed else 4):
        wanted = "(total, embed_dim)" if packed else "(batch, seq, embed_dim)"
        raise ValueError(
            f"x{of_keys and '_kv'}: expected {wanted} {'with' if packed else 'without'} "
            f"cu_seqlens{of_keys}, got {x.dim() - 1} dimensions"
        )
    return {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
