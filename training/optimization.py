"""AdamW, and the learning rate as a function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from .settings import OptimizerSettings, ScheduleSettings


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


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleSettings) -> float:
    """The learning rate of step `step`, counted from 0, of a run of `steps`.

    It rises linearly over the warm-up, reaches `peak` with its last step, and then stays or falls
    along a half cosine to `final_share` of the peak with the last step of the run.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.name == "constant":
        return peak
    progress = (step + 1 - schedule.warmup_steps) / (steps - schedule.warmup_steps)
    share = schedule.final_share
    return peak * (share + (1 - share) * 0.5 * (1 + math.cos(math.pi * progress)))
