"""The layers of `flashtile.modules` written out in plain PyTorch, with the same parameters.

They build the whole score matrix, repeat key heads and rotate with complex numbers: slow, and
independent of the implementation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rounded_results import floors
from torch import Tensor, nn

from flashtile.testing import assert_close

DTYPES = (torch.float64, torch.float32)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    softmax_scale: float | None = None,
    slopes: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """q (batch, seq_q, heads, head_dim), k and v (batch, seq_k, kv_heads, head_dim), keep (batch,
    seq_k)."""
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(groups, dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = scores.shape[-2:]
    behind = torch.arange(rows).unsqueeze(1) + columns - rows - torch.arange(columns)
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype).view(-1, 1, 1) * behind.abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if left >= 0:
        hidden |= behind > left
    if right >= 0:
        hidden |= behind < -right
    if keep is not None:
        hidden = hidden | ~keep[:, None, None]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).nan_to_num()
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def plain_rotation(x: Tensor, dim: int, base: float, interleaved: bool) -> Tensor:
    """x (batch, seq, heads, head_dim), its first `dim` features rotated by the positions."""
    frequency = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    angle = torch.outer(torch.arange(x.shape[1]).float(), frequency)
    rotation = torch.complex(angle.cos().to(x.dtype), angle.sin().to(x.dtype)).unsqueeze(1)
    first, second = slice(0, dim // 2), slice(dim // 2, dim)
    if interleaved:
        first, second = slice(0, dim, 2), slice(1, dim, 2)
    rotated = torch.complex(x[..., first], x[..., second]) * rotation
    result = x.clone()
    result[..., first], result[..., second] = rotated.real, rotated.imag
    return result


def plain_slopes(heads: int) -> Tensor:
    """ALiBi's slopes as the paper's code makes them."""
    n = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    between = [2 ** (-8 * (i + 1) / (2 * n)) for i in range(0, 2 * n, 2)]
    return torch.tensor((slopes + between)[:heads])


def plain_dwconv(conv: nn.Module, x: Tensor) -> Tensor:
    """x (batch, seq, features), each token with the two before it."""
    before = F.pad(x, (0, 0, 2, 0))
    terms = (before[:, i : i + x.shape[1]] * conv.weight[:, 0, i] for i in range(3))
    return sum(terms) + conv.bias


def plain_mha(
    mha: nn.Module, x: Tensor, x_kv: Tensor | None = None, keep: Tensor | None = None
) -> Tensor:
    """`MHA` in evaluation mode, on dense sequences."""
    heads, kv_heads, head_dim = mha.num_heads, mha.num_heads_kv, mha.head_dim
    if x_kv is None:
        qkv = mha.Wqkv(x)
        if hasattr(mha, "dwconv_qkv"):
            qkv = plain_dwconv(mha.dwconv_qkv, qkv)
        q, kv = qkv[..., : heads * head_dim], qkv[..., heads * head_dim :]
    else:
        q, kv = mha.Wq(x), mha.Wkv(x_kv)
    if hasattr(mha, "dwconv_q"):
        q, kv = plain_dwconv(mha.dwconv_q, q), plain_dwconv(mha.dwconv_kv, kv)
    k, v = kv[..., : kv_heads * head_dim], kv[..., kv_heads * head_dim :]
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in (q, k, v))
    if mha.rotary_emb is not None:
        rotary = mha.rotary_emb
        q = plain_rotation(q, rotary.dim, rotary.base, rotary.interleaved)
        k = plain_rotation(k, rotary.dim, rotary.base, rotary.interleaved)
    out = plain_attention(
        q,
        k,
        v,
        causal=mha.causal,
        window_size=mha.window_size,
        softcap=mha.softcap,
        softmax_scale=mha.softmax_scale,
        slopes=plain_slopes(heads) if mha.use_alibi else None,
        keep=keep,
    )
    return mha.out_proj(out.flatten(2))


def plain_block(block: nn.Module, x: Tensor, *others: Tensor) -> Tensor:
    """What `Block` and `ParallelBlock` return, stacked, around `MHA` and an MLP.

    `others` are the second branch of a parallel block, and the stream. The sum of the results is
    the input of the next layer if there is no dropout.
    """

    def drop1(branch: Tensor) -> Tensor:
        return getattr(block, "drop_path1", nn.Identity())(block.dropout1(branch))

    def drop2(branch: Tensor) -> Tensor:
        return getattr(block, "drop_path2", nn.Identity())(block.dropout2(branch))

    if not hasattr(block, "prenorm"):
        x = drop1(x) + sum(others[1:])
        x = x + (drop2(others[0]) if others else 0)
        read = block.norm1(x) if block.tied_norm else block.norm2(x)
        return torch.stack((plain_mha(block.mixer, block.norm1(x)), block.mlp(read), x))
    if block.prenorm:
        x = drop1(x) + sum(others)
        x = x + drop2(plain_mha(block.mixer, block.norm1(x)))
        return torch.stack((block.mlp(block.norm2(x)), x))
    x = block.norm1(x + drop1(plain_mha(block.mixer, x)))
    return block.norm2(x + drop2(block.mlp(x)))


def check_against_plain(
    module: nn.Module,
    plain: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    call: Callable[..., Tensor] | None = None,
) -> None:
    """Compare result and gradients of module(*inputs), computed in float64 and in float32, with
    plain(module, *inputs) in float64.

    Args:
        module: in any dtype; copied.
        plain: the same in plain PyTorch.
        inputs: floating tensors.
        call: as call(module, *inputs) instead of the module itself.
    """
    seed = torch.initial_seed()
    run = call or (lambda module, *inputs: module(*inputs))
    truth, low = (_outcome(plain, module, inputs, dtype) for dtype in DTYPES)
    floor = floors(lambda: _outcome(plain, module, inputs, torch.float64), truth, seed)
    for dtype in DTYPES:
        got = _outcome(run, module, inputs, dtype)
        assert got.keys() == truth.keys()
        for name, result in got.items():
            assert result.dtype == dtype
            least = floor[name] * torch.finfo(dtype).eps
            assert_close(name, result, truth[name], low[name], floor=least, seed=seed)


def _outcome(
    run: Callable[..., Tensor], module: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The result of run(module, *inputs) in `dtype`, and the gradients of a fixed sum of it."""
    module = copy.deepcopy(module).to(dtype)
    inputs = tuple(x.detach().to(dtype).requires_grad_() for x in inputs)
    out = run(module, *inputs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).cos().view(out.shape)
    (out * weight.to(dtype)).sum().backward()
    gradients = {f"d{name}": parameter.grad for name, parameter in module.named_parameters()}
    gradients |= {f"d input {i}": x.grad for i, x in enumerate(inputs)}
    assert all(gradient is not None for gradient in gradients.values())
    return {"out": out.detach(), **gradients}


def gelu_mlp(mlp: nn.Module, x: Tensor) -> Tensor:
    """`Mlp` with GELU."""
    hidden = x @ mlp.fc1.weight.t() + mlp.fc1.bias
    return F.linear(0.5 * hidden * (1 + torch.erf(hidden / 2**0.5)), mlp.fc2.weight, mlp.fc2.bias)
