"""The products of float32 on a GPU, and that each call follows PyTorch's switches for TF32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashtile.backends.triton.plan import plan, precision
from flashtile.call import memo
from flashtile.distributed import executor
from flashtile.gpu import hardware
from flashtile.lru import clear_caches
from flashtile.problem import AttentionProblem, Operands, Options, allows_tf32


def legacy(value: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = value


def by_name(value: bool) -> None:
    torch.set_float32_matmul_precision("high" if value else "highest")


def new(value: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32" if value else "ieee"


@pytest.fixture(params=[legacy, by_name, new], ids=lambda f: f.__name__)
def switch(request: pytest.FixtureRequest) -> Iterator[Callable[[bool], None]]:
    before = torch.backends.cuda.matmul.fp32_precision
    yield request.param
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = before


def problem_of(head_dim: int = 64, dtype: torch.dtype = torch.float32, **facts: Any) -> Any:
    q = torch.empty(1, 128, 4, head_dim, dtype=dtype, device="meta")
    problem = AttentionProblem.of(Operands(q, q, q), Options(128, 128, 0.1))
    return problem._replace(**{"device_type": "cuda", "capability": (9, 0)} | facts)


@pytest.mark.parametrize(
    ("change", "default", "allowed"),
    [
        ({}, "bf16x6", "tf32"),
        ({"head_dim": 20}, "bf16x6", "tf32"),
        ({"head_dim": 128}, "bf16x6", "tf32"),
        ({"head_dim": 129}, "ieee", "tf32"),
        ({"head_dim": 512}, "ieee", "tf32"),
        ({"capability": (8, 0)}, "ieee", "tf32"),
        ({"capability": (8, 9)}, "ieee", "tf32"),
        ({"capability": (10, 0)}, "ieee", "tf32"),
        ({"capability": (7, 5)}, "ieee", "ieee"),
        ({"capability": None}, "ieee", "ieee"),
        ({"dtype": torch.bfloat16}, "ieee", "ieee"),
    ],
    ids=str,
)
def test_products(change: dict[str, Any], default: str, allowed: str):
    for switched, wanted in ((False, default), (True, allowed)):
        problem = problem_of(**change, allows_tf32=switched)
        assert precision(problem) == wanted
        for kernel in plan(problem, True):
            assert kernel is None or wanted == kernel.config.PRECISION


def test_rocm_has_no_tf32(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hardware, "is_rocm", lambda: True)
    assert precision(problem_of(capability=(9, 4), allows_tf32=True)) == "ieee"


def test_a_problem_follows_the_switch(
    switch: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for dtype in (torch.float32, torch.bfloat16):
        with FakeTensorMode():
            q = torch.empty(1, 128, 4, 64, dtype=dtype, device="cuda")
            for value in (True, False, True):
                switch(value)
                problem = AttentionProblem.of(Operands(q, q, q), Options(128, 128, 0.1))
                assert problem.allows_tf32 == (value and dtype == torch.float32)


def test_a_repeated_call_follows_the_switch(
    switch: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
):
    """The decision of a call with launches is kept under a key."""
    monkeypatch.setattr(memo, "_has_launches", lambda x: True)
    q = torch.randn(1, 8, 2, 16)
    keys = []
    for value in (False, True, False):
        switch(value)
        keys.append(memo.key_of(("q",), (q,)))
    assert keys[0] == keys[2] != keys[1]


def test_a_step_of_context_parallelism_follows_the_switch(switch: Callable[[bool], None]):
    """A plan keeps the problems of its steps under keys."""
    step: Any = SimpleNamespace(number=0)
    plan: Any = SimpleNamespace(memo=SimpleNamespace(get=lambda key: key))
    with FakeTensorMode():
        q = torch.empty(8, 2, 16, device="cuda")
    keys = []
    for value in (False, True, False):
        switch(value)
        keys.append(executor._problem(plan, Operands(q, q, q), step, False))
    assert keys[0] == keys[2] != keys[1]


def test_a_cpu_call_ignores_the_switch(switch: Callable[[bool], None]):
    q = torch.randn(1, 8, 2, 16)
    clear_caches()
    keys = []
    for value in (False, True):
        switch(value)
        keys.append(memo.key_of(("q",), (q,)))
        assert not AttentionProblem.of(Operands(q, q, q), Options(8, 8, 0.1)).allows_tf32
    assert keys[0] == keys[1]


def test_tracing_does_not_read_the_switch(switch: Callable[[bool], None]):
    """The op reads the switch when it runs, so that a compiled call follows the switch, too."""
    switch(True)
    compiled = torch.compile(lambda x: x + allows_tf32(), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 0
    assert allows_tf32()
