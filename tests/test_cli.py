"""The command line: it finds its subcommands, imports only what it needs, and writes its files."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import processes
import pytest
import torch

import flashtile_command
from flashtile import __version__
from flashtile.call import dispatch
from flashtile.cli import info
from flashtile_command import main

pytestmark = pytest.mark.slow


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([flag])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"flashtile {__version__}"


@pytest.mark.parametrize(
    ("argv", "usage"),
    [
        (["unknown"], "usage: flashtile [-h] [-V] COMMAND"),
        (["--unknown"], "usage: flashtile [-h] [-V] COMMAND"),
        (["info", "--unknown"], "usage: flashtile info [-h] [--json]"),
    ],
)
def test_a_wrong_command_line_stops_with_the_usage_of_its_command(
    argv: list[str], usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(usage)


@pytest.mark.parametrize("argv", [["--help"], ["--version"], [], ["--unknown"]])
def test_help_and_version_import_no_torch(argv: list[str]) -> None:
    loaded = _python(
        "import sys; from flashtile_command import main\n"
        f"try: main({argv})\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'flashtile') if name in sys.modules])"
    )
    assert loaded.endswith("[]")


def test_without_a_command_it_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: flashtile")
    assert "``" not in printed  # markup of docstrings


def test_help_keeps_names_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    assert "the Triton backend on this GPU" in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    for name in flashtile_command.COMMANDS:
        assert name in printed
        assert find_spec(f"flashtile.cli.{name.replace('-', '_')}")


def test_only_the_command_asked_for_is_imported() -> None:
    loaded = _python(
        "import sys; from flashtile_command import main\n"
        "try: main(['info', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = ('flashtile.cli.tune', 'transformers', 'triton')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert loaded.endswith("[]")


def test_the_package_runs_as_a_module() -> None:
    done = processes.python("-m", "flashtile", "--version")
    assert done.stdout.strip() == f"flashtile {__version__}"


# info


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a new process, since registering is global and importing transformers takes seconds."""
    monkeypatch.setattr(info, "transformers_state", lambda: {"state": "not asked"})


@pytest.mark.usefixtures("no_transformers")
def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["flashtile"] == __version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert list(found["backends"]) == list(dispatch.ORDER)
    on_cpu = found["backends"]["cpu"]["cpu"]
    assert {"float16", "bfloat16", "float32", "float64"} <= set(on_cpu["dtypes"])
    assert on_cpu["reasons"] == []


@pytest.mark.usefixtures("no_transformers")
def test_info_for_people(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHTILE_CHECK", "1")
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for word in ("flashtile", __version__, "torch", "backends", "cpu", "FLASHTILE_CHECK=1"):
        assert word in printed
    assert "are on" in printed


def test_info_says_why_a_backend_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(problem: object) -> list[str]:
        return ["tensors are on cpu (this backend: moon)"]

    monkeypatch.setattr(dispatch.BACKENDS["cpu"], "unsupported_reasons", reasons)
    answer = info.support("cpu", "cpu")
    assert answer == {"dtypes": [], "reasons": ["tensors are on cpu (this backend: moon)"]}
    monkeypatch.setattr(info, "transformers_state", dict)
    assert "- tensors are on cpu (this backend: moon)" in info.as_text(info.collect())


def test_info_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashtile.cli.machine.package_version", lambda name: None)
    assert "not installed" in info.transformers_state()["state"]


def test_info_with_transformers() -> None:
    """The import alone registers nothing; to say whether it works, `info` registers."""
    pytest.importorskip("transformers")
    done = processes.python(
        "-c",
        "import flashtile.integrations.transformers as i, transformers.modeling_utils as m\n"
        "assert not [k for k in m.AttentionInterface().valid_keys() if 'tile' in k]\n"
        "from flashtile.cli.info import transformers_state as s; print(s()['state'])",
    )
    assert done.stdout.startswith("register() works")
