"""Rotary position embedding (RoPE) and XPos, with the names and signatures of
``flash_attn.layers.rotary``.

Each pair of features (a, b) of the token at position m is rotated by the angle m * theta:

    a' = a cos(m theta) - b sin(m theta)
    b' = a sin(m theta) + b cos(m theta)

so that the score of a query at m and a key at n depends on the positions only through m - n
(RoFormer, Su et al. 2021, https://arxiv.org/abs/2104.09864, equation 34). A pair is one feature
from each half of the rotated dimensions (GPT-NeoX style), or two neighbours if ``interleaved``
(GPT-J style).

Inputs may be float16, bfloat16, float32 or float64; 16-bit inputs are rotated in float32.
`ops/rotary` holds the formula in plain PyTorch, and the kernel that computes it on a GPU. The host
never reads lengths and offsets that are tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..autocast import without_autocast
from ..call import checks
from ..ops.rotary import rotate, rotate_in_place
from ..ops.rotary.formula import Angles

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


@without_autocast
def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate every pair (a, b) in the last dimension of x (..., R) by 90 degrees: (-b, a).

    A pair is (2i, 2i + 1) if interleaved, else (i, i + R / 2). ValueError if R is odd.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x: the last dimension must be even, got shape {tuple(x.shape)}")
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


@without_autocast
def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """The formula in plain PyTorch, in the dtype to which PyTorch promotes its arguments.

    `apply_rotary_emb` is more exact in 16 bits, and supports offsets and packed sequences.

    Args:
        x: (batch, seq, heads, head_dim); features beyond rotary_dim are passed through.
        cos, sin: (seq, rotary_dim / 2) or (batch, seq, rotary_dim / 2).
        interleaved: as in `apply_rotary_emb`.
    """
    check_rotary_dim("cos", cos, x.shape[-1])
    rotary_dim = 2 * cos.shape[-1]

    def per_feature(table: Tensor) -> Tensor:
        pairs = table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)
        return pairs.unsqueeze(-2)  # every head is rotated by the same angle

    head, tail = x[..., :rotary_dim], x[..., rotary_dim:]
    rotated = head * per_feature(cos) + rotate_half(head, interleaved) * per_feature(sin)
    return torch.cat((rotated, tail), dim=-1)


class RotaryTables(NamedTuple):
    """Cosines and sines, (positions, dim / 2); `cos_k` and `sin_k` are None if the keys use the
    same tables as the queries.
    """

    cos: Tensor
    sin: Tensor
    cos_k: Tensor | None = None
    sin_k: Tensor | None = None

    def fit(self, length: int, device: torch.device | None, dtype: torch.dtype | None) -> bool:
        """Whether they cover `length` positions, on that device and in that dtype."""
        return length <= self.cos.shape[0] and self.cos.device == device and self.cos.dtype == dtype


def frequencies(dim: int, base: float, device: torch.device | str | None = None) -> Tensor:
    """base ** (-2 i / dim), (dim / 2,) float32."""
    even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
    return 1.0 / base ** (even / dim)


def xpos_scale(dim: int, device: torch.device | str | None = None) -> Tensor:
    """XPos's zeta, (dim / 2,) float32."""
    even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
    return (even + 0.4 * dim) / (1.4 * dim)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first rotary_dim features of x by the angles of their positions.

    Row t of sequence b is at position t + seqlen_offsets[b]. A position outside of the table is an
    error; where offsets and lengths in tensors are not read (on a GPU, without FLASHTILE_CHECK=1),
    such a row stays unchanged. Rows of a packed x after its last sequence stay unchanged, too.

    Args:
        x: (batch, seq, heads, head_dim), or (total, heads, head_dim) with cu_seqlens.
        cos, sin: (table_len, rotary_dim / 2) of any floating dtype, rotary_dim <= head_dim.
        interleaved: a pair is (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        inplace: write into the memory of x. Use the returned tensor afterwards: if x requires a
            gradient and is a leaf, or a result of `split`, `chunk` or `unbind`, only the returned
            tensor records the rotation. For a leaf, a compiled graph returns a second tensor with
            its own memory.
        seqlen_offsets: the position of each sequence's first row: int, or (batch,) int32 or int64.
        cu_seqlens: (batch + 1,) int32 or int64, cumulative lengths of packed sequences, 0 first.
        max_seqlen: upper bound of the packed lengths, needed with cu_seqlens.

    Returns:
        The shape and dtype of x. The backward rotates by the opposite angle and keeps no copy of x.
        cos and sin get gradients too if they require them.

    Raises:
        ValueError: shapes or devices do not fit together, or a table is too short.
        TypeError: an argument has a wrong dtype or type.
    """
    layout = "batch, seq, heads, head_dim" if cu_seqlens is None else "total, heads, head_dim"
    check_layout("x", x, layout)
    interleaved, inplace = checks.flag("interleaved", interleaved), checks.flag("inplace", inplace)
    angles = _angles(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    if not inplace:
        return rotate(x, angles, interleaved)
    return _in_place((x, lambda memory: rotate_in_place(memory, angles, interleaved)))[0]


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k in place inside one tensor that also holds v, which is returned. Errors are
    those of `apply_rotary_emb`, before anything is written.

    Args:
        qkv: (batch, seq, 3, heads, head_dim), or (batch, seq, heads_q + 2 * heads_k, head_dim) with
            num_heads_q. Use the returned tensor afterwards, as with `apply_rotary_emb`.
        cos, sin: (table_len, rotary_dim / 2).
        cos_k, sin_k: separate tables for k, as for XPos; those of q by default.
        interleaved, seqlen_offsets: as in `apply_rotary_emb`.
        num_heads_q: number of query heads in the four-dimensional layout.
    """
    q, k = _q_and_k(qkv, num_heads_q)
    interleaved = checks.flag("interleaved", interleaved)
    angles = _angles(q, cos, sin, seqlen_offsets)
    if cos_k is None and sin_k is None:
        angles_k = angles
    else:
        cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        angles_k = _angles(k, cos_k, sin_k, seqlen_offsets, suffix="_k")

    def rotate_q_and_k(memory: Tensor) -> None:
        q, k = _q_and_k(memory, num_heads_q)
        rotate_in_place(q, angles, interleaved)
        rotate_in_place(k, angles_k, interleaved)

    return _in_place((qkv, rotate_q_and_k))[0]


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """`apply_rotary_emb_qkv_` of keys and values.

    Args:
        kv: (batch, seq, 2, heads, head_dim). Use the returned tensor afterwards.
        cos, sin, interleaved, seqlen_offsets: as in `apply_rotary_emb`.
    """
    check_layout("kv", kv, "batch, seq, 2, heads, head_dim")
    interleaved = checks.flag("interleaved", interleaved)
    angles = _angles(kv[:, :, 0], cos, sin, seqlen_offsets)
    return _in_place((kv, lambda kv: rotate_in_place(kv[:, :, 0], angles, interleaved)))[0]


def _cached(table: str) -> property:
    """One of a layer's tables; None before it has computed them."""
    return property(lambda layer: getattr(layer._tables, table, None))


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding that computes, caches and grows its own tables; with scale_base it is XPos.

    The frequencies are theta_i = base ** (-2 i / dim). The tables are computed in float32 and then
    cast to the dtype of the input. XPos (Sun et al. 2022, https://arxiv.org/abs/2212.10554)
    multiplies q and divides k by zeta_i ** ((m - c) / scale_base), zeta_i = (2 i / dim + 0.4) /
    1.4, so the scores of distant keys decay. c is the middle of the table, so tables of different
    lengths cannot be mixed: when decoding with XPos, pass the same max_seqlen in every call.

    Args:
        dim: number of rotated features of each head (rotary_dim); ValueError unless it is positive
            and even.
        base: the longest wavelength is about 2 pi * base tokens.
        interleaved: as in `apply_rotary_emb`.
        scale_base: None for plain RoPE; 512 is usual for XPos.
        device: device of the buffers.
        pos_idx_in_fp32: changes no result: positions are in float32, as in flash_attn since 2.8.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
        *,
        pos_idx_in_fp32: bool = True,
    ) -> None:
        super().__init__()
        self.pos_idx_in_fp32 = pos_idx_in_fp32
        if dim <= 0 or dim % 2:
            raise ValueError(f"dim: must be positive and even, got {dim}")
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        scale = None if scale_base is None else xpos_scale(dim, device)
        self.register_buffer("inv_freq", frequencies(dim, self.base, device), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        # One attribute holds all tables, so that another thread never sees parts of two sets.
        self._tables: RotaryTables | None = None

    def tables(
        self, length: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> RotaryTables:
        """Tables of at least the first `length` positions; those of the last call are reused if
        they fit. They are computed in float32 and rounded to `dtype` once.
        """
        tables = self._tables
        if tables is None or not tables.fit(length, device, dtype):
            # Autograd cannot save tensors that were created in inference mode.
            with torch.inference_mode(False):
                tables = self._tables = self._computed(length, device, dtype)
        return tables

    def _computed(
        self, length: int, device: torch.device | None, dtype: torch.dtype | None
    ) -> RotaryTables:
        inv_freq, scale = self.inv_freq, self.scale
        # model.half() casts buffers too; a 16-bit frequency is radians off at far positions.
        if inv_freq.dtype != torch.float32:
            inv_freq = frequencies(self.dim, self.base)
            scale = None if scale is None else xpos_scale(self.dim)
        position = torch.arange(length, device=device, dtype=torch.float32)
        angle = torch.outer(position, inv_freq.to(device))
        cos, sin = angle.cos(), angle.sin()
        if scale is None or self.scale_base is None:
            return RotaryTables(cos.to(dtype), sin.to(dtype))
        distance = (position - length // 2) / self.scale_base
        growth = scale.to(device) ** distance.unsqueeze(-1)
        tables = (cos * growth, sin * growth, cos / growth, sin / growth)
        return RotaryTables(*(table.to(dtype) for table in tables))

    # The names that flash_attn's own layers use.

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.tables(seqlen, device, dtype)

    @property
    def _seq_len_cached(self) -> int:
        return 0 if self._tables is None else self._tables.cos.shape[0]

    _cos_cached, _sin_cached = _cached("cos"), _cached("sin")
    _cos_k_cached, _sin_k_cached = _cached("cos_k"), _cached("sin_k")

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate q and k in place; returns qkv, or (q, kv). Errors are those of `apply_rotary_emb`.

        Args:
            qkv: as in `apply_rotary_emb_qkv_`; with kv only q, (batch, seq, heads, head_dim).
            kv: (batch, seq, 2, heads, head_dim), or None.
            seqlen_offset: position of the first row: int, or (batch,) int32 or int64.
            max_seqlen: length of the tables. The first call needs it if seqlen_offset is a tensor,
                because the host does not read tensors.
            num_heads_q: as in `apply_rotary_emb_qkv_`.
        """
        if kv is None:
            _q_and_k(qkv, num_heads_q)
        else:
            check_layout("qkv", qkv, "batch, seq, heads, head_dim")
            check_layout("kv", kv, "batch, seq, 2, heads, head_dim")
        if max_seqlen is None:
            max_seqlen = qkv.shape[1] if kv is None else max(qkv.shape[1], kv.shape[1])
            if not isinstance(seqlen_offset, Tensor):
                max_seqlen += seqlen_offset
            elif self._tables is None:
                raise ValueError("max_seqlen: needed when seqlen_offset is a tensor, got None")
            else:
                max_seqlen = max(max_seqlen, self._seq_len_cached)
        cos, sin, cos_k, sin_k = self.tables(max_seqlen, qkv.device, qkv.dtype)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q
            )
        # Check q and kv before the first write.
        angles_q = _angles(qkv, cos, sin, seqlen_offset)
        if cos_k is not None and sin_k is not None:
            cos, sin = cos_k, sin_k
        angles_k = _angles(kv[:, :, 0], cos, sin, seqlen_offset)
        q, kv = _in_place(
            (qkv, lambda q: rotate_in_place(q, angles_q, self.interleaved)),
            (kv, lambda kv: rotate_in_place(kv[:, :, 0], angles_k, self.interleaved)),
        )
        return q, kv


def _in_place(*changes: tuple[Tensor, Callable[[Tensor], None]]) -> tuple[Tensor, ...]:
    """Let each change write to its tensor x, even if PyTorch forbids it because x is a leaf that
    requires a gradient, or a view of a function that returned several, such as `split`.

    For such an x, a second tensor on the same memory records the history. A compiled graph cannot
    return such an alias, so there the second tensor of a leaf has its own memory.
    """
    copies = []  # all before the first write, after which PyTorch forbids to use the other views
    for x, change in changes:
        is_recorded = x.requires_grad and torch.is_grad_enabled()
        copy = x.clone() if is_recorded and (x.is_leaf or _is_view_of_several(x)) else None
        copies.append(copy)
        if copy is not None:
            change(copy)
    return tuple(_written(x, change, y) for (x, change), y in zip(changes, copies, strict=True))


def _written(x: Tensor, change: Callable[[Tensor], None], changed: Tensor | None) -> Tensor:
    if changed is None:
        change(x)
        return x
    if torch.compiler.is_compiling():
        x.detach().copy_(changed.detach())
        return changed
    return x.detach().copy_(changed)


def _is_view_of_several(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or not x._is_view():
        return False
    return torch._C._autograd._get_creation_meta(x) != torch._C._autograd.CreationMeta.DEFAULT


def _angles(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    suffix: str = "",
) -> Angles:
    check_tables(x, cos, sin, suffix)
    seqlen = check_positions(x, seqlen_offsets, cu_seqlens, max_seqlen)
    first = 0 if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    if first + seqlen > cos.shape[0]:
        raise ValueError(
            f"cos{suffix}: got {cos.shape[0]} rows, want at least {first + seqlen} for {seqlen} "
            f"positions from {first}"
        )
    check_position_values(x, cos.shape[0], seqlen_offsets, cu_seqlens, max_seqlen, suffix)
    return Angles(cos, sin, seqlen_offsets, cu_seqlens)


def _q_and_k(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor]:
    """Views of q and k in qkv, (batch, seq, heads, head_dim)."""
    checks.tensor("qkv", qkv)
    if qkv.dim() != 4:
        check_layout("qkv", qkv, "batch, seq, 3, heads, head_dim")
        return qkv[:, :, 0], qkv[:, :, 1]
    heads = qkv.shape[2]
    if num_heads_q is None:
        raise ValueError(f"num_heads_q: needed with a qkv of four dimensions, {tuple(qkv.shape)}")
    if not 0 <= num_heads_q <= heads or (heads - num_heads_q) % 2:
        raise ValueError(
            f"num_heads_q: got {num_heads_q} of the {heads} heads of qkv {tuple(qkv.shape)}, which "
            f"leaves {heads - num_heads_q} for k and v; want an even number of at least 0"
        )
    check_layout("qkv", qkv, "batch, seq, heads_q + 2 * heads_k, head_dim")
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : (heads + num_heads_q) // 2]


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def check_layout(name: str, x: Tensor, layout: str) -> None:
    checks.tensor(name, x)
    sizes = layout.split(", ")
    fixed = [(i, int(size)) for i, size in enumerate(sizes) if size.isdigit()]
    if x.dim() != len(sizes) or any(x.shape[i] != size for i, size in fixed):
        raise ValueError(f"{name}: expected shape ({layout}), got {tuple(x.shape)}")
    _check_kind(name, x, _FLOATS, x.device)


def check_tables(x: Tensor, cos: Tensor, sin: Tensor, suffix: str) -> None:
    for name, table in ((f"cos{suffix}", cos), (f"sin{suffix}", sin)):
        checks.tensor(name, table)
        if table.dim() != 2 or table.shape != cos.shape:
            wanted = "(table_len, rotary_dim / 2), the same for cos and sin"
            raise ValueError(f"{name}: expected shape {wanted}, got {tuple(table.shape)}")
        _check_kind(name, table, _FLOATS, x.device)
    check_rotary_dim(f"cos{suffix}", cos, x.shape[-1])


def check_rotary_dim(name: str, table: Tensor, head_dim: int) -> None:
    if 2 * table.shape[-1] > head_dim:
        raise ValueError(
            f"{name}: got {table.shape[-1]} columns, which rotate {2 * table.shape[-1]} features "
            f"of a head, but head_dim is {head_dim}; want at most {head_dim // 2} columns"
        )


def check_positions(
    x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> int:
    """Check the positions and return the length of the longest sequence."""
    batch, seqlen = x.shape[:2]
    if cu_seqlens is not None:
        if max_seqlen is None:
            raise ValueError("max_seqlen: needed with cu_seqlens, got None")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"cu_seqlens: expected (batch + 1,), got {tuple(cu_seqlens.shape)}")
        _check_kind("cu_seqlens", cu_seqlens, _INTEGERS, x.device)
        batch, seqlen = cu_seqlens.shape[0] - 1, max_seqlen
    if isinstance(seqlen_offsets, Tensor):
        if seqlen_offsets.shape != (batch,):
            got = tuple(seqlen_offsets.shape)
            raise ValueError(f"seqlen_offsets: expected an int or shape ({batch},), got {got}")
        _check_kind("seqlen_offsets", seqlen_offsets, _INTEGERS, x.device)
    elif not isinstance(seqlen_offsets, (int, torch.SymInt)):
        raise TypeError(f"seqlen_offsets: expected an int or a tensor, got {seqlen_offsets!r}")
    elif seqlen_offsets < 0:
        raise ValueError(f"seqlen_offsets: must not be negative, got {seqlen_offsets}")
    return seqlen


def check_position_values(
    x: Tensor,
    rows: int,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    suffix: str,
) -> None:
    """Check that the tables of `rows` positions reach the tokens of every sequence."""
    if not checks.checking_values((x, seqlen_offsets, cu_seqlens)):
        return
    if cu_seqlens is None:
        lengths = [x.shape[1]] * x.shape[0]
    else:
        lengths = checks.cumulative_values("cu_seqlens", cu_seqlens, x.shape[0], "x")
        if max(lengths, default=0) > (max_seqlen or 0):
            raise ValueError(
                f"max_seqlen: got {max_seqlen}, want at least {max(lengths)}, the longest sequence "
                "of cu_seqlens"
            )
    if not isinstance(seqlen_offsets, Tensor):
        return
    firsts = seqlen_offsets.tolist()
    used = [(first, n) for first, n in zip(firsts, lengths, strict=True) if n > 0]
    if any(first < 0 or first + n > rows for first, n in used):
        raise ValueError(
            f"seqlen_offsets: got {firsts} for sequences of {lengths} tokens, want positions from "
            f"0 to {rows - 1}, the rows of cos{suffix}"
        )


def _check_kind(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected a dtype among {dtypes}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: is on {tensor.device}, but the input is on {device}")
