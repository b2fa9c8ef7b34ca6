"""Code that all launches share: tensors that TMA can read, and the counter of tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from ....gpu.described import current_target
from ....gpu.rows import at_boundary, is_aligned
from ....gpu.score_source import GLUON, GRADIENT, SCORE, function_of, source_of
from ....lru import Memo, memoised
from ....problem import Operands, Options
from ....score_mod.derivative import UNCHANGED, by_score
from .pipeline import ROWS_END, shared_rows
from .schedule import Sequences


def readable(x: Tensor) -> Tensor:
    """`x`, or a copy that TMA can read."""
    if x.shape[0] == 0:  # TMA cannot describe an empty tensor
        x = x.new_zeros((1, *x.shape[1:]))
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of `x` (batch, row, head, dim), or packed (row, head, dim), in boxes of `rows`
    rows of one head.
    """
    shape, strides = list(x.shape), list(x.stride())
    if x.dim() == 3:
        shape, strides = [1, *shape], [shape[0] * strides[0], *strides]
    return in_boxes(x, shape, strides, [1, rows, 1, columns])


def descriptor_of_sequences(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of packed `x` (row, head, dim) in boxes that end with their sequence: TMA reads
    zeros after it, and writes nothing there. `pipeline.box_at` has the indices.

    Raises:
        NotImplementedError: `x` has more rows than the indices can name.
    """
    row, head, _ = x.stride()
    end, (total, heads, dim) = ROWS_END.value, x.shape
    if total >= end:
        raise NotImplementedError(f"packed sequences: got {total} tokens, want fewer than {end}")
    # 2^30 times 2^34 elements of any size are no distance in memory.
    strides = [2**34 - row, row, row, head, 1]
    return in_boxes(x, [end + 1, end, end, heads, dim], strides, [1, 1, rows, 1, columns])


def in_boxes(x: Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    """A descriptor of `x` with another shape and strides, in boxes that wgmma reads."""
    return TensorDescriptor(
        x, shape, strides, box, _layout(box[-1], 8 * x.element_size(), len(box))
    )


_layout = memoised(128)(shared_rows)  # a layout takes longer to build than the descriptor


Config = TypeVar("Config")


def with_functions(config: Config, options: Options) -> Config:
    """A configuration whose kernel calls the score function and, in a backward, its derivative."""
    if not options.score_mod:
        return config
    functions = {"SCORE_MOD": function_of(source_of(options.score_mod, SCORE, GLUON))}
    gradient = by_score(options.score_mod_gradient)
    if hasattr(config, "SCORE_GRADIENT") and gradient != UNCHANGED:
        functions["SCORE_GRADIENT"] = function_of(source_of(gradient, GRADIENT, GLUON))
    return replace(config, **functions)  # type: ignore[type-var]  # all of them are dataclasses


def sequences_of(operands: Operands) -> Sequences:
    """The lengths and positions of a call that are tensors."""
    lengths = operands.cu_seqlens_q, operands.cu_seqlens_k, operands.seqused_q, operands.seqused_k
    cache = operands.page_table, operands.cache_batch_idx, operands.leftpad_k
    return Sequences(*map(at_boundary, (*lengths, operands.q_runs, operands.k_runs, *cache)))


_counters: Memo[tuple[int, int], Tensor] = Memo(256)


def tile_counter(device: torch.device) -> Tensor:
    """Two zeros on the current device, which every launch resets to zero. Launches on one stream
    run one after another, so they share the counter.
    """
    # A graph may run beside its stream.
    if current_target.gpu is not None or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = device.index, driver.active.get_current_stream(device.index)
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return counter
