"""One judge of calls: outputs and gradients against the reference's, by the rule.

`tolerance.py` has the rule, `error_model.py` the least error that it allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .error_model import attention_in_float8, floor_of, rounding_variance
from .inputs import generator, normal
from .tolerance import assert_close, plain_dtype

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
