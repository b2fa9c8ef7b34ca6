"""One call, compared with the float64 reference by the rule of `flashtile.testing`."""

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
from ...dropout import draw_rng_state, keep_mask
from ...masks import BlockMask
from ...problem import FLOAT8, dtype_name
from ...testing import (
    assert_close,
    attention_in_float8,
    attention_reference,
    attention_varlen_reference,
    attention_with_kvcache_reference,
    floor_of,
    generator,
    normal,
    plain_dtype,
    rounding_variance,
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

Run = dict[str, Tensor]  # results by name


@dataclass(frozen=True)
class Outcome:
    """What became of a case: right, wrong (`failures`), or refused (`unsupported`)."""

    case: Case
    call: str  # as one would write it, with shapes for tensors
    failures: tuple[str, ...] = ()
    unsupported: str = ""


def outcome_of(case: Case, device: str, seed: int) -> Outcome:
    """Makes the call on `device` and judges everything that it returns, writes or differentiates.

    The inputs depend on `seed` and the case's name only, so one case can be repeated.
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
    except Exception as error:  # whatever a call raises is a failure in the report
        return Outcome(case, written, _crash(error))
    return Outcome(case, written, tuple(failures))


def described(call: Call, case: Case) -> str:
    """The call in one line: tensors by dtype and shape, everything else as it is."""

    def text(value: object) -> str:
        if isinstance(value, Tensor) and value.dtype == torch.int32:
            return str(value.tolist()) if value.dim() == 1 else f"int32{[*value.shape]}"
        if isinstance(value, Tensor):
            return f"{dtype_name(value.dtype)}{[*value.shape]}"
        return repr(value)

    given = ", ".join(f"{name}={text(value)}" for name, value in call.arguments.items())
    return f"flashtile.{call.function}({given}, backend={case.backend!r})"


def _failures(call: Call, case: Case, device: str, seed: int) -> list[str]:
    got, dout = _made(call, case, device, seed)
    float8 = case.dtype in map(dtype_name, FLOAT8)
    # Attention in float8 has 16-bit results.
    dtype = torch.bfloat16 if float8 else getattr(torch, case.dtype)
    run = partial(_reference, call, _kept(call, device, seed), dout)
    truth = run(compute_dtype=torch.float64)
    if float8:
        plain = run(compute_dtype=torch.float32, attend=attention_in_float8)
        floor = dict.fromkeys(truth, torch.zeros(()))
    else:
        plain = run(compute_dtype=plain_dtype(dtype))
        variance = run(compute_dtype=torch.float64, attend=rounding_variance(dtype))
        floor = {n: floor_of(x) for n, x in variance.items() if n not in CACHES}
    found = []
    for name, x in got.items():
        x = x.double() if x.dtype in FLOAT8 else x
        unused = truth[name].isnan() & x.isnan()  # parts of a cache that no sequence owns
        x, wanted = x.masked_fill(unused, 0), truth[name].masked_fill(unused, 0)
        low = plain[name].masked_fill(unused, 0)
        try:
            assert_close(name, x, wanted, low, floor=floor.get(name, 0.0), dtype=dtype)
        except AssertionError as error:
            found.append(str(error))
    return found


def _made(call: Call, case: Case, device: str, seed: int) -> tuple[Run, Tensor | None]:
    """What the call makes, on the CPU, and the gradient that flowed back through `out`."""
    leaves = {name: call.arguments[name].requires_grad_() for name in call.leaves}
    given = {name: _moved(name, x, device) for name, x in call.arguments.items()}
    torch.manual_seed(seed)
    function = getattr(api, call.function)
    out, lse = (x.cpu() for x in function(**given, return_lse=True, backend=case.backend))
    got = {"out": out, "lse": lse}
    got |= {name: given[name].cpu() for name in CACHES if name in given}
    if not leaves:
        return got, None
    dout = normal(generator(seed + 1), *out.shape, dtype=out.dtype)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout)
    return got | {f"d{n}": x for n, x in zip(leaves, gradients, strict=True)}, dout


def _moved(name: str, value: Any, device: str) -> Any:
    """An argument as the call gets it; a cache is written to, so it gets a copy."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(device, copy=name in CACHES)
    return BlockMask.from_dense(value, TILE) if name == "block_mask" else value


def _kept(call: Call, device: str, seed: int) -> Tensor | None:
    """The elements that dropout keeps after `torch.manual_seed(seed)`: bool (B, Hq, M, N)."""
    arguments = call.arguments
    if "dropout_p" not in arguments:
        return None
    q, k = arguments["q"], arguments["k"]
    B, M, N = q.shape[0], q.shape[1], k.shape[1]
    if call.function == "attention_varlen":
        B = len(arguments["cu_seqlens_q"]) - 1
        M, N = arguments["max_seqlen_q"], arguments["max_seqlen_k"]
    torch.manual_seed(seed)
    state = draw_rng_state(torch.device(device)).cpu()
    batch, heads, queries = (torch.arange(size) for size in (B, q.shape[-2], M))
    return keep_mask(state, arguments["dropout_p"], batch, heads, queries, 0, N)


def _reference(
    call: Call, keep: Tensor | None, dout: Tensor | None, compute_dtype: torch.dtype, **how: Any
) -> Run:
    """The reference's results by the names of `_made`, computed in `compute_dtype`."""
    leaves = {
        name: call.arguments[name].detach().to(compute_dtype).requires_grad_()
        for name in call.leaves
    }
    given = call.arguments | leaves | ({} if keep is None else {"keep": keep})
    result = REFERENCES[call.function](**given, compute_dtype=compute_dtype, **how)
    run = {name: getattr(result, name) for name in ("out", "lse", *CACHES) if hasattr(result, name)}
    if dout is None:
        return run
    gradients = torch.autograd.grad(result.out, list(leaves.values()), dout.to(result.out.dtype))
    return run | {f"d{n}": x for n, x in zip(leaves, gradients, strict=True)}


def _crash(error: Exception) -> tuple[str, ...]:
    """An exception, and the last line of ours that it passed."""
    ours = [
        f"{Path(frame.filename).relative_to(PACKAGE.parent)}:{frame.lineno} in {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)
        if PACKAGE in Path(frame.filename).parents
    ]
    return f"{type(error).__name__}: {error}", f"at {ours[-1]}"
