"""Hugging Face's `kernels` imports the package from a folder, under another name and in any number
of copies. `kernels.get_local_kernel` does what `_load` does here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import processes
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

TWO_COPIES = """
import importlib.util, json, sys
from pathlib import Path

sys.path = [folder for folder in sys.path if not (Path(folder) / "flashtile").exists()]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
import torch


def _load(folder):
    variant = folder / "build" / "torch-universal"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(module):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 37, 4, 16, requires_grad=True) for _ in range(3))
    attend = torch.compile(module.flash_attn_func, backend="aot_eager", fullgraph=True)
    for function in (module.flash_attn_func, attend):
        function(q, k, v, causal=True, window_size=(9, 0)).square().sum().backward()
    cache = torch.zeros(2, 80, 4, 16), torch.zeros(2, 80, 4, 16)
    lengths = torch.tensor([3, 40], dtype=torch.int32)
    with torch.no_grad():
        out = module.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths)
    return out, *cache, q.grad, k.grad, v.grad


first, second = (_load(Path(folder)) for folder in sys.argv[1:])
results = [trained(module) for module in (first, second, first)]
for other in results[1:]:
    assert all(map(torch.equal, results[0], other))
for module, namespace in ((first, "flashtile"), (second, "flashtile_2")):
    assert hasattr(getattr(torch.ops, namespace), "attention_forward")
    assert module.operators.library.ns == namespace
assert not any(name.partition(".")[0] == "flashtile" for name in sys.modules)
"""


def test_two_copies_in_one_process(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        command = [sys.executable, str(ROOT / ".ci/kernel_hub.py"), str(folder)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    # Another version has other sources, so another name.
    metadata = folders[1] / "build/torch-universal/metadata.json"
    metadata.write_text(metadata.read_text().replace("_flashtile_", "_flashtile_next_"))
    result = processes.python("-c", TWO_COPIES, *folders, folder=tmp_path)
    assert result.returncode == 0, result.stderr[-4000:]


def test_the_package_imports_itself_relatively() -> None:
    for path in (ROOT / "flashtile").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [x.name for x in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert "flashtile" not in [name.partition(".")[0] for name in names], path
