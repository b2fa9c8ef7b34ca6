"""One process of `test_runs`: runs that several processes do together, each resumed once.

Run as ``python spread_runs.py rank world_size rendezvous-file folder``.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

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


def main(rank: str, world: str, rendezvous: str, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=int(rank), world_size=int(world))
    # Fabric starts no processes where torchrun has started them.
    os.environ |= {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
    for name, (changes, spread) in RUNS.items():
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
