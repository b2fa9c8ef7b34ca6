"""The launches of calls on an H100 that is not here."""

from __future__ import annotations

import torch
from compiled_kernels import DEVICES

from flashtile.backends.hopper.forward.launch import (
    config_of,
    forward_launch,
    lists_of,
    outputs,
    tile_list,
)
from flashtile.gpu.launch import Launch
from flashtile.problem import AttentionProblem, Operands, Options

from .inputs import unwritten_spans

CAPABILITY, SHARED_LIMIT = DEVICES["sm_90"][1:]
MULTIPROCESSORS = 132


def launch_of(operands: Operands, options: Options, **facts: object) -> Launch:
    """The launch that the call would make on the device; `facts` of its problem may be set."""
    problem = AttentionProblem.of(operands, options)
    problem = problem._replace(capability=CAPABILITY, device_type="cuda", **facts)
    counter = torch.zeros(2, dtype=torch.int32)
    config = config_of(problem)
    out, lse, *rows = (allocate() for allocate in outputs(operands, config))
    tiles = next((allocate() for allocate in tile_list(problem, config, operands)), None)
    launch = forward_launch(
        problem, config, operands, out, lse, MULTIPROCESSORS, counter, tiles, *rows
    )
    launch.arguments["blocks"] = lists_of(problem, config, operands)
    if problem.spans > 0:
        launch.arguments["blocks"] = unwritten_spans(problem, config, operands)
    return launch
