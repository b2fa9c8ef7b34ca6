"""Packing and unpacking of padded batches against loops over the tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashtile.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
MASKS = {
    "right": [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]],
    "left": [[0, 0, 1, 1], [0, 1, 1, 1]],
    "holes": [[1, 0, 1, 0], [0, 1, 0, 1]],
    "padding row": [[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]],
    "all padding": [[0, 0, 0], [0, 0, 0]],
    "one token": [[1]],
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(21)


def kept_rows(mask: list[list[int]]) -> list[int]:
    return [row for row, keep in enumerate(torch.tensor(mask).flatten().tolist()) if keep]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "mask_dtype", [torch.bool, torch.int64, torch.int32, torch.float32], ids=str
)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("trailing", [(), (3,), (2, 3), (3, 2, 5)], ids=str)
def test_round_trip(
    name: str, trailing: tuple[int, ...], mask_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    rows = MASKS[name]
    mask = torch.tensor(rows).to(mask_dtype)
    x = torch.randn(*mask.shape, *trailing, dtype=dtype, requires_grad=True)
    flat, indices, cu_seqlens, longest, seqused = unpad_input(x, mask)

    want = [token for batch, m in zip(x, rows, strict=True)
            for token, keep in zip(batch, m, strict=True) if keep]  # fmt: skip
    assert flat.shape == (len(want), *trailing)
    assert all(torch.equal(a, b) for a, b in zip(flat, want, strict=True))
    assert indices.tolist() == kept_rows(rows)
    assert cu_seqlens.tolist() == [sum(sum(row) for row in rows[:b]) for b in range(len(rows) + 1)]
    assert seqused.tolist() == [sum(row) for row in rows]
    assert (indices.dtype, cu_seqlens.dtype, seqused.dtype) == (
        torch.int64, torch.int32, torch.int32,
    )  # fmt: skip
    assert longest == max(sum(row) for row in rows)
    assert type(longest) is int

    padded = pad_input(flat, indices, *mask.shape)
    shown = torch.tensor(rows).bool().view(*mask.shape, *[1] * len(trailing))
    assert torch.equal(padded, torch.where(shown, x, 0))
    grad = torch.randn_like(padded)
    padded.backward(grad)
    assert torch.equal(x.grad, torch.where(shown, grad, 0))


def test_unused_tokens_are_kept_but_not_counted() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    x = torch.randn(3, 4, 2)
    for convert in (Tensor.bool, Tensor.int):
        flat, indices, cu_seqlens, longest, seqused = unpad_input(x, convert(mask), convert(unused))
        assert indices.tolist() == [0, 1, 2, 7, 8]
        assert torch.equal(flat, x.view(12, 2)[indices])
        assert cu_seqlens.tolist() == [0, 3, 4, 5]
        assert longest == 3
        assert seqused.tolist() == [2, 0, 1]


def test_a_mask_may_hold_any_nonzero_number() -> None:
    x = torch.randn(2, 3)
    for yes in (2, -1, 255):
        _, indices, cu_seqlens, longest, seqused = unpad_input(
            x, torch.tensor([[yes, 0, yes], [0, 0, yes]])
        )
        assert indices.tolist() == [0, 2, 5]
        assert cu_seqlens.tolist() == [0, 2, 3]
        assert longest == 2
        assert seqused.tolist() == [2, 1]


@pytest.mark.parametrize("shape", [(0, 4, 2), (3, 0, 2), (0, 0, 2)], ids=str)
def test_empty_batches(shape: tuple[int, ...]) -> None:
    x, mask = torch.randn(shape), torch.ones(shape[:2], dtype=torch.bool)
    flat, indices, cu_seqlens, longest, seqused = unpad_input(x, mask)
    assert flat.shape == (0, 2)
    assert cu_seqlens.tolist() == [0] * (shape[0] + 1)
    assert longest == 0
    assert seqused.tolist() == [0] * shape[0]
    assert pad_input(flat, indices, *shape[:2]).shape == shape
    flat, _, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, mask.int())
    assert (flat.shape, cu_seqlens.tolist(), longest) == ((0, 2), [0], 0)


def test_non_contiguous_inputs() -> None:
    x = torch.randn(3, 5, 4).transpose(0, 2)[..., 1:]
    mask = (torch.rand(5, 4) < 0.5).t()
    assert not x.is_contiguous()
    assert not mask.is_contiguous()
    flat, indices, *_ = unpad_input(x, mask)
    assert torch.equal(flat, x[mask])
    wide = torch.randn(2, flat.shape[0]).t()
    padded = pad_input(wide, indices.repeat_interleave(2)[::2], 4, 5)
    assert torch.equal(padded[mask], wide)
    assert padded[~mask].eq(0).all()


LENGTHS = {
    "of the documentation": [[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]],
    "padding row": [[1, 2, 0], [0, 0, 0], [1, 1, 1]],
    "zeros between": [[0, 2, 0, 1], [1, 0, 0, 2]],
    "all padding": [[0, 0]],
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_concatenated_sequences(name: str, dtype: torch.dtype) -> None:
    rows = LENGTHS[name]
    lengths = torch.tensor(rows, dtype=dtype)
    x = torch.randn(*lengths.shape, 2, requires_grad=True)
    flat, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    used = [[int(t < sum(row)) for t in range(len(row))] for row in rows]
    each = [n for row in rows for n in row if n]
    assert indices.tolist() == kept_rows(used)
    assert torch.equal(flat, x.flatten(0, 1)[indices])
    assert cu_seqlens.tolist() == [sum(each[:i]) for i in range(len(each) + 1)]
    assert cu_seqlens.dtype == torch.int32
    assert longest == max(each, default=0)
    assert type(longest) is int
    flat.sum().backward()
    assert torch.equal(x.grad[..., 0], torch.tensor(used, dtype=x.dtype))


def test_index_first_axis() -> None:
    x = torch.randn(5, 2, 3, requires_grad=True)
    indices = torch.tensor([4, 0, 4], dtype=torch.int32)
    out = index_first_axis(x, indices)
    assert torch.equal(out, torch.stack((x[4], x[0], x[4])))
    out.sum().backward()
    assert x.grad[:, 0, 0].tolist() == [1, 0, 0, 0, 2]  # a row taken twice is counted twice


def test_index_put_first_axis() -> None:
    values = torch.randn(2, 3, requires_grad=True)
    for dtype in (torch.int32, torch.int64):
        out = index_put_first_axis(values, torch.tensor([3, 1], dtype=dtype), 5)
        want = torch.zeros(5, 3)
        want[3], want[1] = values.detach()
        assert torch.equal(out, want)
    grad = torch.randn(5, 3)
    out.backward(grad)
    assert torch.equal(values.grad, grad[[3, 1]])


def test_index_first_axis_residual() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    out, residual = index_first_axis_residual(x, torch.tensor([2, 0]))
    assert torch.equal(out, x[[2, 0]])
    assert torch.equal(residual, x)
    assert residual.data_ptr() == x.data_ptr()
    (10 * out.sum() + residual.sum()).backward()
    assert x.grad[:, 0].tolist() == [11, 1, 11, 1]


def test_gradcheck() -> None:
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 0]])
    indices = torch.tensor([3, 0])

    def packed(x: Tensor) -> Tensor:
        flat, rows, *_ = unpad_input(x, mask)
        return pad_input(flat.square(), rows, 3, 3)

    def residual(x: Tensor) -> Tensor:
        out, rest = index_first_axis_residual(x, indices)
        return out.square().sum() * rest

    x = torch.randn(3, 3, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    for f, z in ((packed, x), (residual, y)):
        assert torch.autograd.gradcheck(f, (z,), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(f, (z,))


@pytest.mark.slow
def test_compile() -> None:
    def work(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, int, Tensor]:
        flat, indices, cu_seqlens, longest, seqused = unpad_input(x, mask)
        return pad_input(flat * 2, indices, *mask.shape), cu_seqlens, longest, seqused

    def several(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        return unpad_input_for_concatenated_sequences(x, lengths)

    torch._dynamo.reset()
    fast, fast_several = (
        torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True) for f in (work, several)
    )
    for name in ("right", "padding row", "all padding"):
        mask = torch.tensor(MASKS[name])
        x = torch.randn(*mask.shape, 2, requires_grad=True)
        got, want = fast(x, mask), work(x, mask)
        torch.testing.assert_close(got, want)
        (grad,) = torch.autograd.grad(got[0].sum(), x)
        assert torch.equal(grad[..., 0], 2.0 * mask)
    for rows in LENGTHS.values():
        lengths = torch.tensor(rows)
        x = torch.randn(*lengths.shape, 2)
        torch.testing.assert_close(fast_several(x, lengths), several(x, lengths))


def test_the_interface_of_flash_attn() -> None:
    def names(f: Callable[..., object]) -> list[str]:
        return list(inspect.signature(f).parameters)

    assert names(unpad_input) == ["hidden_states", "attention_mask", "unused_mask"]
    assert inspect.signature(unpad_input).parameters["unused_mask"].default is None
    assert names(unpad_input_for_concatenated_sequences) == [
        "hidden_states", "attention_mask_in_length",
    ]  # fmt: skip
    assert names(pad_input) == ["hidden_states", "indices", "batch", "seqlen"]
    assert names(index_first_axis) == ["input", "indices"]
    assert names(index_put_first_axis) == ["values", "indices", "first_axis_dim"]
    assert names(index_first_axis_residual) == ["input", "indices"]


def test_bad_input_is_named() -> None:
    x, mask = torch.zeros(2, 3, 4), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"^attention_mask: .*\(2, 3, 4\), got \(3, 2\)"):
        unpad_input(x, mask.t())
    with pytest.raises(ValueError, match=r"^attention_mask: .*got \(2,\)"):
        unpad_input(x[:, 0, 0], mask[:, 0])
    with pytest.raises(ValueError, match=r"^unused_mask: .*got \(2, 2\)"):
        unpad_input(x, mask, mask[:, :2])
    with pytest.raises(ValueError, match=r"^attention_mask_in_length: .*got \(2, 2\)"):
        unpad_input_for_concatenated_sequences(x, mask[:, :2].int())
    for wrong in (mask, mask.bool()):
        with pytest.raises(TypeError, match=r"^attention_mask_in_length: expected integers"):
            unpad_input_for_concatenated_sequences(x, wrong)
    with pytest.raises(ValueError, match=r"^attention_mask_in_length: .* at most 3 .* sum of 4"):
        unpad_input_for_concatenated_sequences(x, torch.tensor([[2, 2, 0], [1, 0, 0]]))
    with pytest.raises(ValueError, match=r"^attention_mask_in_length: .* smallest length of -1"):
        unpad_input_for_concatenated_sequences(x, torch.tensor([[2, -1, 0], [1, 0, 0]]))
    with pytest.raises(ValueError, match=r"^indices: .*\(2, 3, 4\), got shape \(3,\)"):
        pad_input(x, torch.arange(3), 2, 3)
