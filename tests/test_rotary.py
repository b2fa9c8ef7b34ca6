"""Rotary embedding against complex multiplication in float64, another way to rotate a pair."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from flashtile.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
    rotate_half,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
STYLES = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20)


def tables(rows: int, half: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    angle = torch.randn(rows, half, dtype=torch.float64) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | int, interleaved: bool = False
) -> Tensor:
    """x (..., heads, head_dim) in float64 with its pairs multiplied by exp(i angle).

    positions: of every token, (seq,), (batch, seq) or (total,), or an int: that of the first one.
    """
    x, half = x.detach().double().clone(), cos.shape[-1]
    if isinstance(positions, int):
        positions = torch.arange(positions, positions + x.shape[1])
    rotations = torch.complex(cos.double(), sin.double())
    none = torch.ones_like(rotations[:1])  # the last row, for positions outside the table
    rotations = torch.cat((rotations, none))
    positions = torch.where((positions >= 0) & (positions < cos.shape[0]), positions, -1)
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    z = torch.complex(x[..., first], x[..., second]) * rotations[positions].unsqueeze(-2)
    x[..., first], x[..., second] = z.real, z.imag
    return x


def close(got: Tensor, want: Tensor) -> None:
    """Equal up to two roundings of a value of 8, the largest that the inputs become."""
    atol = 8 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.detach().double(), want, rtol=0, atol=atol)


def cu(lengths: list[int]) -> Tensor:
    return torch.tensor([sum(lengths[:b]) for b in range(len(lengths) + 1)], dtype=torch.int32)


def compiled(f: Callable, backend: str | Callable = "aot_eager") -> Callable:
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, backend=backend, dynamic=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@STYLES
@pytest.mark.parametrize(
    "sizes", ["2 5 3 8 4", "1 1 1 2 1", "3 7 2 13 5", "2 3 1 6 0", "0 4 2 4 2", "2 0 2 4 2"]
)
def test_dense(sizes: str, interleaved: bool, dtype: torch.dtype) -> None:
    B, M, H, D, half = (int(size) for size in sizes.split())
    x, (cos, sin) = torch.randn(B, M, H, D, dtype=dtype), tables(M + 3, half, dtype)
    x.requires_grad_()
    before, grad = x.detach().clone(), torch.randn_like(x)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=2)
    assert sum(t.numel() for t in kept) <= cos.numel() + sin.numel()
    out.backward(grad)
    assert out.dtype == x.grad.dtype == dtype
    close(out, rotated(x, cos, sin, 2, interleaved))
    close(x.grad, rotated(grad, cos, -sin, 2, interleaved))
    assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])
    assert torch.equal(x, before)
    assert x.numel() == 0 or out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_unchecked_offsets_beyond_the_table_leave_the_row_alone(
    index_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTILE_CHECK", "0")
    x, (cos, sin) = torch.randn(5, 3, 2, 4, dtype=torch.float64), tables(5, 2)
    offsets = torch.tensor([3, 1000, -2, 5, 1], dtype=index_dtype)
    out = apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)
    close(out, rotated(x, cos, sin, offsets[:, None] + torch.arange(3)))
    assert (out == x).all(dim=(2, 3)).sum(dim=1).tolist() == [1, 3, 2, 3, 0]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@STYLES
@pytest.mark.parametrize("lengths", [[3, 0, 4, 0, 0, 1], [5], [0, 0], [], [0, 6, 0]], ids=str)
def test_packed(lengths: list[int], interleaved: bool, index_dtype: torch.dtype) -> None:
    used, longest = sum(lengths), max(lengths, default=0)
    x, (cos, sin) = torch.randn(used + 2, 2, 7, dtype=torch.float64), tables(12, 3)
    for offsets in ([5 - b for b in range(len(lengths))], 2):
        each = [offsets] * len(lengths) if isinstance(offsets, int) else offsets
        given = offsets if isinstance(offsets, int) else torch.tensor(offsets, dtype=index_dtype)
        out = apply_rotary_emb(
            x, cos, sin, interleaved, False, given, cu(lengths).to(index_dtype), longest + 1
        )
        positions = [o + t for n, o in zip(lengths, each, strict=True) for t in range(n)]
        close(out[:used], rotated(x[:used], cos, sin, torch.tensor(positions).long(), interleaved))
        assert torch.equal(out[used:], x[used:])  # after the last sequence


def test_sixteen_bit_input_is_rotated_in_float32() -> None:
    x, (cos, sin) = torch.randn(2, 64, 4, 64).bfloat16(), tables(64, 32, torch.float32)
    # Products or tables in bfloat16 would move about half of the results.
    moved = apply_rotary_emb(x, cos, sin) != rotated(x, cos, sin, 0).to(torch.bfloat16)
    assert moved.float().mean() < 1e-3


def test_non_contiguous_inputs() -> None:
    x = torch.randn(3, 2, 10, 5, dtype=torch.float64).permute(1, 3, 0, 2)[..., 1:9]
    cos, sin = (t.t().contiguous().t()[::2] for t in tables(14, 3))
    offsets = torch.tensor([[1, 9], [0, 9]])[:, 0]
    assert not any(t.is_contiguous() for t in (x, cos, sin, offsets))
    out = apply_rotary_emb(x, cos, sin, True, seqlen_offsets=offsets)
    close(out, rotated(x, cos, sin, offsets[:, None] + torch.arange(5), True))
    repeated = torch.randn(1, 5, 1, 6, dtype=torch.float64).expand(2, 5, 3, 6)
    close(apply_rotary_emb(repeated, cos, sin), rotated(repeated, cos, sin, 0))


@STYLES
@pytest.mark.parametrize(
    "positions", [torch.arange(4), torch.arange(8).view(2, 4)], ids=["2d", "3d"]
)
def test_the_plain_functions(positions: Tensor, interleaved: bool) -> None:
    x, (cos, sin) = torch.randn(2, 4, 3, 9, dtype=torch.float64), tables(8, 3)
    quarter = rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0]), interleaved)
    assert quarter.tolist() == ([-2, 1, -4, 3] if interleaved else [-3, -4, 1, 2])
    out = apply_rotary_emb_torch(x, cos[positions], sin[positions], interleaved)
    close(out, rotated(x, cos, sin, positions, interleaved))


@STYLES
@pytest.mark.parametrize(
    "options",
    [
        {"seqlen_offsets": 1},
        {"seqlen_offsets": torch.tensor([3, 4])},
        {"cu_seqlens": cu([3, 0, 2]), "max_seqlen": 3},
        {"inplace": True},
    ],
    ids=["dense", "offsets", "packed", "in place"],
)
def test_gradcheck(options: dict, interleaved: bool) -> None:
    cos, sin = tables(7, 2)
    shape = (5, 2, 5) if "cu_seqlens" in options else (2, 3, 2, 5)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return apply_rotary_emb(x * 1, cos, sin, interleaved, **options)

    assert torch.autograd.gradcheck(f, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: f(x).square(), x)


@pytest.mark.parametrize("offsets", [1, torch.tensor([0, 2])], ids=["int", "tensor"])
def test_learned_tables_get_gradients(offsets: int | Tensor) -> None:
    x = torch.randn(2, 3, 2, 5, dtype=torch.float64, requires_grad=True)
    cos, sin = (t.requires_grad_() for t in tables(6, 2))

    f = partial(apply_rotary_emb, seqlen_offsets=offsets)
    assert torch.autograd.gradcheck(f, (x, cos, sin), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, (x, cos, sin))


def test_function_transforms() -> None:
    args = (torch.randn(2, 3, 2, 5, dtype=torch.float64), *tables(3, 2))
    tangents, step = [torch.randn_like(t) for t in args], 1e-6
    out, tangent = torch.func.jvp(apply_rotary_emb, args, tuple(tangents))
    ahead, behind = (
        apply_rotary_emb(*(t + h * d for t, d in zip(args, tangents, strict=True)))
        for h in (step, -step)
    )
    torch.testing.assert_close(tangent, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-7)

    def one(x: Tensor) -> Tensor:
        return apply_rotary_emb(x[None], *args[1:])[0]

    close(torch.func.vmap(one)(args[0]), out)
    grads = torch.func.vmap(torch.func.grad(lambda x: one(x).pow(3).sum()))(args[0])
    close(grads, rotated(3 * out.square(), args[1], -args[2], 0))


def test_inplace_writes_into_the_given_memory_and_nowhere_else() -> None:
    (cos, sin), whole = tables(5, 2), torch.randn(2, 5, 4, 6)
    want, x = whole.double(), whole[:, :, 1:3]
    want[:, :, 1:3] = rotated(x, cos, sin, 0)
    out = apply_rotary_emb(x, cos, sin, inplace=True)
    assert out is x
    assert out.data_ptr() == whole[:, :, 1:3].data_ptr()
    close(whole, want)


def test_inplace_on_a_view_reaches_the_gradient_of_its_base() -> None:
    x = torch.randn(2, 5, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    (cos, sin), base = tables(5, 2), x * 1
    apply_rotary_emb(base[:, :, 1], cos, sin, inplace=True)
    grad = torch.randn_like(base)
    base.backward(grad)
    grad[:, :, 1] = rotated(grad[:, :, 1], cos, -sin, 0)
    close(x.grad, grad)


@pytest.mark.parametrize("part", ["one", "both"])
def test_inplace_on_views_of_a_function_that_returns_several(part: str) -> None:
    """PyTorch forbids to write to them; the result records the rotation, on their memory."""
    leaf = torch.randn(2, 5, 128, requires_grad=True)
    q, kv = (leaf * 1).split([64, 64], dim=-1)
    q, kv = q.view(2, 5, 4, 16), kv.view(2, 5, 2, 2, 16)
    layer = RotaryEmbedding(16, pos_idx_in_fp32=True)
    cos, sin, *_ = layer.tables(5, q.device, q.dtype)
    wanted_q = apply_rotary_emb(q, cos, sin)
    wanted_kv = torch.stack((apply_rotary_emb(kv[:, :, 0], cos, sin), kv[:, :, 1]), dim=2)
    wanted = (wanted_q, wanted_kv) if part == "both" else (wanted_kv,)
    weights = [torch.randn_like(x) for x in wanted]

    def gradient(results: Sequence[Tensor]) -> Tensor:
        loss = sum(((x * w).sum() for x, w in zip(results, weights, strict=True)), Tensor([0]))
        return torch.autograd.grad(loss, leaf, retain_graph=True)[0]

    expected = gradient(wanted)
    places = q.data_ptr(), kv.data_ptr()
    got = layer(q, kv) if part == "both" else (apply_rotary_emb_kv_(kv, cos, sin),)
    assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))
    assert tuple(x.data_ptr() for x in got) == places[-len(got) :]
    torch.testing.assert_close(gradient(got), expected)


def test_inplace_makes_pytorch_notice_a_value_that_backward_needs() -> None:
    x, (cos, sin) = torch.randn(1, 3, 1, 4, requires_grad=True), tables(3, 2)
    out = apply_rotary_emb(x.exp(), cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("offsets", [torch.tensor(1), torch.tensor([2, 0])], ids=["int", "tensor"])
@pytest.mark.parametrize("own_k", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("layout", ["x", "qkv", "grouped", "no k", "strided", "kv"])
@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "not a leaf"])
def test_inplace(layout: str, own_k: tuple[int, int], offsets: Tensor, leaf: bool) -> None:
    B, M, H, D, every = 2, 4, 5, 7, slice(None)
    q_tables, k_tables = tables(6, 3), tables(6, 3)
    k_given = [table if own else None for table, own in zip(k_tables, own_k, strict=True)]
    k_used = [q if k is None else k for q, k in zip(q_tables, k_given, strict=True)]
    shape, heads, parts = {
        "x": ((B, M, H, D), None, (every,)),
        "qkv": ((B, M, 3, H, D), None, (0, 1)),
        "kv": ((B, M, 2, H, D), None, (0,)),
        "no k": ((B, M, 3, D), 3, (every,)),
    }.get(layout, ((B, M, H + 4, D), H, (slice(0, H), slice(H, H + 2))))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    packed = x if leaf else x * 1
    if layout == "strided" and not leaf:
        packed = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert not packed.is_contiguous()
    want, grad, address = x.detach().clone(), torch.randn_like(x), packed.data_ptr()

    given = int(offsets) if offsets.dim() == 0 else offsets
    if layout == "x":
        out = apply_rotary_emb(packed, *q_tables, True, True, given)
    elif layout == "kv":
        out = apply_rotary_emb_kv_(packed, *q_tables, True, given)
    else:
        out = apply_rotary_emb_qkv_(packed, *q_tables, *k_given, True, given, heads)
    assert out.data_ptr() == packed.data_ptr() == address
    out.backward(grad)

    positions = offsets[..., None] + torch.arange(M)
    for part, (cos, sin) in zip(parts, (q_tables, k_used), strict=False):
        want[:, :, part] = rotated(want[:, :, part], cos, sin, positions, True)
        grad[:, :, part] = rotated(grad[:, :, part], cos, -sin, positions, True)
    close(out, want)
    close(x.grad, grad)


@STYLES
@pytest.mark.parametrize("scale_base", [None, 4.0], ids=["rope", "xpos"])
@pytest.mark.parametrize("layout", ["qkv", "grouped", "q and kv"])
def test_module(layout: str, scale_base: float | None, interleaved: bool) -> None:
    dim, M, rows = 6, 9, 15
    rope = RotaryEmbedding(dim, 500.0, interleaved, scale_base)
    i, m = torch.arange(dim // 2).double(), torch.arange(rows).double()[:, None]
    angle = m * 500.0 ** (-2 * i / dim)
    growth = ((2 * i / dim + 0.4) / 1.4) ** ((m - rows // 2) / (scale_base or torch.inf))
    (q, k, v), offsets = torch.randn(3, 2, M, 3, 8).unbind(), torch.tensor([3, 6])
    positions = offsets[:, None] + torch.arange(M)
    want_q = rotated(q, angle.cos() * growth, angle.sin() * growth, positions, interleaved)
    want_k = rotated(k, angle.cos() / growth, angle.sin() / growth, positions, interleaved)
    if layout == "q and kv":
        kv = torch.stack((k, v), dim=2)
        out_q, out_kv = rope(q, kv, offsets, rows)
        assert out_q is q
        assert out_kv is kv
        k, new_v = kv.unbind(2)
    else:
        qkv = torch.stack((q, k, v), dim=2)
        qkv = qkv.flatten(2, 3) if layout == "grouped" else qkv
        assert rope(qkv, None, offsets, rows, num_heads_q=3) is qkv
        q, k, new_v = qkv.view(2, M, 3, 3, 8).unbind(2)
    torch.testing.assert_close(q.double(), want_q, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(k.double(), want_k, rtol=1e-5, atol=1e-5)
    assert torch.equal(new_v, v)


def test_module_tables_are_kept_and_grow() -> None:
    rope, made = RotaryEmbedding(4), []
    for M, options, dtype in (
        (6, {}, torch.float32),
        (3, {"seqlen_offset": 2}, torch.float32),
        (4, {"seqlen_offset": 3}, torch.float32),
        (4, {}, torch.float64),
        (4, {"max_seqlen": 30}, torch.float64),
        (1, {"seqlen_offset": torch.tensor([29, 3])}, torch.float64),
    ):
        rope(torch.randn(2, M, 3, 1, 4, dtype=dtype), **options)
        made.append(rope._cos_cached)
    assert [len(cos) for cos in made] == [6, 6, 7, 4, 30, 30]
    assert made[0] is made[1]
    assert made[4] is made[5]
    assert made[3].dtype == torch.float64
    assert not rope.state_dict()
    rope(torch.randn(1, 31, 1, 4), torch.randn(1, 32, 2, 1, 4))  # k longer than q
    assert len(rope._cos_cached) == 32


@pytest.mark.parametrize("cast", [torch.nn.Module.bfloat16, torch.nn.Module.double])
def test_module_tables_are_made_in_float32_whatever_the_model_is_cast_to(cast: Callable) -> None:
    plain, recast = RotaryEmbedding(8, scale_base=512), cast(RotaryEmbedding(8, scale_base=512))
    for rope in (plain, recast):
        rope(torch.randn(1, 1, 3, 1, 8).bfloat16(), max_seqlen=4000)
    for name in ("_cos_cached", "_sin_cached", "_cos_k_cached", "_sin_k_cached"):
        assert torch.equal(getattr(plain, name), getattr(recast, name))
        assert getattr(plain, name).dtype == torch.bfloat16


def test_module_trains_after_inference_mode() -> None:
    rope, x = RotaryEmbedding(4), torch.randn(1, 3, 3, 1, 4, requires_grad=True)
    with torch.inference_mode():
        rope(torch.randn(1, 3, 3, 1, 4))
    rope(x * 1).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.slow
def test_compile() -> None:
    tables_ = tables(40, 2, torch.float32)
    counted = CompileCounterWithBackend("aot_eager")
    fast = compiled(apply_rotary_emb, counted)
    for B, M in ((4, 9), (6, 11)):  # equal sizes would be one symbol
        x = torch.randn(B, M, 2, 5, requires_grad=True)
        lengths, offsets = [M, 0, *[1] * B], torch.arange(B + 2)
        packed = torch.randn(M + B, 2, 5, requires_grad=True)
        for args in (
            (x, *tables_, False, False, M + 1),
            (x, *tables_, True, False, offsets[2:]),
            (packed, *tables_, False, False, offsets, cu(lengths), M),
        ):
            want, got = apply_rotary_emb(*args), fast(*args)
            grads = [torch.autograd.grad(y.square().sum(), args[0])[0] for y in (got, want)]
            torch.testing.assert_close([got, grads[0]], [want, grads[1]])
    assert counted.frame_count == 3


@pytest.mark.slow
def test_compile_in_place() -> None:
    cos, sin = tables(20, 2, torch.float32)

    def rotate(x: Tensor, qkv: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        return (
            apply_rotary_emb(x, cos, sin, inplace=True, seqlen_offsets=1),
            apply_rotary_emb_qkv_(qkv, cos, sin, seqlen_offsets=offsets, num_heads_q=2),
        )

    counted = CompileCounterWithBackend("aot_eager")
    fast = compiled(rotate, counted)
    for B, M in ((3, 5), (7, 8)):
        leaves, results = [torch.randn(B, M, H, 6, requires_grad=True) for H in (2, 4)], []
        for f in (rotate, fast):
            inputs = [leaf * 1 for leaf in leaves]
            outs = f(*inputs, torch.arange(B))
            assert [t.data_ptr() for t in outs] == [t.data_ptr() for t in inputs]
            grads = torch.autograd.grad([t.square().sum() for t in outs], leaves)
            results.append([*outs, *inputs, *grads])
        torch.testing.assert_close(*results)
    assert counted.frame_count == 1


@pytest.mark.slow
def test_compile_module() -> None:
    rope, twin = (RotaryEmbedding(4, scale_base=512.0) for _ in range(2))
    fast = compiled(rope)
    for M, offset in ((5, 0), (7, 2)):
        qkv = torch.randn(2, M, 3, 2, 4)
        got, want = fast(qkv.clone(), seqlen_offset=offset), twin(qkv, seqlen_offset=offset)
        torch.testing.assert_close(got, want)


def test_export() -> None:
    class Rotate(torch.nn.Module):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, offsets: Tensor) -> Tensor:
            return apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets)

    args = (torch.randn(2, 3, 1, 4), *tables(9, 2), torch.arange(2))
    exported = torch.export.export(Rotate(), args).module()
    torch.testing.assert_close(exported(*args), Rotate()(*args))


class NoHostRead(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "nonzero", "is_nonzero"}
        return func(*args, **(kwargs or {}))


def test_tensors_are_not_read_by_the_host() -> None:
    (cos, sin), offsets, rope = tables(9, 2), torch.tensor([1, 5]), RotaryEmbedding(4)
    with NoHostRead():
        apply_rotary_emb(torch.randn(2, 3, 1, 4), cos, sin, seqlen_offsets=offsets)
        apply_rotary_emb(torch.randn(5, 1, 4), cos, sin, False, True, offsets, cu([2, 3]), 3)
        apply_rotary_emb_kv_(torch.randn(2, 3, 2, 1, 4), cos, sin, seqlen_offsets=offsets)
        rope(torch.randn(2, 3, 3, 1, 4), seqlen_offset=offsets, max_seqlen=9)


TAIL = "interleaved=False, seqlen_offsets=0"
SIGNATURES = {
    apply_rotary_emb: "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, "
    "cu_seqlens=None, max_seqlen=None",
    apply_rotary_emb_torch: "x, cos, sin, interleaved=False",
    apply_rotary_emb_qkv_: f"qkv, cos, sin, cos_k=None, sin_k=None, {TAIL}, num_heads_q=None",
    apply_rotary_emb_kv_: f"kv, cos, sin, {TAIL}",
    rotate_half: "x, interleaved=False",
    RotaryEmbedding: "dim, base=10000.0, interleaved=False, scale_base=None, device=None, "
    "pos_idx_in_fp32=True",
    RotaryEmbedding(2).forward: "qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None",
}


def test_the_interface_of_flash_attn() -> None:
    assert apply_rotary_emb_func is apply_rotary_emb
    for f, want in SIGNATURES.items():
        assert want == ", ".join(
            p.name if p.default is p.empty else f"{p.name}={p.default}"
            for p in inspect.signature(f).parameters.values()
        )


X, COS, ZEROS = torch.zeros(2, 3, 2, 4), torch.zeros(5, 2), torch.zeros(3, dtype=torch.int32)
PACKED = {"x": X[0], "cu_seqlens": ZEROS}
BAD_CALLS: list[tuple[dict, type[Exception], str]] = [
    ({"x": X[0]}, ValueError, r"^x: .*\(batch, seq, heads, head_dim\), got \(3, 2, 4\)"),
    ({**PACKED, "x": X, "max_seqlen": 3}, ValueError, r"^x: .*\(total, heads, head_dim\)"),
    ({"x": X.int()}, TypeError, "^x: .*got torch.int32"),
    ({"cos": COS[0]}, ValueError, r"^cos: .*got \(2,\)"),
    ({"sin": COS[:, :1]}, ValueError, r"^sin: .*got \(5, 1\)"),
    ({"cos": COS.int()}, TypeError, "^cos: .*got torch.int32"),
    ({"sin": COS.to("meta")}, ValueError, "^sin: is on meta, but the input is on cpu"),
    ({"x": X[..., :3]}, ValueError, "^cos: got 2 columns.* head_dim is 3"),
    ({"cos": COS[:2], "sin": COS[:2]}, ValueError, "^cos: got 2 rows.* at least 3"),
    ({"seqlen_offsets": 3}, ValueError, "^cos: got 5 rows.* at least 6 for 3 positions from 3"),
    ({"seqlen_offsets": -1}, ValueError, "^seqlen_offsets: .*-1"),
    ({"seqlen_offsets": 1.5}, TypeError, "^seqlen_offsets: .*1.5"),
    ({"seqlen_offsets": ZEROS}, ValueError, r"^seqlen_offsets: .*\(2,\), got \(3,\)"),
    ({"seqlen_offsets": torch.zeros(2)}, TypeError, "^seqlen_offsets: .*got torch.float32"),
    (PACKED, ValueError, "^max_seqlen: needed"),
    ({**PACKED, "cu_seqlens": torch.zeros(3), "max_seqlen": 3}, TypeError, "^cu_seqlens: .*float"),
    ({**PACKED, "cu_seqlens": ZEROS[None], "max_seqlen": 3}, ValueError, "^cu_seqlens: .*1, 3"),
    ({**PACKED, "max_seqlen": 6}, ValueError, "^cos: got 5 rows"),
]


@pytest.mark.parametrize(("bad", "error", "message"), BAD_CALLS, ids=[m for *_, m in BAD_CALLS])
def test_bad_input(bad: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        apply_rotary_emb(**{"x": X, "cos": COS, "sin": COS, **bad})


def test_bad_input_of_the_other_functions() -> None:
    ones, offsets = torch.ones(2, 3, 3, 2, 4), torch.zeros(2, dtype=torch.int32)
    q, kv, rope = ones[:, :, 0], ones[:, :, :2], RotaryEmbedding(4)
    tables_, short = (COS, COS), (COS[:2], COS[:2])
    for f, args, message in (
        (apply_rotary_emb_qkv_, (kv, *tables_), "qkv: expected .* 3, heads.* got (2, 3, 2, 2, 4)"),
        (apply_rotary_emb_qkv_, (q[0, 0], *tables_), "qkv: .*got (2, 4)"),
        (apply_rotary_emb_qkv_, (ones, *tables_, *short), "cos_k: got 2 rows"),
        (apply_rotary_emb_qkv_, (q, *tables_), "num_heads_q: needed .*(2, 3, 2, 4)"),
        (apply_rotary_emb_qkv_, (q, *tables_, None, None, False, 0, 1), "num_heads_q: got 1 of "),
        (apply_rotary_emb_qkv_, (q, *tables_, None, None, False, 0, 4), "num_heads_q: got 4 of "),
        (apply_rotary_emb_kv_, (ones, *tables_), "kv: expected .* 2, heads.* got (2, 3, 3, 2, 4)"),
        (apply_rotary_emb_torch, (q[..., :3], *tables_), "cos: got 2 columns"),
        (rotate_half, (torch.zeros(2, 3),), "x: the last dimension must be even"),
        (rope, (ones, None, offsets), "max_seqlen: needed"),
        (rope, (q,), "num_heads_q: needed"),
        (rope, (q[0, 0, 0],), "qkv: .*got (4,)"),
        (rope, (q, q), "kv: expected"),
        (rope, (ones, kv), "qkv: expected shape (batch, seq, heads, head_dim)"),
        (rope, (q, kv[:1], offsets, 9), "seqlen_offsets: "),
        (RotaryEmbedding, (0,), "dim: .*0"),
        (RotaryEmbedding, (3,), "dim: .*3"),
    ):
        pattern = "^" + message.replace("(", "\\(").replace(")", "\\)")
        with pytest.raises(ValueError, match=pattern):
            f(*args)
    assert ones.eq(1).all(), "written to before the error"


def test_the_length_that_flash_attn_layers_read():
    rope = RotaryEmbedding(4)
    assert rope._seq_len_cached == 0
    rope._update_cos_sin_cache(5, torch.device("cpu"), torch.float32)
    assert rope._seq_len_cached == 5
