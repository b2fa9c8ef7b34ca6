"""Make flashtile an attention backend of diffusers.

::

    from flashtile.integrations import diffusers as flashtile_diffusers

    pipe.transformer.set_attention_backend(flashtile_diffusers.register())

or, for calls within a block, ``with diffusers.attention_backend("flashtile")``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .sdpa import scaled_dot_product_attention

NAME = "flashtile"


def register() -> str:
    """Make flashtile a backend of ``diffusers.models.attention_dispatch``.

    Returns:
        "flashtile", the name to pass to ``set_attention_backend`` or ``attention_backend``. No
        model uses flashtile before one of these calls.

    Raises:
        ImportError: diffusers is missing, or this version cannot choose attention backends.
    """
    try:
        from diffusers.models import attention_dispatch
    except ImportError as error:
        raise ImportError(
            f"diffusers.models.attention_dispatch: {error}; want diffusers 0.42 or newer, or use "
            "flashtile.integrations.sdpa.install()"
        ) from error
    backends = attention_dispatch.AttentionBackendName
    if NAME not in backends._value2member_map_:
        _add_member(backends)
        attention_dispatch._AttentionBackendRegistry.register(
            backends(NAME),
            constraints=[attention_dispatch._check_device, attention_dispatch._check_shape],
        )(attend)
    return NAME


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """The function that diffusers calls, with the arguments of its native backend.

    Args:
        query: (batch, seq_q, heads, head_dim).
        key, value: (batch, seq_k, kv_heads, head_dim).
        attn_mask: as in `sdpa.scaled_dot_product_attention`, or (batch, seq_k).
        dropout_p, is_causal, scale, enable_gqa: as in `sdpa.scaled_dot_product_attention`.

    Returns:
        (batch, seq_q, heads, value_head_dim).

    Raises:
        NotImplementedError: `return_lse` is True, or context parallelism is requested.
    """
    if return_lse:
        raise NotImplementedError("return_lse: got True, want False with the backend flashtile")
    if _parallel_config is not None:
        raise NotImplementedError(
            "parallel_config: got one, want None; the backend flashtile has no context parallelism"
        )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(
        q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa
    ).transpose(1, 2)


def _add_member(names: Any) -> None:
    """Add a member to diffusers' enumeration of backends; diffusers offers no public way."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_map_[member._name_] = member
    names._member_names_.append(member._name_)
    names._value2member_map_[NAME] = member
