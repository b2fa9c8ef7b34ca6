"""Describe the machine of a measurement: versions, processor, devices, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import __version__

# Instruction sets that determine the speed of low precision on a CPU, by PyTorch's names.
CPU_FEATURES = ("avx2", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")


def package_version(name: str) -> str | None:
    """Version of an installed package, read from its metadata without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Versions of Python and of the relevant packages; None if a package is missing."""
    return {
        "flashtile": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "transformers": package_version("transformers"),
    }


def cpu() -> dict[str, object]:
    """Model, threads that PyTorch uses, vector instructions."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return {
        "model": _cpu_model(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "features": {
            name: bool(capabilities[name]) for name in CPU_FEATURES if name in capabilities
        },
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpus() -> list[dict[str, object]]:
    """Name, compute capability and memory of each CUDA (or ROCm) device."""
    properties = [
        torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())
    ]
    return [
        {
            "device": f"cuda:{index}",
            "name": gpu.name,
            "capability": f"{gpu.major}.{gpu.minor}",
            "memory_gib": round(gpu.total_memory / 2**30, 1),
            "multiprocessors": gpu.multi_processor_count,
        }
        for index, gpu in enumerate(properties)
    ]


def busy() -> str:
    """A warning if other programs keep the processor busy, else an empty string."""
    if not hasattr(os, "getloadavg"):
        return ""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < 0.5 * cores:
        return ""
    return f"the machine is busy (load {load:.1f} on {cores} cores): timings will be noisy"


def device_name(device: str) -> str:
    """One line that names the machine behind a PyTorch device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_cpu_model()}, {threads} thread{'s' if threads != 1 else ''}"


def missing_device(device: str) -> str | None:
    """Why this machine has no such PyTorch device; None if it has."""
    try:
        parsed = torch.device(device)
    except RuntimeError:
        return "no such device, want cpu or cuda:N"
    if parsed.type == "cuda" and not torch.cuda.is_available():
        return "no CUDA device here"
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        return f"no such device, there are {torch.cuda.device_count()} CUDA devices"
    return None if parsed.type in ("cpu", "cuda") else "want cpu or cuda:N"


def commit() -> str | None:
    """The commit of the checkout that this file belongs to, with ``-dirty`` if it has changes.

    The environment variable FLASHTILE_COMMIT names it if the code was copied without its history.
    """
    if named := os.environ.get("FLASHTILE_COMMIT"):
        return named
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # fails inside another project's checkout
        name = git("rev-parse", "--short=12", "HEAD")
        return f"{name}-dirty" if git("status", "--porcelain", "--", "..") else name
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance(device: str, command: str) -> dict[str, str | None]:
    """The origin of a measurement, which every line of a result contains."""
    packages = versions()
    return {
        "command": command,
        "date": date.today().isoformat(),
        "commit": commit(),
        "device": device_name(device),
        **{name: packages[name] for name in ("flashtile", "torch", "triton", "python")},
    }
