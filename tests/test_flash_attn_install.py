"""`flashtile.integrations.flash_attn`: code that imports flash_attn runs on flashtile."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile import as_flash_attn
from flashtile.integrations import flash_attn
from flashtile.integrations.flash_attn_modules import INSTEAD, PACKAGES

# The tests hide installed packages of these names.
REAL = [package.distribution for package in PACKAGES if flash_attn.is_installed(package)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(REAL), reason=f"installed here: {REAL}"),
]


def loaded() -> dict[str, object]:
    """The modules under flash_attn's names."""
    return {name: module for name, module in sys.modules.items() if name.startswith("flash_attn")}


@pytest.fixture(autouse=True)
def _leaves_no_trace():
    before = (list(sys.meta_path), loaded())
    yield
    assert (sys.meta_path, loaded()) == before


def write(path: Path, text: str) -> Path:
    """A file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_functions_compute_inside_and_are_gone_outside():
    with flash_attn.install():
        from flash_attn import flash_attn_func
        from flash_attn.bert_padding import unpad_input
        from flash_attn.layers.rotary import apply_rotary_emb

        q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
        assert torch.equal(flash_attn_func(q, k, v), flashtile.flash_attn_func(q, k, v))
        assert callable(unpad_input) and callable(apply_rotary_emb)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("flash_attn")


def test_takes_effect_without_a_block_and_ends_once():
    installation = flash_attn.install()
    try:
        assert importlib.import_module("flash_attn").__version__ == "2.8.4"
    finally:
        installation.uninstall()
        installation.uninstall()
    assert importlib.util.find_spec("flash_attn") is None


def test_a_stub_that_answers_for_every_name_is_put_back():
    """Its submodule is in ``sys.modules``, and no attribute of it that could be deleted."""
    stub = types.ModuleType("flash_attn")
    vars(stub)["__getattr__"] = lambda name: None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", stub)
        patch.setitem(sys.modules, "flash_attn.bert_padding", types.ModuleType("bert_padding"))
        with flash_attn.install(force=True):
            assert importlib.import_module("flash_attn") is not stub
        assert sys.modules["flash_attn"] is stub


def test_blocks_nest_and_end_after_an_error():
    with flash_attn.install():
        first = importlib.import_module("flash_attn")
        with flash_attn.install():
            assert importlib.import_module("flash_attn") is first
        assert importlib.import_module("flash_attn") is first
        with pytest.raises(ZeroDivisionError), flash_attn.install():
            raise ZeroDivisionError
        assert importlib.import_module("flash_attn") is first
    assert importlib.util.find_spec("flash_attn") is None


@pytest.mark.parametrize(
    "name", [name for package in PACKAGES for name in package.modules], ids=lambda name: name
)
def test_every_module_of_the_table_is_found_and_imports(name):
    with flash_attn.install():
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.name == name
        module = importlib.import_module(name)
        assert module.__spec__.name == module.__name__ == name


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.distribution)
def test_metadata_names_flashtile(package):
    with flash_attn.install():
        assert importlib.metadata.version(package.distribution) == package.version
        metadata = importlib.metadata.metadata(package.distribution.replace("-", "_"))
        assert "flashtile" in metadata["Summary"]
        for root in package.roots:
            top = root.split(".")[0]
            assert package.distribution in importlib.metadata.packages_distributions()[top]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(package.distribution)


def test_modules_beside_attention_compute(seed):
    x, cos, sin = torch.randn(2, 5, 3, 8), torch.randn(7, 4), torch.randn(7, 4)
    with flash_attn.install():
        from flash_attn.losses.cross_entropy import CrossEntropyLoss, cross_entropy_loss
        from flash_attn.modules.block import Block
        from flash_attn.modules.mha import MHA, get_alibi_slopes
        from flash_attn.ops.triton.rotary import apply_rotary
        from flash_attn.utils.generation import InferenceParams

        rotated = apply_rotary(x, cos, sin, 2, interleaved=True)
        wanted = flashtile.layers.rotary.apply_rotary_emb(x, cos, sin, True, seqlen_offsets=2)
        assert torch.equal(rotated, wanted)
        lengths = (cos.square() + sin.square())[2:, None].repeat_interleave(2, dim=-1)
        back = apply_rotary(rotated, cos, sin, 2, interleaved=True, inplace=True, conjugate=True)
        assert back is rotated
        torch.testing.assert_close(back, x * lengths)
        logits, labels = torch.randn(4, 9), torch.arange(4)
        losses, _ = cross_entropy_loss(logits, labels)
        torch.testing.assert_close(CrossEntropyLoss()(logits, labels), losses.mean())
        assert len(get_alibi_slopes(4)) == 4
        mixer = MHA(16, 4, causal=True, layer_idx=0)
        assert mixer(torch.randn(1, 3, 16), inference_params=InferenceParams(8, 1)).shape[1] == 3
        # Of a batch of two, which a single tensor would be unpacked into.
        h, r = Block(16, partial(MHA, num_heads=4, use_flash_attn=True))(torch.randn(2, 3, 16))
        assert h.shape == r.shape == (2, 3, 16)


def test_what_is_lacking_is_named():
    with flash_attn.install():
        module = importlib.import_module("flash_attn.flash_attn_interface")
        with pytest.raises(
            AttributeError, match=r"flashtile has no flash_attn\..*interface.nothing"
        ):
            _ = module.nothing
        with pytest.raises(ImportError, match=r"flashtile has no flash_attn\..*interface.nothing"):
            exec("from flash_attn.flash_attn_interface import nothing")
        with pytest.raises(ModuleNotFoundError, match=r"flashtile has no flash_attn.models.vit"):
            importlib.import_module("flash_attn.models.vit")
        assert importlib.util.find_spec("flash_attn.models.vit") is None


@pytest.mark.parametrize("name", INSTEAD)
def test_what_to_use_instead_is_named(name):
    """By an error for the whole module, or for the name in it."""
    module, _, attribute = name.rpartition(".")
    with flash_attn.install():
        known = any(name in package.modules for package in PACKAGES)
        with pytest.raises(ImportError, match=f"has no {name}; use {INSTEAD[name]}"):
            importlib.import_module(name)
        if importlib.util.find_spec(module) is not None and module != "flash_attn":
            owner = importlib.import_module(module)
            with pytest.raises(AttributeError, match=f"has no {name}; use {INSTEAD[name]}"):
                getattr(owner, attribute)
    assert not known


@pytest.fixture
def real_folder(tmp_path, monkeypatch):
    """A folder of `sys.path` to put a "real" flash_attn in."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in loaded():
        del sys.modules[name]
    importlib.invalidate_caches()


def test_an_installed_flash_attn_is_kept_unless_forced(real_folder):
    write(real_folder / "flash_attn/__init__.py", "from .flash_attn_interface import x\n")
    write(real_folder / "flash_attn/flash_attn_interface.py", "x = 'real'\n")
    with flash_attn.install():
        real = importlib.import_module("flash_attn")
        assert real.x == "real"
        with flash_attn.install(force=True):
            ours = importlib.import_module("flash_attn.flash_attn_interface")
            assert ours.flash_attn_func and not hasattr(ours, "x")
            assert importlib.metadata.version("flash-attn") == "2.8.4"
        assert importlib.import_module("flash_attn") is real
        assert importlib.import_module("flash_attn.flash_attn_interface").x == "real"


@pytest.mark.parametrize("imported_first", [False, True])
def test_a_lone_flash_attention_4_is_kept(real_folder, imported_first):
    write(real_folder / "flash_attn/cute/__init__.py", "")
    write(real_folder / "flash_attn/cute/interface.py", "x = 'real'\n")
    if imported_first:
        importlib.import_module("flash_attn.cute.interface")
    with flash_attn.install():
        assert importlib.import_module("flash_attn.cute.interface").x == "real"
        import flash_attn as ours

        assert ours.cute.interface.x == "real"
        assert ours.flash_attn_func


SCRIPT = """
import sys, flash_attn
if __name__ == "__main__":
    import beside
    print(flash_attn.flash_attn_func.__module__, sys.argv)
    sys.exit(3)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_as_flash_attn_runs_scripts_and_modules(tmp_path, as_module):
    script = write(tmp_path / "program.py", SCRIPT)
    write(tmp_path / "beside.py", "")
    target = ["-m", "program"] if as_module else [str(script)]
    command = [sys.executable, "-m", "flashtile.as_flash_attn", *target, "--size", "3"]
    folder = tmp_path if as_module else Path(flashtile.__file__).parents[1]
    python_path = str(Path(flashtile.__file__).parents[1])
    done = subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": python_path}, capture_output=True, text=True
    )
    assert done.returncode == 3, done.stderr
    module, arguments = done.stdout.split(maxsplit=1)
    assert module.startswith("flashtile.")
    assert arguments.strip() == str([str(script), "--size", "3"])


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--unknown"]])
def test_as_flash_attn_says_how_to_call_it(arguments):
    with pytest.raises(SystemExit, match="usage: "):
        as_flash_attn.main(arguments)


def test_flash_attention_3_and_4():
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    wanted, wanted_lse = flashtile.attention(q, k, v, causal=True, return_lse=True)
    with flash_attn.install():
        from flash_attn.cute import flash_attn_func as fa4_func
        from flash_attn.cute.interface import _flash_attn_fwd
        from flash_attn_3.flash_attn_interface import flash_attn_with_kvcache
        from flash_attn_interface import flash_attn_func as fa3_func

        assert torch.equal(fa3_func(q, k, v, None, True), wanted)
        assert torch.equal(fa4_func(q, k, v, causal=True)[0], wanted)
        assert torch.equal(_flash_attn_fwd(q, k, v, causal=True, return_lse=True)[1], wanted_lse)
        assert len(flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)) == 4
        owners = importlib.metadata.packages_distributions()
        assert "flash_attn_3" in owners["flash_attn_interface"]
        assert {"flash-attn", "flash-attn-4"} <= set(owners["flash_attn"])
