"""AdamW, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import lr_scheduler

if TYPE_CHECKING:  # it checks what is made here
    from .settings import OptimizerSettings, ScheduleSettings

SCHEDULES = ("cosine", "linear", "constant")


def make_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019). Matrices decay; biases and norms do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [p for p in parameters if p.dim() >= 2],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.eps,
        fused=True,
    )


def make_schedule(schedule: ScheduleSettings, peak: float, steps: int) -> Callable[[int], float]:
    """The learning rate of a step, counted from 0, in a run of `steps`.

    It rises linearly over the warm-up and reaches `peak` with its last step. A class of
    torch.optim.lr_scheduler then counts its steps from the end of the warm-up.

    Raises:
        ValueError: there is no such schedule, or it does not take the options.
    """
    if schedule.name in SCHEDULES:
        if schedule.options:
            raise ValueError(f"schedule.options: {schedule.name} has none, got {schedule.options}")
        return partial(learning_rate, steps=steps, peak=peak, schedule=schedule)
    pytorch = getattr(lr_scheduler, schedule.name, None)
    if not (isinstance(pytorch, type) and issubclass(pytorch, lr_scheduler.LRScheduler)):
        raise ValueError(
            f"schedule.name: {schedule.name!r} is not one of {', '.join(SCHEDULES)}, and no class "
            "of torch.optim.lr_scheduler"
        )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=peak)
    try:
        scheduler = pytorch(optimizer, **schedule.options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"schedule.options: {error}") from error
    rates = [float(scheduler.get_last_lr()[0])]

    def rate(step: int) -> float:
        # A resumed run counts from the start, so that a checkpoint needs no state of a schedule.
        optimizer.step()
        while len(rates) <= step - schedule.warmup_steps:
            scheduler.step()
            rates.append(float(scheduler.get_last_lr()[0]))
        if step < schedule.warmup_steps:
            return rates[0] * (step + 1) / schedule.warmup_steps
        return rates[step - schedule.warmup_steps]

    return rate


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleSettings) -> float:
    """The learning rate of step `step`, counted from 0, of a run of `steps`.

    It rises linearly over the warm-up, reaches `peak` with its last step, and then stays, or falls
    along a line or a half cosine to `final_share` of the peak with step `decay_steps`, and stays.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    last = schedule.decay_steps or steps
    progress = min(1.0, (step + 1 - schedule.warmup_steps) / (last - schedule.warmup_steps))
    left = 1 - progress if schedule.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (schedule.final_share + (1 - schedule.final_share) * left)
