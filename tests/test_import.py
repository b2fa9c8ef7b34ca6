"""Importing flashtile needs only torch, imports nothing else, and changes no global state.

The checks run in new processes, since this one has imported everything already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[1]
OPTIONAL = ("triton", "transformers", "rich", "matplotlib", "gguf", "accelerate", "huggingface_hub")

# PyTorch works without NumPy, too, with a warning.
BLOCK = f"import sys\nfor name in {(*OPTIONAL, 'numpy')!r}: sys.modules[name] = None\n"

CALLS = """
import torch, flashtile
whole = torch.compile(flashtile.flash_attn_func, fullgraph=True, backend="aot_eager")
for attend in whole, flashtile.flash_attn_func:
    q, k, v = (torch.randn(2, 5, 4, 8, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, causal=True)
    out.sum().backward()
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    print(torch.allclose(out, want, atol=1e-5), all(x.grad.isfinite().all() for x in (q, k, v)))
"""

IMPORT = """
import gc, json, logging, os, sys, time, warnings
import torch
import torch.nn.functional as F

def state():
    cuda = torch.backends.cuda
    return {
        "random numbers": torch.get_rng_state().tolist(),
        "default dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "determinism": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "SDPA flags": [
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ],
        "SDPA": [id(F.scaled_dot_product_attention), id(torch._C._nn.scaled_dot_product_attention)],
        "environment": dict(os.environ),
        "path": list(sys.path),
        "log handlers": [repr(handler) for handler in logging.getLogger().handlers],
        "warning filters": [repr(entry) for entry in warnings.filters],
    }

before, modules = state(), set(sys.modules)
gc.collect()  # of torch's objects: half of the time, where it falls due meanwhile
start = time.thread_time()
import flashtile
milliseconds = 1e3 * (time.thread_time() - start)
new = sorted(set(sys.modules) - modules)
after = state()
changed = [name for name in before if before[name] != after[name]]
print(json.dumps({"new": new, "milliseconds": milliseconds, "changed": changed}))
"""

SCORE_FUNCTION = """
before = set(sys.modules)
q, k, v = (torch.randn(2, 5, 4, 8, requires_grad=True) for _ in range(3))
slopes = torch.rand(4, requires_grad=True)
out = flashtile.attention(
    q, k, v, score_mod=lambda score, b, h, i, j: torch.tanh(score) + slopes.exp()[h] * (j - i)
)
out.sum().backward()
assert slopes.grad.abs().sum() > 0
print(json.dumps(sorted(set(sys.modules) - before)))
"""

GPU_BACKENDS = """
from flashtile import backends
names = "hopper", "triton"
print(*(f"flashtile.backends.{name}" in sys.modules for name in names))
@torch.compile(fullgraph=True, backend="eager")
def hints(x):
    return x, [backends.BACKENDS[name].HINTS for name in names]
print(hints(torch.zeros(2))[1] == [backends.BACKENDS[name].HINTS for name in names])
"""

SUBMODULES = """
import pkgutil, sys
import torch.nn.functional as F
of_pytorch = F.scaled_dot_product_attention
for package in "integrations", "testing", "bert_padding", "models", "modules":
    assert f"flashtile.{package}" not in sys.modules, package
    assert package in dir(flashtile), package
assert callable(flashtile.integrations.sdpa.install)
assert F.scaled_dot_product_attention is of_pytorch  # until it is installed
assert callable(flashtile.testing.assert_close)
assert callable(flashtile.bert_padding.unpad_input)
assert callable(flashtile.models.gpt.GPTLMHeadModel)
for package in flashtile.layers, flashtile.losses, flashtile.models, flashtile.modules:
    for module in pkgutil.iter_modules(package.__path__):
        assert getattr(package, module.name).__name__ == f"{package.__name__}.{module.name}"
        assert module.name in dir(package)
try:
    flashtile.atention
except AttributeError as error:
    print(error)
"""

TWO_RANKS = """
from flashtile.distributed import ContextParallel
from flashtile.testing.wires import run_ranks
q = torch.randn(1, 32, 4, 8)
mask = flashtile.BlockMask.from_dense(torch.ones(32, 32).tril().bool(), (8, 8))
def attend(comm):
    parallel = ContextParallel.over(comm)
    layout = parallel.layout(seq_len=32)
    out = parallel.attention(*[layout.shard(q)] * 3, layout, block_mask=mask)
    return layout.unshard(out)
want = flashtile.attention(q, q, q, block_mask=mask)
print(*(torch.allclose(out, want, atol=1e-5) for out in run_ranks(2, attend)))
"""


def run(code: str, *paths: Path) -> list[str]:
    """The lines that `code` prints in a fresh process, with `paths` in front on its path."""
    found_first = os.pathsep.join(map(str, (*paths, REPOSITORY)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": found_first},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a process says of `import flashtile`, then of a score function.

    The optional packages look installed: parts of torch would import Triton.
    """
    folder = tmp_path_factory.mktemp("installed")
    for name in OPTIONAL:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
    return [json.loads(line) for line in run(IMPORT + SCORE_FUNCTION, folder)]


@pytest.fixture(scope="module")
def blocked() -> list[str]:
    """What a process without the optional packages says of calls, of backends, of submodules, and
    of ranks.
    """
    return run(BLOCK + CALLS + GPU_BACKENDS + SUBMODULES + TWO_RANKS)


def test_calls_work_with_optional_packages_blocked(blocked):
    """Also the first call of a process when it is a compiled one."""
    assert blocked[:2] == ["True True"] * 2 and blocked[5] == "True True"


def test_the_first_call_that_asks_for_a_gpu_backend_imports_it(blocked):
    """Also a compiled one. A call on a CPU imports none."""
    assert blocked[2:4] == ["False False", "True"]


def test_a_score_function_imports_no_compiler(imported):
    """The import of PyTorch's compiler takes seconds, which the first call would take longer."""
    compiler = ("torch._dynamo", "torch._inductor", "torch._functorch._aot_autograd", "sympy")
    assert not [name for name in imported[1] if name.startswith(compiler)]


@pytest.mark.parametrize("name", OPTIONAL)
def test_blocking_works(name):
    attempt = f"try:\n    import {name}\nexcept ImportError:\n    print('blocked')\n"
    assert run(BLOCK + attempt) == ["blocked"]


def test_import_is_light(imported, record_property):
    """It needs only torch, which is there, and the standard library. The time is printed, not
    asserted, because it depends on the machine's load."""
    milliseconds = imported[0]["milliseconds"]
    print(f"import flashtile after torch: {milliseconds:.1f} ms of processor time")
    record_property("import_milliseconds", milliseconds)
    packages = {name.partition(".")[0] for name in imported[0]["new"]}
    assert packages - sys.stdlib_module_names == {"flashtile"}


def test_import_has_no_side_effect(imported):
    assert imported[0]["changed"] == []


def test_public_submodules_are_attributes_of_the_package(blocked):
    """Imported when first used: `import flashtile` and no further line, as the README shows."""
    assert blocked[4] == "module 'flashtile' has no attribute 'atention'"
