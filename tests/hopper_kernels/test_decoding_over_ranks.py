"""What a rank does in a repeated step of decoding: no launch through Triton's Python code, and few
operations of PyTorch, none of which makes the host wait.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="the package triton is not installed")
if torch.cuda.is_available():
    pytest.skip("replaces the CUDA driver", allow_module_level=True)
if shutil.which("cc") is None:
    pytest.skip("needs a C compiler", allow_module_level=True)

from flashtile.distributed import ContextParallel

from .fake_cuda import Driver, as_if_on_a_gpu, fake_driver
from .silent_communicator import SilentCommunicator

# They launch nothing on a GPU.
VIEWS = {
    "as_strided", "detach", "empty", "new_empty", "scalar_tensor", "select", "slice", "transpose",
    "unbind", "unsqueeze", "view", "split",
}  # fmt: skip


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    with fake_driver(tmp_path_factory.mktemp("cuda"), records=False) as active, as_if_on_a_gpu():
        yield active


class Operations(TorchDispatchMode):
    """The operations that launch something, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class Steps:
    """Steps of decoding on the first of two ranks, whose cache has blocks of four tokens."""

    def __init__(self, driver: Driver, by_host: bool, appends: bool, **options: Any) -> None:
        self.driver, self.by_host, self.options = driver, by_host, options
        self.parallel = ContextParallel.over(SilentCommunicator(0, 2))
        self.tensors = [torch.zeros(2, 1, 4, 64, dtype=torch.bfloat16)]
        self.tensors += [torch.zeros(2, 512, 2, 64, dtype=torch.bfloat16) for _ in range(2)]
        if appends:
            self.tensors += [torch.ones(2, 1, 2, 64, dtype=torch.bfloat16) for _ in range(2)]

    def run(self, length: int) -> Tensor:
        lengths = length if self.by_host else torch.full((2,), length, dtype=torch.int32)
        out: Tensor = self.parallel.decode(
            *self.tensors, cache_seqlens=lengths, block=4, **self.options
        )
        return out

    def operations(self, length: int) -> list[str]:
        """Those of a step after some others."""
        for earlier in range(5):
            self.run(earlier)
        in_python = self.driver.thread.in_python
        for earlier in range(5, length):  # in blocks of both ranks
            self.run(earlier)
        with Operations() as made:
            self.run(length)
        assert self.driver.thread.in_python == in_python
        return made.names


@pytest.mark.parametrize(
    ("length", "appends", "options", "wanted"),
    [
        (400, False, {}, ["full", "cat"]),
        (400, True, {"causal": True}, ["copy_", "copy_", "full", "cat"]),
        (404, True, {"causal": True}, ["full", "cat"]),  # the other rank owns the new token
        (404, True, {"window_size": (99, 0)}, ["full", "full", "full", "cat"]),
    ],
)
def test_lengths_that_the_host_knows_cost_the_device_nothing(
    driver: Driver, length: int, appends: bool, options: dict[str, Any], wanted: list[str]
) -> None:
    assert Steps(driver, True, appends, **options).operations(length) == wanted


@pytest.mark.parametrize("by_host", [False, True])
def test_a_prepared_step_keeps_no_tensor(driver: Driver, by_host: bool) -> None:
    steps = Steps(driver, by_host, True, causal=True)
    kept = [ref(x) for x in steps.tensors]
    for length in range(8):
        kept.append(ref(steps.run(length)))
    steps.tensors.clear()
    gc.collect()
    assert [x() for x in kept] == [None] * len(kept)


@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (99, 0)}])
def test_lengths_on_the_device_are_not_read(driver: Driver, options: dict[str, Any]) -> None:
    names = Steps(driver, False, True, **options).operations(400)
    # All of these may be captured in a CUDA graph.
    assert set(names) <= {
        "add", "arange", "cat", "clamp", "floor_divide", "full", "gt", "minimum", "mul",
        "remainder", "sub", "where", "_to_copy",
    }  # fmt: skip
    assert len(names) <= 24
