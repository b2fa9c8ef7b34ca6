"""The tolerance rule: the allowed error of every output and gradient on every machine.

Allowed error = twice the error that plain PyTorch makes in the same low precision on the same
inputs (largest absolute difference from float64), plus one rounding of the largest absolute value
of the truth. Both come from the same inputs, so there is no table of tolerances. -inf must match
exactly, and a NaN in the result always fails.

Where terms cancel, plain PyTorch's error is no measure: it may be 0 by luck, and other orders of
the same sums are equally correct. Every element is therefore always allowed a floor: a few
roundings of the terms that it is the sum of (`error_model.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .error_model import attention_in_float8, floor_of, rounding_variance
from .inputs import generator, normal


def plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which plain PyTorch is measured: the inputs' own, float32 for float64."""
    return torch.float32 if dtype == torch.float64 else dtype


def allowed_error(dtype: torch.dtype, truth: Tensor, plain: Tensor) -> float:
    """The allowed distance from `truth` (float64), given the result `plain` of plain PyTorch.

    `dtype` is the low precision, that of the call's inputs. Float64 has no truth above it: `plain`
    is then a float32 run, whose error is scaled by eps64 / eps32.
    """
    finite = truth.isfinite()
    if not finite.any():
        return 0.0
    eps = torch.finfo(dtype).eps
    plain_error = (plain.double() - truth.double())[finite].nan_to_num(nan=0.0).abs().max().item()
    if dtype == torch.float64:
        plain_error *= eps / torch.finfo(torch.float32).eps
    return 2 * plain_error + eps * truth[finite].abs().max().item()


def assert_close(
    name: str,
    got: Tensor,
    truth: Tensor,
    plain: Tensor,
    *,
    floor: Tensor | float = 0.0,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
) -> None:
    """Raise AssertionError with the worst element if `got` breaks the rule.

    Args:
        name: name of the result that is compared.
        got, truth, plain: tensors of one shape; `plain` is the result of plain PyTorch.
        floor: error that is always allowed, for all elements or for each of them.
        dtype: the low precision; got's own by default.
        seed: seed to print, to repeat the case.
    """
    where = f"{name} (seed {seed})" if seed is not None else name
    assert got.shape == truth.shape, (
        f"{where}: shape {tuple(got.shape)}, wanted {tuple(truth.shape)}"
    )
    assert plain.shape == truth.shape, f"{where}: plain has shape {tuple(plain.shape)}"
    if got.numel() == 0:
        return
    value, truth = got.detach().double(), truth.detach().double()
    error = (value - truth).abs().masked_fill(torch.isinf(truth) & (value == truth), 0.0)
    rule = allowed_error(dtype or got.dtype, truth, plain.detach())
    allowed = (
        torch.as_tensor(floor, dtype=torch.float64, device=truth.device)
        .detach()
        .expand(truth.shape)
        .clamp(min=rule)
    )
    failing = ~(error <= allowed)  # a NaN fails
    if not failing.any():
        return
    excess = (error / allowed).masked_fill(~failing, 0).nan_to_num(nan=torch.inf)
    worst = int(excess.flatten().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), truth.shape))
    raise AssertionError(
        f"{where}: {int(failing.sum())} of {got.numel()} elements fail "
        f"({100 * failing.double().mean().item():.2f} %), {int(value.isnan().sum())} NaN; "
        f"worst at {index}: got {value[index].item():.9g}, truth {truth[index].item():.9g}, "
        f"error {error[index].item():.3g}, allowed {allowed[index].item():.3g} "
        f"in {dtype or got.dtype}"
    )


# Calls: outputs and gradients against those of the reference.


Leaves = dict[str, Tensor]
Run = dict[str, Tensor]  # results by name
CAPTURED = "captured "  # and a number: the name of a leaf that a score function captures
DRAWS = 8  # of errors, whose mean square is taken for a variance


def output_failures(got: Run, reference: Callable[..., Any], dtype: torch.dtype) -> list[str]:
    """What is wrong with outputs of a call whose inputs have `dtype`, a sentence for each.

    Args:
        got: results by name.
        reference: ``reference(compute_dtype=..., ...)`` has attributes of these names.
    """

    def run(**how: Any) -> Run:
        result = reference(**how)
        return {name: getattr(result, name) for name in got}

    return _failures(got, run, dtype)


def call_failures(
    call: Callable[[Leaves], Any],
    reference: Callable[..., Any],
    leaves: Leaves,
    *,
    seed: int,
    dtype: torch.dtype,
    through: Sequence[str] = ("out", "out and lse"),
    in_float8: bool = False,
) -> list[str]:
    """What is wrong with the outputs of a call and its gradients, a sentence for each.

    Args:
        call: ``call(leaves)`` gives out or (out, lse), right after ``torch.manual_seed(seed)``.
        reference: ``reference(leaves, compute_dtype=..., ...)`` makes the same call.
        leaves: the arguments that have gradients, by name.
        dtype: that of the call's inputs, and of out.
        through: outputs, joined by " and ", through which random gradients flow back to all leaves.
        in_float8: the inputs hold float8 numbers, so plain PyTorch computes in float8, too.
    """
    inputs = {n: x.detach().requires_grad_(bool(through)) for n, x in leaves.items()}
    torch.manual_seed(seed)
    returned = call(inputs)
    outputs = (returned,) if isinstance(returned, Tensor) else returned
    results = dict(zip(("out", "lse"), outputs, strict=False))
    assert len(results) == len(outputs), f"the call gave {len(outputs)} results"
    assert results["out"].dtype == dtype
    if "lse" in results:
        assert results["lse"].dtype == torch.promote_types(dtype, torch.float32)
    g = generator(seed + 1)
    cotangents = {n: normal(g, *x.shape, dtype=x.dtype) for n, x in results.items()}
    paths = [path for path in through if set(path.split(" and ")) <= set(results)]

    def run(compute_dtype: torch.dtype, **how: Any) -> Run:
        cast = {n: x.detach().to(compute_dtype) for n, x in leaves.items()}
        cast = {n: x.requires_grad_(bool(through)) for n, x in cast.items()}
        result = reference(cast, compute_dtype=compute_dtype, **how)
        expected = {n: getattr(result, n) for n in results}
        return expected | _gradients(cast, expected, cotangents, paths)

    got = results | _gradients(inputs, results, cotangents, paths)
    for leaf, x in leaves.items():
        for path in paths:
            assert got[f"d{leaf} through {path}"].dtype == x.dtype
    return _failures(got, run, dtype, in_float8)


def _gradients(leaves: Leaves, results: Run, cotangents: Run, paths: list[str]) -> Run:
    """The gradient of every leaf through the outputs that each of `paths` joins."""
    gradients: Run = {}
    for path in paths:
        names = path.split(" and ")
        grads = torch.autograd.grad(
            [results[n] for n in names],
            list(leaves.values()),
            [cotangents[n].to(results[n].dtype) for n in names],
            retain_graph=True,
            allow_unused=True,
        )
        for (leaf, x), grad in zip(leaves.items(), grads, strict=True):
            gradients[f"d{leaf} through {path}"] = torch.zeros_like(x) if grad is None else grad
    return gradients


def _captured_variance(run: Callable[..., Run], dtype: torch.dtype, names: list[str]) -> Run:
    """The variances of these gradients of what a score function captures: means of the squares of
    errors that are drawn.
    """
    if not names:
        return {}
    errors = generator(0)
    attend = rounding_variance(dtype, errors)
    drawn = [run(compute_dtype=torch.float64, attend=attend) for _ in range(DRAWS)]
    return {n: torch.stack([x[n].square() for x in drawn]).mean(0) for n in names}


def _failures(
    got: Run, run: Callable[..., Run], dtype: torch.dtype, in_float8: bool = False
) -> list[str]:
    truth = run(compute_dtype=torch.float64)
    if in_float8:
        plain = run(compute_dtype=torch.float32, attend=attention_in_float8)
        floor = dict.fromkeys(truth, torch.zeros(()))
    else:
        plain = run(compute_dtype=plain_dtype(dtype))
        variance = run(compute_dtype=torch.float64, attend=rounding_variance(dtype))
        captured = [name for name in variance if name.startswith(f"d{CAPTURED}")]
        variance |= _captured_variance(run, dtype, captured)
        floor = {name: floor_of(x) for name, x in variance.items()}
    failures = []
    for name, x in got.items():
        try:
            assert_close(name, x, truth[name], plain[name], floor=floor[name], dtype=dtype)
        except AssertionError as error:
            failures.append(str(error))
    return failures
