"""`flashtile.integrations.flash_attn`: code that imports flash_attn runs on flashtile."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import sys
import types
from functools import partial
from pathlib import Path

import processes
import pytest
import torch

import flashtile
from flashtile import as_flash_attn
from flashtile.integrations import flash_attn, xformers
from flashtile.integrations.flash_attn_hook import Hook
from flashtile.integrations.flash_attn_modules import INSTEAD, PACKAGES, XFORMERS

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


def test_only_the_versions_that_were_asked_for():
    with flash_attn.install(versions=(2,)):
        assert importlib.import_module("flash_attn.bert_padding").pad_input
        for name in ("flash_attn_interface", "flash_attn_3", "flash_attn.cute"):
            assert importlib.util.find_spec(name) is None
            with pytest.raises(ModuleNotFoundError, match=f"No module named '{name}'"):
                importlib.import_module(name)
        assert not hasattr(importlib.import_module("flash_attn"), "cute")
    with flash_attn.install(versions=(3,)):
        assert importlib.import_module("flash_attn_interface").flash_attn_func
        assert importlib.util.find_spec("flash_attn") is None
    with flash_attn.install(versions=(4, 2)):
        assert importlib.import_module("flash_attn.cute").flash_attn_func
        assert importlib.util.find_spec("flash_attn_interface") is None


@pytest.mark.parametrize(("version", "results"), [("2.6.3", 4), ("2.7.0.post2", 5), (None, 5)])
def test_another_release(version, results):
    with flash_attn.install(version=version):
        from flash_attn import __version__
        from flash_attn.bert_padding import pad_input, unpad_input

        shown = version or "2.8.4"
        assert __version__ == importlib.metadata.version("flash-attn") == shown
        x, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
        found = unpad_input(x, mask)
        assert len(found) == results
        assert torch.equal(pad_input(found[0], found[1], 2, 3), x * mask.unsqueeze(-1))


def test_two_choices_at_once_are_refused():
    with flash_attn.install(versions=[2, 2], version="2.6"):
        before = sys.meta_path.copy(), loaded()
        for choice in ({"versions": (2, 3)}, {"version": "2.8.4"}):
            with pytest.raises(RuntimeError, match=r"installed with \(\(2,\), '2.6'\)"):
                flash_attn.install(**choice)
        assert (sys.meta_path, loaded()) == before
        with flash_attn.install(), flash_attn.install(version="2.6"):  # what is in effect
            assert importlib.import_module("flash_attn").__version__ == "2.6"
    with flash_attn.install(version="2.8.4"):
        assert importlib.import_module("flash_attn").__version__ == "2.8.4"


@pytest.mark.parametrize(
    ("environment", "choice", "release", "has_3"),
    [
        ({}, {"versions": (2,)}, "2.8.4", False),
        ({"versions": (2,), "version": "2.6.3"}, {}, "2.6.3", False),
        ({"versions": (2,), "version": "2.6.3"}, {"versions": (2, 3)}, "2.6.3", True),
    ],
)
def test_a_program_may_choose_otherwise_than_its_environment(
    environment, choice, release, has_3, monkeypatch
):
    hook = Hook("flash_attn", environment)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, hook])
    with flash_attn.install(**choice):
        assert importlib.import_module("flash_attn").__version__ == release
        assert (importlib.util.find_spec("flash_attn_interface") is not None) == has_3
    assert sys.meta_path[-1] is hook


@pytest.mark.parametrize(
    "choice",
    [
        {"versions": ()},
        {"versions": (2, 5)},
        {"versions": (3, 4)},
        {"version": "2.5.8"},
        {"version": "2.6", "versions": (3,)},
    ],
)
def test_a_choice_that_is_none(choice):
    with pytest.raises(ValueError, match=f"{next(iter(choice))}: got "):
        flash_attn.install(**choice)


def test_an_error_while_installing_restores_everything(monkeypatch):
    stub = types.ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    before = sys.meta_path.copy(), loaded()

    def fail(self):
        raise RuntimeWarning("a warning that is an error")

    monkeypatch.setattr(flash_attn._Finder, "open_names_in_time", fail)
    with pytest.raises(RuntimeWarning):
        flash_attn.install(force=True)
    assert (sys.meta_path, loaded()) == before


def test_submodules_are_attributes():
    with flash_attn.install():
        import flash_attn as ours

        assert "flash_attn.flash_attn_interface" not in sys.modules
        assert ours.flash_attn_interface.flash_attn_varlen_qkvpacked_func
        assert ours.ops.triton.layer_norm.layer_norm_fn
        with pytest.raises(AttributeError, match=r"has no flash_attn\.nothing; it provides "):
            _ = ours.nothing


def test_names_that_flash_attn_has_from_elsewhere(monkeypatch):
    einops = types.ModuleType("einops")
    vars(einops)["rearrange"] = lambda x, pattern: x
    monkeypatch.setitem(sys.modules, "einops", einops)
    with flash_attn.install():
        from flash_attn import flash_attn_varlen_kvpacked_func as wanted
        from flash_attn.bert_padding import rearrange
        from flash_attn.flash_attn_interface import flash_attn_cuda
        from flash_attn.modules.mha import flash_attn_varlen_kvpacked_func

        assert rearrange is einops.rearrange
        assert flash_attn_cuda.fwd and flash_attn_varlen_kvpacked_func is wanted


def test_a_function_is_timed(capsys):
    x, calls = torch.randn(2, 2), []
    with flash_attn.install():
        from flash_attn.utils.benchmark import benchmark_forward

        def function(x, scale):
            calls.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else 0)
            return x * scale

        timer, found = benchmark_forward(function, x, scale=2, repeats=3, desc="scaling")
        assert found.mean > 0 and timer.timeit(1).mean > 0
        assert "scaling - Forward pass" in capsys.readouterr().out
        assert set(calls) == {0} and len(calls) >= 4
        calls.clear()
        benchmark_forward(function, x, 2, verbose=False, amp=True, amp_dtype=torch.bfloat16)
        assert set(calls) == {torch.bfloat16}
        assert not capsys.readouterr().out


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
        with pytest.raises(ModuleNotFoundError, match=r"flashtile has no flash_attn.utils.testing"):
            importlib.import_module("flash_attn.utils.testing")
        assert importlib.util.find_spec("flash_attn.utils.testing") is None


@pytest.mark.parametrize("name", INSTEAD)
def test_what_to_use_instead_is_named(name, monkeypatch):
    """By an error for the whole module, or for the name in it."""
    module, _, attribute = name.rpartition(".")
    with flash_attn.install(), xformers.install():
        known = any(name in package.modules for package in (*PACKAGES, XFORMERS))
        message = rf"has no {name}, which [\w-]+ [\d.]+ has; use {re.escape(INSTEAD[name])}"
        monkeypatch.setitem(sys.modules, "einops", None)  # it has some of the names
        with pytest.raises(ImportError, match=message):
            importlib.import_module(name)
        assert importlib.util.find_spec(name) is None
        if module and importlib.util.find_spec(module) is not None and module != "flash_attn":
            owner = importlib.import_module(module)
            with pytest.raises(AttributeError, match=message):
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
    folder = tmp_path if as_module else Path(flashtile.__file__).parents[1]
    done = processes.python("-m", "flashtile.as_flash_attn", *target, "--size", 3, folder=folder)
    assert done.returncode == 3, done.stderr
    module, arguments = done.stdout.split(maxsplit=1)
    assert module.startswith("flashtile.")
    assert arguments.strip() == str([str(script), "--size", "3"])


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--unknown"]])
def test_as_flash_attn_says_how_to_call_it(arguments, capsys):
    with pytest.raises(SystemExit):
        as_flash_attn.main(arguments)
    assert "usage: " in capsys.readouterr().err


def test_as_flash_attn_chooses(tmp_path, capsys):
    script = write(tmp_path / "program.py", "import flash_attn; print(flash_attn.__version__)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [])
        patch.setattr(sys, "path", [*sys.path])
        as_flash_attn.main(["--only", "2", "--version", "2.6.3", str(script)])
    assert capsys.readouterr().out == "2.6.3\n"


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
