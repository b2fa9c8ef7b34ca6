"""Runs a problem on the GPU: allocates the outputs, describes the tensors and launches."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from ...problem import AttentionProblem, Operands, lse_shape
from .arguments import WIDEST, Pointers, Sequences
from .forward_pass import forward_kernel
from .layouts import shared_rows
from .plan import CONSUMER_ROWS, KernelConfig, plan, section_of


class Launch(NamedTuple):
    """One kernel launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4

    def run(self) -> Any:
        """Launch on the current device; the compiled kernel."""
        return self.kernel[self.grid](**self.arguments, num_warps=self.warps)

    def run_again(self, compiled: Any) -> None:
        """Launch what `run` compiled for a call like this one."""
        ordered = (self.arguments[name] for name in self.kernel.arg_names)
        compiled[(*self.grid, 1, 1)[:3]](*ordered)


class Repeat(NamedTuple):
    """A plain launch that has been made before, to be made again with other tensors.

    Triton looks at every argument of every launch (types, numbers worth compiling in) to find the
    compiled kernel, and checks every descriptor, which takes longer than the launch itself. Calls
    that agree in `repeat_key` agree in all of that.
    """

    launcher: Any  # the compiled kernel and its grid
    descriptors: tuple[dict[str, Any] | None, ...]  # their fields: of q, k, v and out, twice
    rest: tuple[Any, ...]  # the arguments behind the counter

    def run(self, tensors: tuple[Tensor, ...], lse: Tensor, counter: Tensor) -> None:
        """Launch with new q, k, v and out."""
        moved = [
            None if fields is None else _described(fields, x)
            for fields, x in zip(self.descriptors, (*tensors, *tensors), strict=True)
        ]
        self.launcher(*moved, tensors[3], lse, counter, *self.rest)


ALIGNMENT = 16  # bytes, of what the copy engine reads
NOTHING_MORE = tuple(Operands._field_defaults.values())

_CACHE_SIZE = 1024
_known: dict[Any, Repeat] = {}
_compiled: dict[Any, list[Any]] = {}


def run_all(launches: list[Launch], key: Any) -> list[Any]:
    """Launch on the current device; the compiled kernels. Calls that agree in `key` skip what
    `Repeat` skips, from the second one on."""
    known = _compiled.get(key)
    if known is None:
        known = [launch.run() for launch in launches]
        _keep(_compiled, key, known)
        return known
    for launch, compiled in zip(launches, known, strict=True):
        launch.run_again(compiled)
    return known


def call_key(name: str, problem: AttentionProblem, tensors: Iterable[Tensor | None]) -> Any:
    """All that Triton would look at in the launches of a call, and more than it looks at."""
    return name, problem, *(None if x is None else _place(x) for x in tensors)


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.device.index, x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT


def _keep(store: dict[Any, Any], key: Any, value: Any) -> None:
    if len(store) >= _CACHE_SIZE:
        store.clear()
    store[key] = value


def forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem."""
    device = operands.q.device
    if device.index == torch.cuda.current_device():
        return _forward(problem, operands)
    with torch.cuda.device(device):
        return _forward(problem, operands)


def _forward(problem: AttentionProblem, operands: Operands) -> tuple[Tensor, Tensor]:
    q, k, v = operands[:3]
    counter = _counter(q.device)
    key = repeat_key(problem, operands)
    known = _known.get(key)
    if known is not None:
        out = q.new_empty((*q.shape[:-1], problem.Dv))
        lse = torch.empty((problem.B, problem.Hq, problem.M), dtype=torch.float32, device=q.device)
        known.run((q, k, v, out), lse, counter)
        return out, lse
    out, lse, launch = forward_launch(problem, operands, _multiprocessors(q.device), counter)
    if launch.grid[0] == 0:
        return out, lse
    (compiled,) = run_all([launch], call_key("forward", problem, operands))
    if key is not None and is_readable(q) and is_readable(k) and is_readable(v):
        ordered = tuple(launch.arguments[name] for name in launch.kernel.arg_names)
        first = launch.kernel.arg_names.index("counter") + 1
        fields = tuple(None if x is None else {**vars(x), "base": None} for x in ordered[:8])
        _keep(_known, key, Repeat(compiled[launch.grid[0], 1, 1], fields, ordered[first:]))
    return out, lse


def repeat_key(problem: AttentionProblem, operands: Operands) -> Any:
    """What decides a plain launch; None for a call with more than q, k, v to it, or one whose
    tensors start where the copy engine cannot."""
    if problem.layout != "dense" or operands[3:] != NOTHING_MORE:
        return None
    q, k, v = operands[:3]
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
        return None
    return problem, q.device.index, q.stride(), k.stride(), v.stride()


def forward_launch(
    problem: AttentionProblem, operands: Operands, multiprocessors: int, counter: Tensor
) -> tuple[Tensor, Tensor, Launch]:
    """Outputs and the launch that fills them; `counter` is two zeros."""
    config, options = plan(problem), problem.options
    q, k, v = (readable(x) for x in operands[:3])
    shape = (*operands.q.shape[:-1], problem.Dv)
    if config.IS_RAGGED:  # rows that belong to no sequence are written by no program
        out = q.new_zeros(shape)
        lse = torch.full(lse_shape(operands), -torch.inf, dtype=torch.float32, device=q.device)
    else:
        out = q.new_empty(shape)
        lse = torch.empty(lse_shape(operands), dtype=torch.float32, device=q.device)
    tiles = -(-problem.M // config.BLOCK_M) * problem.B * problem.Hq
    slopes = operands.alibi_slopes
    arguments = {
        **descriptors(q, k, v, readable(out), config),
        "out_ptr": out,
        "lse_ptr": lse,
        "counter": counter,
        "at": Sequences(
            operands.cu_seqlens_q,
            operands.cu_seqlens_k,
            operands.seqused_q,
            operands.seqused_k,
        ),
        "pointers": Pointers(None if slopes is None else slopes.contiguous(), operands.sink),
        "B": problem.B,
        "M": problem.M,
        "N": problem.N,
        "total_q": operands.q.shape[0],
        "total_k": operands.k.shape[0],
        "heads": problem.Hq,
        "group": problem.group,
        "section": section_of(problem),
        "tiles": tiles,
        "left": min(options.window_left, WIDEST),
        "right": min(options.window_right, WIDEST),
        "chunk": min(options.attention_chunk, WIDEST),
        "alibi_batch": 0 if slopes is None or slopes.dim() == 1 else slopes.shape[1],
        "scale": options.softmax_scale,
        "softcap": options.softcap,
        "cfg": config,
    }
    return out, lse, Launch(forward_kernel, (min(multiprocessors, tiles),), arguments)


def is_readable(x: Tensor) -> bool:
    """Whether the copy engine can read `x`: rows at multiples of 16 bytes, elements contiguous."""
    *outer, dim = x.stride()
    step = ALIGNMENT // x.element_size()
    return dim == 1 and x.data_ptr() % ALIGNMENT == 0 and not any(s % step or s == 0 for s in outer)


def readable(x: Tensor) -> Tensor:
    """`x`, or a copy that the copy engine can read."""
    if x.shape[0] == 0:  # it reads from no empty tensor
        x = x.new_zeros((1, *x.shape[1:]))
    return x if is_readable(x) else x.clone(memory_format=torch.contiguous_format)


def descriptors(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, config: KernelConfig
) -> dict[str, TensorDescriptor | None]:
    """The tensors in tiles of their first columns, and in tiles of the rest where there is one."""
    of_keys = {"tiles": config.BLOCK_D, "rests": config.REST_D}
    of_values = {"tiles": config.BLOCK_DV, "rests": config.REST_DV}
    found = {}
    for part in ("tiles", "rests"):
        for name, x, rows, columns in (
            ("q", q, CONSUMER_ROWS, of_keys[part]),
            ("k", k, config.BLOCK_N, of_keys[part]),
            ("v", v, config.BLOCK_N, of_values[part]),
            ("o", out, CONSUMER_ROWS, of_values[part]),
        ):
            found[f"{name}_{part}"] = descriptor(x, rows, columns) if columns else None
    return found


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """`x` (batch, row, head, dim), or packed (row, head, dim), in boxes of `rows` rows of one
    head."""
    shape, strides = list(x.shape), list(x.stride())
    if x.dim() == 3:
        shape, strides = [1, *shape], [shape[0] * strides[0], *strides]
    return TensorDescriptor(x, shape, strides, [1, rows, 1, columns], _layout(columns))


_layout = lru_cache(shared_rows)  # which takes longer to make than the rest of a descriptor


def _described(fields: dict[str, Any], x: Tensor) -> TensorDescriptor:
    """The descriptor of `x` with the fields of another tensor's, without the checks."""
    fresh = object.__new__(TensorDescriptor)
    fresh.__dict__ = {**fields, "base": x}
    return fresh


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_counters: dict[tuple[int, int], Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """Two zeros, which every launch leaves at zero; launches of one stream follow each other, so
    they share."""
    if torch.cuda.is_current_stream_capturing():  # a graph may run beside its stream
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = device.index, driver.active.get_current_stream(device.index)
    if key not in _counters:
        _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _counters[key]
