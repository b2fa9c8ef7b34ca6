"""`window_size` as any pair of integers, in every function, in eager and compiled calls."""

import numpy as np
import pytest
import torch

import flashtile
from flashtile.call import prepare
from flashtile.masks import Window
from flashtile.testing import attention_reference, cu_seqlens, generator, qkv

FORMS = {
    "list": lambda pair: list(pair),
    "tensor": lambda pair: torch.tensor(pair),
    "int32 tensor": lambda pair: torch.tensor(pair, dtype=torch.int32),
    "NumPy array": lambda pair: np.array(pair),
    "NumPy integers": lambda pair: tuple(map(np.int64, pair)),
    "tensors": lambda pair: tuple(map(torch.tensor, pair)),
    "torch.Size": lambda pair: torch.Size(pair),
}


@pytest.fixture
def call():
    return dict(zip("qkv", qkv(generator(0), B=2, M=9, N=11, Hq=4, Hk=2, D=8), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_means_the_same(form, call):
    for pair in ((2, 1), (3, 0), (-1, 2), (-3, 5)):  # they need different memo entries
        if form == "torch.Size" and min(pair) < 0:
            continue
        wanted = flashtile.attention(**call, window_size=pair)
        assert torch.equal(flashtile.attention(**call, window_size=FORMS[form](pair)), wanted)
        report = flashtile.explain(**call, window_size=FORMS[form](pair))
        assert report.problem == flashtile.explain(**call, window_size=pair).problem


def test_in_the_other_functions(call):
    window, wanted = torch.tensor([-2, 6]), attention_reference(**call, window_size=(-2, 6)).out
    cu_q, cu_k = cu_seqlens([9, 9]), cu_seqlens([11, 11])
    packed = (x.flatten(0, 1) for x in call.values())
    out = flashtile.attention_varlen(*packed, cu_q, cu_k, 9, 11, window_size=window)
    torch.testing.assert_close(out.view(wanted.shape), wanted.float())
    for pair in (window, [2, 2]):
        out = flashtile.attention_with_kvcache(*call.values(), window_size=pair)
        wanted = attention_reference(**call, window_size=tuple(map(int, pair))).out
        torch.testing.assert_close(out, wanted.float())


@pytest.mark.parametrize("side", [0, 1])
def test_an_offset_of_minus_one_can_be_said_with_a_window(side, call):
    pair = (None, -1) if side else (-1, None)
    wanted = attention_reference(**call, window_size=Window(*pair)).out
    out = flashtile.attention(**call, window_size=Window(*pair))
    torch.testing.assert_close(out, wanted.float())
    assert not torch.equal(out, flashtile.attention(**call, window_size=pair))


@pytest.mark.parametrize("form", ["list", "tensor"])
def test_a_repeated_call_is_not_checked_again(form, call, monkeypatch):
    first = flashtile.attention(**call, window_size=FORMS[form]((4, 3)))
    monkeypatch.setattr(prepare, "describe", None)
    assert torch.equal(flashtile.attention(**call, window_size=FORMS[form]((4, 3))), first)


@pytest.mark.slow
def test_symbolic_sides_compile(call):
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def attend(q, k, v):
        return flashtile.attention(q, k, v, window_size=(q.shape[1] - 3, -(k.shape[1] // 4)))

    for n in (9, 13, 16):
        q, k, v = qkv(generator(n), B=2, M=n, N=n + 2, Hq=4, Hk=2, D=8)
        wanted = attention_reference(q, k, v, window_size=(n - 3, -((n + 2) // 4))).out
        torch.testing.assert_close(attend(q, k, v), wanted.float())


def test_a_tensor_is_refused_where_it_cannot_be_read(call):
    window = torch.tensor([3, 3])
    compiled = torch.compile(flashtile.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="window_size"):
        compiled(**call, window_size=window)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) for name, x in call.items()}
        with pytest.raises(TypeError, match="window_size: got a tensor whose values"):
            flashtile.attention(**fake, window_size=mode.from_tensor(window))


def test_hopper_says_that_it_has_no_negative_sides(call):
    verdicts = {v.backend: v for v in flashtile.explain(**call, window_size=(5, -2)).verdicts}
    assert any("negative window side" in reason for reason in verdicts["hopper"].reasons)


@pytest.mark.parametrize(
    "window",
    [
        torch.tensor([1.0, 2.0]),
        torch.tensor([[1, 2]]),
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.int32, device="meta"),
        np.array([1.5, 2.0]),
        [1, 2, 3],
        "12",
    ],
    ids=str,
)
def test_what_is_no_pair_of_integers_is_refused(window, call):
    with pytest.raises((TypeError, ValueError), match="window_size: got"):
        flashtile.attention(**call, window_size=window)
