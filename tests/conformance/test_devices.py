"""The suite skips only calls that the forced backend refuses, with the backend's reasons."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashtile
from flashtile.testing import generator, qkv

from .devices import carry_calls

CPU = torch.device("cpu")


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_a_refused_call_is_skipped_for_the_backends_reasons(backend, monkeypatch):
    carry_calls(monkeypatch, CPU)
    with pytest.raises(pytest.skip.Exception, match=f"{backend}: .*cpu"):
        flashtile.attention(*qkv(generator(0)), backend=backend)


def test_a_refusal_fails_where_it_is_none_to_skip(monkeypatch):
    carry_calls(monkeypatch, CPU, refusals="fail")
    with pytest.raises(NotImplementedError, match="cannot run this call"):
        flashtile.attention(*qkv(generator(0)), backend="hopper")


def test_what_is_no_refusal_is_not_skipped(monkeypatch):
    """Wrong arguments and errors inside a backend are not skipped."""
    carry_calls(monkeypatch, CPU)
    q, k, v = qkv(generator(0))
    with pytest.raises(ValueError, match="backend"):
        flashtile.attention(q, k, v, backend="cuda")

    def broken(*args, **kwargs):
        raise NotImplementedError("lost")

    monkeypatch.setattr(flashtile, "attention", broken)
    carry_calls(monkeypatch, CPU)
    with pytest.raises(NotImplementedError, match="lost"):
        flashtile.attention(q, k, v, backend="cpu")


def test_a_refused_draw_is_another_draw(monkeypatch):
    carry_calls(monkeypatch, CPU)
    taken = []

    @given(backend=st.sampled_from(["cpu", "triton"]))
    @settings(max_examples=8, database=None)
    def draw(backend):
        flashtile.attention(*qkv(generator(0)), backend=backend)
        taken.append(backend)

    draw()
    assert set(taken) == {"cpu"}
