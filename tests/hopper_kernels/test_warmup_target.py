"""What `flashtile warmup --target` compiles without a GPU is what the calls on the GPU need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from configurations import FULL

pytest.importorskip("triton", reason="the package triton is not installed")
if torch.cuda.is_available():
    pytest.skip("replaces the CUDA driver", allow_module_level=True)

from triton import knobs
from triton.runtime import driver

from flashtile import clear_caches
from flashtile.cli import model_calls, warmup
from flashtile.gpu.described import current_target
from flashtile.gpu.launch import read_kernels_folder
from flashtile_command import main

from .fake_cuda import as_if_on_a_gpu, fake_driver

pytestmark = pytest.mark.slow

# A process that has compiled for a GPU that is not here launches no kernels of other tests.
IS_OWN_PROCESS = os.environ.get("FLASHTILE_OWN_PROCESS") == "1"
in_its_own_process = pytest.mark.skipif(
    not IS_OWN_PROCESS, reason="runs in the process that another test starts"
)

GEMMA_2 = {
    "model_type": "gemma2",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 40,
    "attn_logit_softcapping": 50.0,
}
GPT_OSS = {**GEMMA_2, "model_type": "gpt_oss", "attn_logit_softcapping": None}


@pytest.mark.skipif(IS_OWN_PROCESS, reason="starts a process that runs the others")
@pytest.mark.skipif(knobs.runtime.interpret, reason="needs the compiler")
def test_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"FLASHTILE_OWN_PROCESS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def in_this_process(function: Callable[[Any], Any], items: list[Any], processes: int) -> Any:
    for item in items:
        yield item, function(item)


@pytest.fixture(scope="module", autouse=True)
def _gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with fake_driver(tmp_path_factory.mktemp("cuda"), records=False):
        yield


@pytest.fixture(autouse=True)
def _small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_calls, "LENGTHS", (512,))
    monkeypatch.setattr(model_calls, "CAPACITY", 512)
    monkeypatch.setattr(warmup, "in_processes", in_this_process)


def compilations(
    calls: list[model_calls.Call], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The kernels that calls on the GPU compile because Triton's cache lacks them."""
    made: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            made.append(src.name)

    monkeypatch.setattr(knobs.compilation, "listener", listen)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    with as_if_on_a_gpu():
        for call in calls:
            call.run("cpu")
    return made


@in_its_own_process
@pytest.mark.parametrize(
    ("config", "purpose", "page_size"),
    [(GPT_OSS, "training", 0), *([(GEMMA_2, "serving", 16)] if FULL else [])],
)
def test_calls_find_the_kernels_of_a_folder_that_has_moved(
    config: dict[str, Any],
    purpose: str,
    page_size: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, moved, path = tmp_path / "made", tmp_path / "moved", tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with monkeypatch.context() as patch:
        active = driver.active
        patch.setattr(driver, "_active", active)  # puts back what the command replaces
        patch.setattr(knobs.compilation, "store_binary_only", False)
        patch.setenv("TRITON_CACHE_DIR", str(made))
        command = ["warmup", "--target=sm_90", f"--model={path}", f"--page-size={page_size}"]
        assert main([*command, f"--for={purpose}"]) == 0
    assert current_target.gpu is None
    kernels = sorted(made.rename(moved).glob("*/*kernel.cubin"))
    printed = capsys.readouterr().out
    assert f"{len(kernels)} of {len(kernels)}\n" in printed
    shutil.rmtree(kernels[0].parent)  # compiled again, so they are counted
    monkeypatch.setenv("FLASHTILE_KERNELS", str(moved))
    calls = model_calls.calls_of(config, purpose, page_size)
    assert compilations(calls, tmp_path / "cache", monkeypatch) == [kernels[0].stem]


def test_a_missing_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_caches()
    monkeypatch.setenv("FLASHTILE_KERNELS", "/nowhere")
    with pytest.raises(FileNotFoundError, match="FLASHTILE_KERNELS: got '/nowhere', want a folder"):
        read_kernels_folder()
