"""Compare a call with the float64 reference by the rule of `flashtile.testing`."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ... import api
from ...masks import BlockMask
from ...problem import FLOAT8, dtype_name
from ...testing import (
    Leaves,
    assert_close,
    attention_reference,
    attention_varlen_reference,
    attention_with_kvcache_reference,
    call_failures,
    drawn_keep,
    generator,
    plain_dtype,
)
from .calls import Call, Case

PACKAGE = Path(__file__).parents[2]
REFERENCES: dict[str, Callable[..., Any]] = {
    "attention": attention_reference,
    "attention_varlen": attention_varlen_reference,
    "attention_with_kvcache": attention_with_kvcache_reference,
}
CACHES = ("k_cache", "v_cache")
TILE = (64, 64)  # of block masks


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: right, wrong (`failures`), or refused (`unsupported`)."""

    case: Case
    call: str  # source text of the call, with shapes for tensors
    failures: tuple[str, ...] = ()
    unsupported: str = ""


def outcome_of(case: Case, device: str, seed: int) -> Outcome:
    """Make the call on `device` and compare its results, the caches it writes and its gradients.

    The inputs depend only on `seed` and the case's name, so a single case can be repeated.
    """
    seed = zlib.crc32(f"{seed} {case}".encode())
    dtype = getattr(torch, case.dtype)
    call = case.make(generator(seed), dtype)
    written = described(call, case)
    try:
        failures = _failures(call, case, device, seed)
    except NotImplementedError as error:
        if not str(error).startswith(f"backend {case.backend!r} cannot"):
            return Outcome(case, written, _crash(error))
        reasons = str(error).splitlines()[-1].partition(": ")[2]
        return Outcome(case, written, unsupported=reasons)
    except Exception as error:  # the report shows every exception as a failure
        return Outcome(case, written, _crash(error))
    return Outcome(case, written, tuple(failures))


def described(call: Call, case: Case) -> str:
    """The call in one line, with dtypes and shapes in place of tensors."""

    def text(value: object) -> str:
        if isinstance(value, Tensor) and value.dtype == torch.int32:
            return str(value.tolist()) if value.dim() == 1 else f"int32{[*value.shape]}"
        if isinstance(value, Tensor):
            return f"{dtype_name(value.dtype)}{[*value.shape]}"
        return getattr(value, "__name__", repr(value))  # of a function

    shown = ", ".join(f"{name}={text(value)}" for name, value in call.arguments.items())
    return f"flashtile.{call.function}({shown}, backend={case.backend!r})"


def _failures(call: Call, case: Case, device: str, seed: int) -> list[str]:
    float8 = case.dtype in map(dtype_name, FLOAT8)
    # Attention in float8 has 16-bit results.
    dtype = torch.bfloat16 if float8 else getattr(torch, case.dtype)
    arguments = {name: _moved(name, x, device) for name, x in call.arguments.items()}
    keep = _kept(call, device, seed)
    expected = call.arguments if keep is None else call.arguments | {"keep": keep}

    def call_backend(leaves: Leaves) -> tuple[Tensor, ...]:
        moved = {name: x.to(device) for name, x in leaves.items()}
        function = getattr(api, call.function)
        results = function(**(arguments | moved), return_lse=True, backend=case.backend)
        return tuple(x.cpu() for x in results)

    def reference(leaves: Leaves, **how: Any) -> Any:
        return REFERENCES[call.function](**(expected | leaves), **how)

    failures = call_failures(
        call_backend,
        reference,
        {name: call.arguments[name] for name in call.leaves},
        seed=seed,
        dtype=dtype,
        through=("out",) if call.leaves else (),
        in_float8=float8,
    )
    return failures + _cache_failures(arguments, partial(reference, {}), dtype)


def _cache_failures(
    arguments: dict[str, Any], reference: Callable[..., Any], dtype: torch.dtype
) -> list[str]:
    """The errors of the caches in `arguments` after the call."""
    if CACHES[0] not in arguments:
        return []
    failures = []
    truth, plain = (reference(compute_dtype=x) for x in (torch.float64, plain_dtype(dtype)))
    for name in CACHES:
        x, expected, low = arguments[name].cpu(), getattr(truth, name), getattr(plain, name)
        x = x.double() if x.dtype in FLOAT8 else x
        unused = expected.isnan() & x.isnan()  # parts of a cache that belong to no sequence
        try:
            assert_close(name, *(x.masked_fill(unused, 0) for x in (x, expected, low)), dtype=dtype)
        except AssertionError as error:
            failures.append(str(error))
    return failures


def _moved(name: str, value: Any, device: str) -> Any:
    """An argument on `device`; a cache is copied, because the call writes to it."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(device, copy=name in CACHES)
    return BlockMask.from_dense(value, TILE) if name == "block_mask" else value


def _kept(call: Call, device: str, seed: int) -> Tensor | None:
    """What dropout keeps in the call after `torch.manual_seed(seed)`."""
    arguments = call.arguments
    if "dropout_p" not in arguments:
        return None
    q, k = arguments["q"], arguments["k"]
    B, M, N = q.shape[0], q.shape[1], k.shape[1]
    if call.function == "attention_varlen":
        B = len(arguments["cu_seqlens_q"]) - 1
        M, N = arguments["max_seqlen_q"], arguments["max_seqlen_k"]
    return drawn_keep(seed, arguments["dropout_p"], (B, q.shape[-2], M, N), device)


def _crash(error: Exception) -> tuple[str, ...]:
    """An exception, and the last line of flashtile in its traceback."""
    ours = [
        f"{Path(frame.filename).relative_to(PACKAGE.parent)}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if PACKAGE in Path(frame.filename).parents
    ]
    return f"{type(error).__name__}: {error}", f"at {ours[-1]}"
