"""One process of `test_runs`: runs that several processes do together, each resumed once.

Run as ``python spread_runs.py rank world_size rendezvous-file folder group``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from tiny_runs import settings

from training.train import Run

# By a name: changes of the settings, and what spreads the same run over several processes. The last
# two divide windows among the processes.
DIVIDED = "trainer.context_parallel=2"
NO_DROPOUT = ("model.attention_dropout=0", "model.residual_dropout=0")
RUNS = {
    "fsdp2": ((), ("trainer.strategy=fsdp2",)),
    "ddp-divided": (
        (*NO_DROPOUT, "data.packed=true"),
        ("trainer.strategy=ddp", DIVIDED),
    ),
    "fsdp2-divided": (
        (*NO_DROPOUT, "data.packed=false"),
        ("trainer.strategy=fsdp2", DIVIDED),
    ),
}

# With DeepSpeed, an extra that the tests do not install.
ZERO_RUNS = {
    f"zero{stage}": (NO_DROPOUT, (f"trainer.strategy=zero{stage}",)) for stage in (1, 2, 3)
}
GROUPS = {"pytorch": RUNS, "deepspeed": ZERO_RUNS}


def let_fabric_use_deepspeed_on_a_cpu() -> None:
    """DeepSpeed runs there, after compiling a part of it; Fabric takes it for CUDA alone."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
    from lightning_fabric.strategies import deepspeed

    module: Any = deepspeed
    module.CUDAAccelerator = deepspeed.Accelerator
    module._validate_device_index_selection = lambda devices: None
    namespace = argparse.Namespace(device_rank=-1)
    module.argparse = SimpleNamespace(Namespace=lambda device_rank: namespace)


def main(rank: str, world: str, rendezvous: str, folder: str, group: str) -> None:
    if group == "deepspeed":
        let_fabric_use_deepspeed_on_a_cpu()
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=int(rank), world_size=int(world))
    # Fabric starts no processes where torchrun has started them.
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    for name, (changes, spread) in GROUPS[group].items():
        how = settings(Path(folder) / name, *changes, *spread, f"trainer.devices={world}")
        run = Run(how)
        run.train()
        if rank == "0":
            shutil.rmtree(Path(how.run_dir) / "checkpoints" / "step-00000006")
        dist.barrier()
        run = Run(how)
        assert run.step == 4
        run.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
