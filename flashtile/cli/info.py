"""``flashtile info``: versions, devices, and which backends work here or why they do not."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from ..call import dispatch
from ..problem import AttentionProblem, Operands, Options
from . import machine

# The dtypes of the plain causal call with gradients that is used to ask the backends.
DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn")
HEAD_DIM, LENGTH = 64, 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: text)")


def run(args: argparse.Namespace) -> int:
    """Print the result of `collect`."""
    report = collect()
    print(json.dumps(report, indent=1) if args.json else as_text(report))
    return 0


def collect() -> dict[str, Any]:
    """Everything that determines how flashtile runs on this machine, ready for JSON."""
    gpus = machine.gpus()
    devices = ["cpu", *(str(gpu["device"]) for gpu in gpus)]
    return {
        "versions": {**machine.versions(), "commit": machine.commit()},
        "cpu": machine.cpu(),
        "gpus": gpus,
        "backends": {
            name: {device: support(name, device) for device in devices} for name in dispatch.ORDER
        },
        "transformers": transformers_state(),
        "caches": caches(),
        "environment": {
            name: os.environ.get(name) for name in ("FLASHTILE_CHECK", "FLASHTILE_CACHE")
        },
    }


def support(backend: str, device: str) -> dict[str, list[str]]:
    """The dtypes in which a backend runs a plain call on a device, and reasons for the others."""
    options = Options(LENGTH, LENGTH, HEAD_DIM**-0.5, window_right=0)
    works, objections = [], []
    for name in DTYPES:
        x = torch.empty(1, LENGTH, 1, HEAD_DIM, dtype=getattr(torch, name), device=device)
        problem = AttentionProblem.of(Operands(x, x, x), options)
        reasons = dispatch.BACKENDS[backend].unsupported_reasons(problem)
        if reasons:
            objections += reasons
        else:
            works.append(name)
    return {"dtypes": works, "reasons": list(dict.fromkeys(objections))}


def transformers_state() -> dict[str, str]:
    """Whether `integrations.transformers.register` works here, found out by calling it."""
    if machine.package_version("transformers") is None:
        return {"state": "transformers is not installed"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            from ..integrations.transformers import register

            name = register()
        except ImportError as error:
            return {"state": f"register() does not work here: {error}"}
    state = {"state": f"register() works; then attn_implementation={name!r}"}
    warned = [str(warning.message) for warning in caught if name in str(warning.message)]
    return {**state, "warning": warned[0]} if warned else state


def caches() -> dict[str, dict[str, Any]]:
    """The folders of compiled kernels, and their sizes."""
    triton = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    folder = Path(triton)
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    mib = sum(path.stat().st_size for path in files) / 2**20
    return {"triton": {"folder": str(folder), "files": len(files), "mib": round(mib, 1)}}


def as_text(report: dict[str, Any]) -> str:
    """The result of `collect` as text."""
    cpu = report["cpu"]
    features = ", ".join(name for name, there in cpu["features"].items() if there)
    absent = ", ".join(name for name, there in cpu["features"].items() if not there)
    lines = [
        f"{name:<14}{value or 'not installed'}"
        for name, value in report["versions"].items()
        if name != "commit" or value  # a wheel has no commit
    ]
    lines += ["", f"{'cpu':<14}{cpu['model']}, {cpu['threads']} threads, {cpu['vectors']}"]
    lines += [f"{'':<14}has {features or 'none of the listed features'}; lacks {absent or 'none'}"]
    for gpu in report["gpus"]:
        lines.append(
            f"{gpu['device']:<14}{gpu['name']}, capability {gpu['capability']}, "
            f"{gpu['memory_gib']} GiB, {gpu['multiprocessors']} multiprocessors"
        )
    lines += ["", "backends, in order of preference"]
    for name, devices in report["backends"].items():
        for device, answer in devices.items():
            yes = f"yes: {', '.join(answer['dtypes'])}" if answer["dtypes"] else "no"
            lines.append(f"  {name:<8} on {device:<8} {yes}")
            lines += [f"{'':<22}- {reason}" for reason in answer["reasons"]]
    lines += ["", *(f"{'transformers':<14}{text}" for text in report["transformers"].values())]
    for name, cache in report["caches"].items():
        lines.append(
            f"{name + ' cache':<14}{cache['folder']}: {cache['files']} files, {cache['mib']} MiB"
        )
    lines += [f"{'environment':<14}{text}" for text in _environment(report["environment"])]
    return "\n".join(lines)


def _environment(values: dict[str, str | None]) -> list[str]:
    """The environment variables with their values and effects."""
    check, cache = values["FLASHTILE_CHECK"], values["FLASHTILE_CACHE"]
    where = {None: "only for CPU tensors", "": "only for CPU tensors", "0": "never"}
    return [
        f"FLASHTILE_CHECK{f'={check}' if check else ' is not set'}: "
        f"the values in cu_seqlens, page tables, ... are checked {where.get(check, 'always')}",
        f"FLASHTILE_CACHE{f'={cache}' if cache else ' is not set'}: "
        "the folder of tuned tile sizes" + ("" if cache else " is the default folder"),
    ]
