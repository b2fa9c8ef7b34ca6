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

import torch
from torch import Tensor


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
