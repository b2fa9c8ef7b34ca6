"""``flashtile flash-attn`` and ``flashtile xformers``: processes that know nothing of flashtile
import it under another name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from compileall import compile_dir
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from flashtile.cli import flash_attn
from flashtile.integrations.flash_attn_hook import NAMES
from flashtile.integrations.flash_attn_modules import FLASH_ATTN_2, PACKAGES, XFORMERS
from flashtile_command import main

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import importlib.metadata, importlib.util, sys, threading

before = set(sys.modules)
import site
site.addsitedir(FOLDER)
assert set(sys.modules) - before <= {"site", "__future__", HOOK}, set(sys.modules) - before
assert importlib.metadata.version("flash-attn") == VERSION
assert "torch" not in sys.modules

names = ["flash_attn", "flash_attn.bert_padding", "flash_attn_interface", "flash_attn_2_cuda"]
threads = [threading.Thread(target=importlib.import_module, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sys.modules.keys() >= set(names)

from flash_attn import __version__, flash_attn_func
assert (__version__, flash_attn_func.__module__.split(".")[0]) == (VERSION, "flashtile")
assert importlib.util.find_spec("flash_attn.nothing") is None
try:
    import flash_attn.nothing
except ImportError as error:
    assert "flashtile has no flash_attn.nothing" in str(error), error
"""


HOOK = flash_attn.hook_of(FLASH_ATTN_2)


def command(action: str, folder: Path, *options: str, name: str = "flash-attn") -> int:
    return main([name, action, "--folder", str(folder), *options])


def run(program: str, folder: Path, *more: Path) -> subprocess.CompletedProcess[str]:
    values = {"FOLDER": str(folder), "HOOK": HOOK, "VERSION": FLASH_ATTN_2.version}
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    path = os.pathsep.join(map(str, (*more, ROOT)))
    return subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, program])],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def real_flash_attn(folder: Path) -> None:
    (folder / "flash_attn").mkdir(parents=True)
    (folder / "flash_attn" / "__init__.py").write_text("__version__ = 'real'\n")


@pytest.mark.slow
def test_a_process_that_calls_nothing(tmp_path, capsys):
    assert command("install", tmp_path) == 0
    written = capsys.readouterr().out.splitlines()
    assert written == [f"wrote {tmp_path / name}" for name in flash_attn.contents(FLASH_ATTN_2)]
    done = run(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stderr


@pytest.mark.slow
def test_a_real_flash_attn_that_is_installed_later_comes_first(tmp_path):
    assert command("install", tmp_path / "") == 0
    real_flash_attn(tmp_path / "later")
    program = (
        "import site; site.addsitedir(FOLDER); import flash_attn; print(flash_attn.__version__)"
    )
    assert run(program, tmp_path, tmp_path / "later").stdout == "real\n"


def test_uninstall_removes_what_install_wrote(tmp_path, capsys):
    (tmp_path / "other.py").write_text("")
    assert command("install", tmp_path) == 0
    assert command("install", tmp_path) == 0  # again, over its own files
    assert command("status", tmp_path) == 0
    assert f"as version {FLASH_ATTN_2.version}" in capsys.readouterr().out
    assert command("uninstall", tmp_path) == 0
    assert files(tmp_path) == {"other.py"}
    assert command("uninstall", tmp_path) == 1
    assert "nothing to remove" in capsys.readouterr().err
    assert command("status", tmp_path) == 0
    assert "not installed" in capsys.readouterr().out


def test_another_version_leaves_none_of_the_old_files(tmp_path):
    assert command("install", tmp_path) == 0
    assert command("install", tmp_path, "--version", "2.6.3") == 0
    assert [path.name for path in tmp_path.glob("*.dist-info")] == ["flash_attn-2.6.3.dist-info"]


@pytest.mark.slow
def test_a_choice_reaches_every_process(tmp_path):
    assert command("install", tmp_path, "--only", "2", "--version", "2.6.3") == 0
    program = """
import site; site.addsitedir(FOLDER)
import importlib.metadata, importlib.util, flash_attn
print(flash_attn.__version__, importlib.metadata.version("flash-attn"))
print(importlib.util.find_spec("flash_attn_interface"))
"""
    assert run(program, tmp_path).stdout.splitlines() == ["2.6.3 2.6.3", "None"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--only", "3"), "--only: want 2 among them"),
        (("--only", "2,5"), r"versions: got \(2, 5\)"),
        (("--version", "2.5"), "version: got '2.5'"),
    ],
)
def test_a_choice_that_is_none_writes_nothing(options, message, tmp_path, capsys):
    assert command("install", tmp_path, *options) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not files(tmp_path)


def test_a_real_flash_attn_is_not_replaced(tmp_path, capsys):
    real_flash_attn(tmp_path)
    before = files(tmp_path)
    assert command("install", tmp_path) == 1
    assert "the real flash-attn is installed" in capsys.readouterr().err
    assert files(tmp_path) == before
    assert command("status", tmp_path) == 0
    assert "real" in capsys.readouterr().out


def test_an_error_leaves_nothing_behind(tmp_path, capsys):
    (tmp_path / f"{HOOK}.pth").mkdir()
    assert command("install", tmp_path) == 1
    assert "nothing was installed" in capsys.readouterr().err
    assert files(tmp_path) == {f"{HOOK}.pth"}


def test_an_error_keeps_an_earlier_installation(tmp_path, capsys, monkeypatch):
    assert command("install", tmp_path, "--version", "2.6.3") == 0
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    write = Path.write_text

    def fail(path: Path, *args: object, **kwargs: object) -> int:
        if path.parent.name == "flash_attn-2.8.4.dist-info" and path.name == "RECORD":
            raise OSError("no space left on device")
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", fail)
    assert command("install", tmp_path) == 1
    assert "nothing was installed: no space" in capsys.readouterr().err
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_hook_has_the_names_of_all_packages():
    roots = {root.split(".")[0] for package in PACKAGES for root in package.roots}
    assert {name: set(names) for name, names in NAMES.items()} == {
        "flash_attn": roots,
        "xformers": set(XFORMERS.roots),
    }


@pytest.mark.slow
def test_xformers_beside_flash_attn(tmp_path, capsys):
    """Two installations in one folder, each with its own files."""
    assert command("install", tmp_path) == command("install", tmp_path, name="xformers") == 0
    program = f"""
import importlib.metadata, importlib.util, sys
sys.path.insert(0, {str(ROOT)!r})
import site
site.addsitedir(FOLDER)
assert importlib.metadata.version("xformers") == {XFORMERS.version!r}
assert "torch" not in sys.modules
import xformers.ops as xops
from xformers.ops.fmha.attn_bias import LowerTriangularMask
assert xops.LowerTriangularMask is LowerTriangularMask
assert importlib.util.find_spec("xformers.nothing") is None
from flashtile.integrations import xformers as door
with door.install():
    pass
import flash_attn, xformers.ops
assert xformers.ops is xops
"""
    done = run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    capsys.readouterr()
    compile_dir(tmp_path, quiet=1)
    assert command("uninstall", tmp_path, name="xformers") == 0
    assert files(tmp_path) == {
        *flash_attn.contents(FLASH_ATTN_2),
        f"flash_attn-{FLASH_ATTN_2.version}.dist-info",
        "__pycache__",
        str(Path(cache_from_source(tmp_path / f"{HOOK}.py")).relative_to(tmp_path)),
    }
    (tmp_path / "xformers").mkdir()
    (tmp_path / "xformers" / "__init__.py").write_text("")
    assert command("install", tmp_path, name="xformers") == 1
    assert "the real xformers is installed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_xformers_that_is_installed_later_lacks_what_it_lacks(tmp_path):
    assert command("install", tmp_path / "", name="xformers") == 0
    write_real = tmp_path / "later" / "xformers"
    write_real.mkdir(parents=True)
    (write_real / "__init__.py").write_text("")
    program = """
import site
site.addsitedir(FOLDER)
import xformers
try:
    import xformers.ops
except ModuleNotFoundError as error:
    print(error)
"""
    assert run(program, tmp_path, tmp_path / "later").stdout == "No module named 'xformers.ops'\n"
