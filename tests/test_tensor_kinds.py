"""Tensors that are not plain memory: meta, fake, nested and sparse ones, subclasses and modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import flashtile
from flashtile import BlockMask, Spans
from flashtile.integrations import sdpa
from flashtile.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_qkv_
from flashtile.modules.mha import MHA
from flashtile.testing.inputs import generator, normal

Call = Callable[[], Any]


def calls(g: torch.Generator, device: str) -> dict[str, Call]:
    """Calls of every kind, their tensors on `device`."""

    def make(*shape: int) -> Tensor:
        return normal(g, *shape).to(device)

    def integers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cpu").to(device)

    q, k, v = make(2, 7, 4, 16), make(2, 9, 2, 16), make(2, 9, 2, 16)
    Q, K, V = (x.transpose(1, 2) for x in (q, k, v))
    packed, cu = make(7, 4, 16), integers(0, 3, 7)
    tables = make(16, 8), make(16, 8)
    visible = torch.ones(7, 9, dtype=torch.bool, device="cpu").tril(1).to(device)
    spans = [integers(*range(n, n + 7)).view(1, 1, 7, 1) for n in (-2, 3)]
    tiles = torch.ones(1, 1, dtype=torch.bool, device="cpu").to(device)

    def cached(**options: Any) -> Any:
        caches = [torch.zeros(2, 16, 2, 16, device=device) for _ in range(2)]
        new = {"k": k[:, :2], "v": v[:, :2], "cache_seqlens": integers(1, 2)}
        return flashtile.attention_with_kvcache(q, *caches, **new, **options)

    def gradients() -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = flashtile.attention(*leaves, causal=True, return_lse=True)
        return torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), lse.detach()])

    def layer() -> Any:
        torch.manual_seed(0)
        made = MHA(32, 4, causal=True, rotary_emb_dim=8, use_alibi=True, device=device)
        return made(q.reshape(2, 14, 32))

    attend = sdpa.scaled_dot_product_attention
    rotary = {"rotary_cos": tables[0], "rotary_sin": tables[1]}
    return {
        "attention": lambda: flashtile.attention(q, k, v, causal=True, return_lse=True),
        "probabilities": lambda: flashtile.attention(q, k, v, softcap=1.0, return_attn_probs=True),
        "block mask": lambda: flashtile.attention(
            q, k, v, block_mask=BlockMask.from_tiles(tiles, (16, 16))
        ),
        "score function": lambda: flashtile.attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + tables[0][h, 0] * (i - j)
        ),
        "spans": lambda: flashtile.attention(q, k, v, mask=Spans(*spans)),
        "relative bias": lambda: flashtile.attention(q, k, v, relative_bias=tables[0][:4, :7]),
        "gradients": gradients,
        "varlen": lambda: flashtile.attention_varlen(packed, packed, packed, cu, cu, 4, 4),
        "cache": cached,
        "cache with rotary": lambda: cached(**rotary, return_lse=True),
        "sdpa": lambda: attend(Q, K, V, enable_gqa=True),
        "causal sdpa": lambda: attend(Q, K, V, enable_gqa=True, is_causal=True),
        "sdpa with a bool mask": lambda: attend(Q, K, V, visible, enable_gqa=True),
        "sdpa with a float mask": lambda: attend(Q, K, V, visible.float(), enable_gqa=True),
        "rotary": lambda: apply_rotary_emb(q, *tables),
        "rotary layer": lambda: RotaryEmbedding(16, device=device)(
            torch.stack((q, q, q), dim=2)
        ),
        "quantize": lambda: flashtile.quantize_qkv(q, k, v),
        "float8": lambda: flashtile.attention_fp8(q, k, v),
        "MHA": layer,
    }  # fmt: skip


NAMES = tuple(calls(generator(0), "cpu"))


def tensors(result: Any) -> list[Tensor]:
    return [x for x in ((result,) if isinstance(result, Tensor) else result) if x is not None]


def shapes(result: Any) -> list[tuple[Any, ...]]:
    return [(x.shape, x.dtype) for x in tensors(result)]


@pytest.mark.parametrize("name", NAMES)
def test_meta(name: str, seed: int) -> None:
    """Sizes and dtypes, and no numbers."""
    got = calls(generator(seed), "meta")[name]()
    assert all(x.is_meta for x in tensors(got))
    assert shapes(got) == shapes(calls(generator(seed), "cpu")[name]())


@pytest.mark.parametrize("name", NAMES)
def test_fake(name: str, seed: int) -> None:
    wanted = shapes(calls(generator(seed), "cpu")[name]())
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert shapes(calls(generator(seed), "cpu")[name]()) == wanted


class PassingDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class PassingFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# Blocks that change no number.
BLOCKS: dict[str, Callable[[], Any]] = {
    "dispatch mode": PassingDispatch,
    "function mode": PassingFunction,
    "meta as the default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks(block: str, name: str, seed: int) -> None:
    if block == "inference mode" and name == "gradients":
        pytest.skip("inference mode records nothing")
    wanted = tensors(calls(generator(seed), "cpu")[name]())
    call = calls(generator(seed), "cpu")[name]
    with BLOCKS[block]():
        got = tensors(call())
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a.float(), b.float())


class Named(Tensor):
    """A subclass that PyTorch's functions return again."""


class Wrapper(Tensor):
    """A subclass that holds a tensor and forwards every op to it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device,
            requires_grad=inner.requires_grad,
        )  # fmt: skip
        made.inner = inner.detach()
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapper) else x

        def wrap(x: Any) -> Any:
            return Wrapper(x) if isinstance(x, Tensor) else x

        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {})))


def named(x: Tensor) -> Tensor:
    return x.as_subclass(Named)


@pytest.mark.parametrize("kind", [named, Wrapper])
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 1.0}], ids=str)
def test_subclasses(kind: Any, options: dict[str, Any], seed: int) -> None:
    g = generator(seed)
    inputs = [normal(g, 2, 7, 4, 16) for _ in range(3)]

    def run(wrap: Any) -> list[Tensor]:
        leaves = [wrap(x).requires_grad_() for x in inputs]
        out = flashtile.attention(*leaves, **options)
        assert type(out) is type(leaves[0])
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    for a, b in zip(run(kind), run(lambda x: x.clone()), strict=True):
        plain = a.inner if isinstance(a, Wrapper) else a.as_subclass(Tensor)
        assert torch.equal(plain, b)


LAYOUTS = {
    "jagged": lambda xs: torch.nested.nested_tensor(xs, layout=torch.jagged),
    "nested": lambda xs: torch.nested.nested_tensor(xs, layout=torch.strided),
    "sparse": lambda xs: torch.stack([xs[0], xs[0]]).to_sparse(),
    "MKL-DNN": lambda xs: torch.stack([xs[0], xs[0]]).to_mkldnn(),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_are_refused(layout: str) -> None:
    x = LAYOUTS[layout]([torch.zeros(n, 4, 16) for n in (3, 5)])
    plain, tokens, table = torch.zeros(2, 3, 4, 16), torch.zeros(8, 4, 16), torch.ones(9, 8)
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    flashtile.attention(plain, plain, plain)  # whose sizes are the sparse tensor's
    refused: dict[str, list[Call]] = {
        "q": [
            lambda: flashtile.attention(x, x, x),
            lambda: flashtile.flash_attn_func(x, plain, plain),
            lambda: flashtile.attention_varlen(x, x, x, cu, cu, 5, 5),
            lambda: flashtile.attention_with_kvcache(x, plain, plain),
            lambda: flashtile.attention_fp8(x, x, x),
            lambda: flashtile.quantize_qkv(x, x, x),
            lambda: flashtile.explain(x, x, x),
        ],
        "k": [
            lambda: flashtile.attention(plain, x, x),
            lambda: flashtile.attention_with_kvcache(plain, plain, plain, x, x, cache_seqlens=0),
        ],
        "bias": [lambda: flashtile.attention(plain, plain, plain, bias=x)],
        "cu_seqlens_q": [lambda: flashtile.attention_varlen(*[tokens] * 3, x, cu, 5, 5)],
        "k_cache": [lambda: flashtile.attention_with_kvcache(plain, x, x)],
        "qkv": [
            lambda: flashtile.flash_attn_qkvpacked_func(x),
            lambda: apply_rotary_emb_qkv_(x, table, table),
        ],
        "x": [lambda: apply_rotary_emb(x, table, table)],
        "cos": [lambda: apply_rotary_emb(plain, x, x)],
        "attn_mask": [lambda: sdpa.scaled_dot_product_attention(plain, plain, plain, x)],
    }
    kind = "nested tensor" if layout in ("jagged", "nested") else "layout"
    for name, attempts in refused.items():
        for call in attempts:
            with pytest.raises(TypeError, match=f"^{name}: got .*{kind}.* want "):
                call()


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_other_devices_are_refused(device: str) -> None:
    with FakeTensorMode():  # which needs no such device
        x = torch.empty(2, 3, 4, 16, device=device)
    with pytest.raises(NotImplementedError, match=f"^q: is on {device}:0, want a cpu or cuda"):
        flashtile.attention(x, x, x)
