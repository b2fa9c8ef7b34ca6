"""Gradients of tensors that scores read, if the backend of a call leaves them to another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import backends
from flashtile.backend_interface import Gradients
from flashtile.testing import generator, normal, qkv

LEFT_OUT = dict.fromkeys(("dbias", "dcaptured", "dalibi_slopes", "drelative_bias"))


@pytest.mark.parametrize("wanted", ["table", "bias", "alibi_slopes", "relative_bias", "all"])
@pytest.mark.parametrize("has_sink", [False, True])
def test_another_backend_adds_them(
    wanted: str, has_sink: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, g = backends.BACKENDS["cpu"], generator(seed)
    q, k, v = (x.requires_grad_() for x in qkv(g, B=1, M=9, N=9, Hq=2, Hk=1, D=8))
    read = {
        "table": normal(g, 2, 20),
        "bias": normal(g, 1, 2, 1, 9),
        "alibi_slopes": normal(g, 2),
        "relative_bias": normal(g, 2, 7),
    }
    if wanted != "all":
        read = {wanted: read[wanted]}
    given: dict[str, Any] = {name: x.requires_grad_() for name, x in read.items()}
    inputs = [q, k, v, *given.values()]
    table = given.pop("table", None)
    if has_sink:
        given["sink"] = normal(g, 2).requires_grad_()
        inputs.append(given["sink"])

    def relative(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s * table[h, j - i + 9]

    if table is not None:
        given["score_mod"] = relative

    def gradients() -> tuple[Tensor, ...]:
        out, lse = flashtile.attention(q, k, v, return_lse=True, **given)
        return torch.autograd.grad((out * out).sum() + lse.sum(), inputs)

    def without(*call: Any) -> Gradients:
        return own.backward(*call)._replace(**LEFT_OUT)

    expected = gradients()
    members = vars(own) | {"backward": without}
    monkeypatch.setitem(backends.BACKENDS, "cpu", SimpleNamespace(**members))
    others = SimpleNamespace(gradients_of_scores=own.backward)
    monkeypatch.setattr(backends, "score_gradients", lambda: others)
    for one, other in zip(gradients(), expected, strict=True):
        assert torch.equal(one, other)
