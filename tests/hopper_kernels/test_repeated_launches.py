"""A repeated call goes straight to the compiled kernels, with the arguments of its own tensors."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.hopper import launch
from flashtile.backends.hopper.launch import Launch, call_key, run_all
from flashtile.call import Arguments, dense_call
from flashtile.problem import AttentionProblem


class Kernel:
    """Stands for a kernel and for what Triton compiles of it; writes down how it is called."""

    arg_names = ("x", "n", "cfg")

    def __init__(self):
        self.compiled, self.repeated = [], []

    def __getitem__(self, grid):
        def compile_and_run(*, num_warps, **arguments):
            self.compiled.append((grid, arguments, num_warps))
            return Compiled(self.repeated)

        return compile_and_run


class Compiled:
    def __init__(self, calls):
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append((grid, arguments))


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(launch, "_compiled", {})


def test_the_second_call_passes_its_own_arguments_in_order():
    kernel = Kernel()
    for n in (1, 2):
        run_all([Launch(kernel, (5, 3), {"cfg": "c", "n": n, "x": f"x{n}"}, warps=8)], "key")
    assert kernel.compiled == [((5, 3), {"cfg": "c", "n": 1, "x": "x1"}, 8)]
    assert kernel.repeated == [((5, 3, 1), ("x2", 2, "c"))]


def test_another_key_compiles():
    kernel = Kernel()
    for key in ("a", "b", "a"):
        run_all([Launch(kernel, (1,), {"x": 0, "n": 0, "cfg": 0})], key)
    assert len(kernel.compiled) == 2 and len(kernel.repeated) == 1


def call(seq=8, causal=False, start=0, heads_first=False, dlse=False):
    """The key of a call that differs from the plain one in what is given."""
    shape = (2, 4, seq, 64) if heads_first else (2, seq, 4, 64)
    q = torch.zeros(start + 2 * seq * 4 * 64, dtype=torch.bfloat16)[start:].view(shape)
    q = q.transpose(1, 2) if heads_first else q
    operands, options = dense_call(q, q, q, Arguments(causal=causal))
    problem = AttentionProblem.of(operands, options)
    return call_key("backward", problem, (*operands, torch.zeros(2) if dlse else None))


def test_calls_of_one_kind_share_a_key():
    assert call() == call()


@pytest.mark.parametrize(
    "change",
    [{"seq": 16}, {"causal": True}, {"start": 1}, {"heads_first": True}, {"dlse": True}],
    ids=str,
)
def test_what_triton_looks_at_is_in_the_key(change):
    assert call(**change) != call()
