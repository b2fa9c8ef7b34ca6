"""PyTorch's ``scaled_dot_product_attention`` with the same signature and meaning, computed by
flashtile.

::

    from flashtile.integrations import sdpa

    out = sdpa.scaled_dot_product_attention(query, key, value, is_causal=True)
    sdpa.install()  # replace torch.nn.functional.scaled_dot_product_attention from here on
    with sdpa.install():  # or inside a block
        model(inputs)

As in PyTorch, and unlike in `flashtile.attention`, the layout is (..., heads, seq, head_dim) and
the causal mask starts in the top-left corner.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias, CausalVariant

from ..api import attention
from ..call import checks
from ..call.converted_masks import options_of
from . import nested

__all__ = ["Installation", "install", "scaled_dot_product_attention", "uninstall"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Tensor | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(scale * query key^T + attn_mask) value``, like
    ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: (..., heads, seq_q, head_dim); the leading dimensions broadcast, and may be absent.
            Alternatively query, key and value are jagged nested tensors (batch, heads, seq,
            head_dim).
        key: (..., heads, seq_k, head_dim).
        value: (..., heads, seq_k, value_head_dim).
        attn_mask: broadcasts to (..., heads, seq_q, seq_k). Bool: True where a query sees a key.
            Floating: added to the scores; has a gradient. May also be causal_upper_left or
            causal_lower_right of ``torch.nn.attention.bias``.
        dropout_p: rate in [0, 1] at which attention probabilities are dropped, also in evaluation
            mode.
        is_causal: query i sees the keys ``j <= i`` (top-left corner), whatever the lengths.
        scale: factor on the scores; ``head_dim ** -0.5`` by default. The host reads a tensor.
        enable_gqa: key and value may have fewer heads; their number divides the query's.

    Returns:
        (..., heads, seq_q, value_head_dim) in the query's dtype. A query that sees no key gets 0.
        While `torch.onnx.export` traces it, PyTorch's own function makes the result.

    Raises:
        ValueError, TypeError: an argument does not fit; the message names it.
        NotImplementedError: no backend can run the call; the message lists each with its reasons.
    """
    if isinstance(scale, Tensor) and scale.dim() == 0:  # PyTorch reads it, too, without a gradient
        scale = scale.item()
    scale = cast("float | None", scale)
    if torch.onnx.is_in_onnx_export():  # ONNX has an operator for PyTorch's function only
        return torch._C._nn.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    _count_call()
    if any(x.is_nested for x in (query, key, value)):
        return nested.attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, want (..., seq, head_dim)")
    if attn_mask is not None:
        checks.tensor("attn_mask", attn_mask)
    is_causal = checks.flag("is_causal", is_causal)
    enable_gqa = checks.flag("enable_gqa", enable_gqa)
    if isinstance(attn_mask, CausalBias):
        return _with_causal_bias(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    M, N = query.shape[-2], key.shape[-2]
    if value.shape[-2] != N:
        raise ValueError(f"value: got {value.shape[-2]} rows, want {N}, as many as key")
    sizes = M, N
    if is_causal:  # no query sees keys from M on; dropping them makes M >= N
        N = min(M, N)
        key, value = key[..., :N, :], value[..., :N, :]

    leading, q, k, v = _four_dimensional(query, key, value, attn_mask, enable_gqa)
    options: dict[str, Any] = {}
    if attn_mask is not None:
        options = _mask_options(attn_mask, leading, sizes, N)
    if is_causal:  # top-left means j <= i, and a window ends at i + N - M + right
        options["window_size"] = (-1, M - N)
    drop_all = dropout_p == 1.0  # PyTorch allows it: the result is 0, with zero gradients
    dropout_p = 0.0 if drop_all else dropout_p
    out = cast(Tensor, attention(q, k, v, softmax_scale=scale, dropout_p=dropout_p, **options))
    out = out.transpose(1, 2).reshape(*leading, M, v.shape[-1])
    return torch.dropout(out, 1.0, True) if drop_all else out


def _with_causal_bias(
    query: Tensor, key: Tensor, value: Tensor, bias: CausalBias, *options: Any
) -> Tensor:
    """Attention with ``torch.nn.attention.bias.causal_upper_left`` or ``causal_lower_right``."""
    dropout_p, is_causal, scale, enable_gqa = options
    sizes = query.shape[-2], key.shape[-2]
    if is_causal:
        raise ValueError("attn_mask: got a CausalBias and is_causal=True, want one of them")
    if sizes != (bias.seq_len_q, bias.seq_len_kv):
        raise ValueError(
            f"attn_mask: got a CausalBias of {(bias.seq_len_q, bias.seq_len_kv)}, want {sizes}"
        )
    upper_left = bias.variant == CausalVariant.UPPER_LEFT
    mask = None if upper_left else bias._materialize(query.device)
    return scaled_dot_product_attention(
        query, key, value, mask, dropout_p, upper_left, scale, enable_gqa
    )


class Installation:
    """The result of `install`: active until `uninstall`, or until the end of its ``with`` block.

    Attributes:
        calls: the number of calls of `scaled_dot_product_attention` since `install`, in all
            threads. Calls inside a compiled graph are not counted.
    """

    def __init__(self, strict: bool) -> None:
        self._effects = [_replaced, *([_softmax_refused] if strict else [])]
        self.calls = 0
        with _lock:
            for effect in self._effects:
                effect.start()
            _installed.append(self)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: object) -> None:
        self._remove()

    def _remove(self) -> None:
        with _lock:
            if self in _installed:
                _installed.remove(self)
                for effect in self._effects:
                    effect.stop()


_lock = threading.Lock()
_installed: list[Installation] = []


def install(*, strict: bool = False) -> Installation:
    """Replace ``torch.nn.functional.scaled_dot_product_attention`` with this module's function.

    ::

        sdpa.install()  # from here on
        with sdpa.install() as installation:  # or inside a block
            model(inputs)
        print(installation.calls)

    It affects code that looks the function up in ``torch.nn.functional`` at each call, as models
    do. A name that was imported from there before keeps its old value. `install` also switches off
    the fast paths of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer``, which do not
    call the function (``torch.backends.mha.set_fastpath_enabled``); ``nn.MultiheadAttention`` still
    takes nested tensors, which it then pads. It applies to all threads. Blocks nest, and leaving
    the outermost one restores the previous state, also after an exception.

    Args:
        strict: raise a RuntimeError that names the module when an attention module computes a
            softmax itself instead of calling this function; for example ``nn.MultiheadAttention``
            with ``need_weights=True``. Compiled graphs are not checked.

    Returns:
        The installation: a context manager that counts the calls.
    """
    return Installation(strict)


def uninstall() -> None:
    """Undo every active `install`."""
    for installation in list(_installed):
        installation._remove()


@contextmanager
def _replacing() -> Iterator[None]:
    functional, fast_paths = torch.nn.functional, torch.backends.mha
    module: Any = torch.nn.MultiheadAttention  # Any, because its method is replaced
    previous = functional.scaled_dot_product_attention, module.forward
    had_fast_paths = fast_paths.get_fastpath_enabled()
    functional.scaled_dot_product_attention = scaled_dot_product_attention
    module.forward = nested.accepting_nested(module.forward)
    fast_paths.set_fastpath_enabled(False)
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, module.forward = previous
        fast_paths.set_fastpath_enabled(had_fast_paths)


class _SharedEffect:
    """A context from `make`, which the first user enters and the last user leaves.

    Callers must hold a lock.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._users = 0
        self._context: AbstractContextManager[None] | None = None

    def start(self) -> None:
        """Add a user."""
        if self._context is None:
            context = self._make()
            context.__enter__()
            self._context = context
        self._users += 1

    def stop(self) -> None:
        """Remove a user."""
        self._users -= 1
        if self._users == 0 and self._context is not None:
            context, self._context = self._context, None
            context.__exit__(None, None, None)


_replaced = _SharedEffect(_replacing)


def _count_call() -> None:
    if _installed and not torch.compiler.is_compiling():
        with _lock:
            for installation in _installed:
                installation.calls += 1


def _four_dimensional(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """The leading dimensions of the result, and q, k, v as (batch, seq, heads, head_dim), where
    all leading dimensions but the heads are folded into the batch.
    """
    inputs = [query, key, value]
    shaped = inputs if attn_mask is None else [*inputs, attn_mask]
    batch = torch.broadcast_shapes(*(x.shape[:-3] for x in shaped))
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in inputs]
    Hq = heads[0] if enable_gqa else max(heads)
    if any(H < 1 or (Hq % H if enable_gqa else H != 1 and Hq != H) for H in heads):
        wanted = "that divide the query's" if enable_gqa else "equal or 1 (or enable_gqa=True)"
        raise ValueError(f"query, key, value: got {heads} heads, want numbers {wanted}")
    if heads[1] != heads[2]:  # `attention` wants as many heads of v as of k, PyTorch does not
        heads[1:] = [Hq, Hq]
    heads[0] = Hq
    q, k, v = (
        _folded(_with_heads(x, H), batch).transpose(1, 2)
        for x, H in zip(inputs, heads, strict=True)
    )
    has_heads = any(x.dim() > 2 for x in shaped)
    return (*batch, Hq) if has_heads else (), q, k, v


def _with_heads(x: Tensor, H: int) -> Tensor:
    """`x` (..., seq, head_dim) with `H` heads; each head is repeated as often as needed."""
    x = x if x.dim() > 2 else x[None]
    return x if x.shape[-3] == H else x.repeat_interleave(H // x.shape[-3], dim=-3)


def _folded(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """Broadcast `x` (..., a, b, c) to the leading dimensions `batch` and fold these into one."""
    x = x.expand(*batch, *x.shape[-3:])
    return x.flatten(0, -4) if batch else x[None]


def _mask_options(
    attn_mask: Tensor, leading: tuple[int, ...], sizes: tuple[int, int], N: int
) -> dict[str, Any]:
    """Convert the first `N` columns of `attn_mask` to an option of `attention`, folded to four
    dimensions like the inputs; `sizes` are the lengths of the queries and keys that it must fit.
    """
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(
            f"attn_mask: got dtype {attn_mask.dtype}, want torch.bool or a floating dtype"
        )
    wanted = (*(leading or (1,)), *sizes)
    mask = attn_mask[(None,) * max(0, 3 - attn_mask.dim())]
    aligned = wanted[len(wanted) - mask.dim() :]
    if not checks.broadcasts_to(mask.shape, aligned):
        raise ValueError(
            f"attn_mask: got shape {tuple(attn_mask.shape)}, want one that broadcasts to {wanted}"
        )
    mask = mask[..., :N] if sizes[1] > N else mask
    shared = all(size == 1 for size in mask.shape[:-3])
    mask = mask.reshape(1, *mask.shape[-3:]) if shared else _folded(mask, leading[:-1])
    return options_of(mask, sizes[0], N) if mask.dtype == torch.bool else {"bias": mask}


# ``install(strict=True)`` detects modules that compute attention without
# `scaled_dot_product_attention`: a softmax that such a module calls raises an error. A module
# counts as attention if the name of its class, or its own name in the model, matches.
_ATTENTION = re.compile("att(entio)?n|mha", re.IGNORECASE)
_HINTS: dict[type[nn.Module], str] = {nn.MultiheadAttention: "; call it with need_weights=False"}


@contextmanager
def _refusing() -> Iterator[None]:
    """Make every softmax function of PyTorch check its caller first."""
    functional = torch.nn.functional
    previous = functional.softmax, torch.softmax
    functional.softmax = _checking(previous[0])
    torch.softmax = _checking(previous[1])
    # torch.Tensor inherits the method, so deleting our attribute restores it.
    torch.Tensor.softmax = _checking(  # type: ignore[method-assign]  # mypy allows no replacement
        torch.Tensor.softmax
    )
    try:
        yield
    finally:
        functional.softmax, torch.softmax = previous
        del torch.Tensor.softmax


_softmax_refused = _SharedEffect(_refusing)


def _checking(softmax: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(softmax)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _refuse_attention(sys._getframe(1))
        return softmax(*args, **kwargs)

    return checked


def _refuse_attention(frame: FrameType) -> None:
    modules = list(calling_modules(frame))
    if not modules:
        return
    inner, outer = modules[0], modules[-1]
    path = next((name for name, module in outer.named_modules() if module is inner), "")
    if _ATTENTION.search(type(inner).__name__) or _ATTENTION.search(path.rpartition(".")[2]):
        named = f"{path} ({type(inner).__name__})" if path else type(inner).__name__
        raise RuntimeError(
            f"sdpa.install(strict=True): {named} computes attention with its own softmax instead "
            f"of scaled_dot_product_attention{_HINTS.get(type(inner), '')}"
        )


def calling_modules(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose methods are running, innermost first."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and not isinstance(module, nn.Softmax):
            yield module
        frame = frame.f_back
