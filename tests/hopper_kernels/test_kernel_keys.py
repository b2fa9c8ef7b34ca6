"""A kernel has one key in Triton's cache, whichever kernel a process starts with."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")

KERNELS = (
    "backends.hopper.forward.kernel.forward_kernel",
    "backends.hopper.backward.kernel.backward_kernel",
    "backends.hopper.backward.dq.round_kernel",
    "backends.hopper.float8.kernel.float8_kernel",
    "backends.hopper.latent.kernel.latent_kernel",
    "backends.triton.forward_pass.forward_kernel",
    "backends.triton.backward_pass.key_gradient_kernel",
    "backends.triton.backward_pass.query_gradient_kernel",
    "ops.append.kernel.append_kernel",
)

PROGRAM = """
import sys
from importlib import import_module
from flashtile.gpu.launch import precompute_key

for name in sys.argv[1:]:
    module, function = name.rsplit(".", 1)
    kernel = getattr(import_module(f"flashtile.{module}"), function)
    precompute_key(kernel)
    print(name, kernel.cache_key)
"""


def test_keys_do_not_depend_on_the_order():
    keys = []
    for order in (KERNELS, KERNELS[::-1]):
        command = [sys.executable, "-c", PROGRAM, *order]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        keys.append(dict(line.split() for line in done.stdout.splitlines()))
    assert keys[0].keys() == set(KERNELS)
    assert keys[0] == keys[1]
