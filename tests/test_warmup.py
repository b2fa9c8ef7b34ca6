"""`flashtile warmup` without a GPU: what a model's config asks for, and how the work is divided."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import flashtile
from flashtile import api
from flashtile.backends.hopper.forward import plan
from flashtile.call import dispatch
from flashtile.call.layouts import Dense
from flashtile.call.prepare import describe
from flashtile.cli import in_processes, model_calls, warmup
from flashtile.cli.model_calls import Layer, layers_of
from flashtile.gpu import hardware
from flashtile.gpu.described import TARGETS, current_target
from flashtile.gpu.hardware import multiprocessors
from flashtile.problem import AttentionProblem, starts_after
from flashtile_command import main

pytestmark = pytest.mark.slow

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "float16",
}
QWEN = LLAMA | {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False}
MISTRAL = LLAMA | {"model_type": "mistral", "head_dim": 32, "sliding_window": 40}
GEMMA_2 = MISTRAL | {"model_type": "gemma2", "attn_logit_softcapping": 50.0}
BOTH_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA_3 = {
    "model_type": "gemma3",
    "dtype": "bfloat16",
    "text_config": {**MISTRAL, "model_type": "gemma3_text", "layer_types": BOTH_TYPES},
}
GPT_OSS = MISTRAL | {"model_type": "gpt_oss", "layer_types": BOTH_TYPES}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
LLAMA_4 = LLAMA | {
    "model_type": "llama4_text",
    "layer_types": ["chunked_attention", "full_attention"],
    "attention_chunk_size": 50,
}
BERT = {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}
GPT_2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4}
PLAIN, WIDE = Layer(4, 2, 16, 16), Layer(4, 2, 32, 32)

EXPECTED = {
    "llama": (LLAMA, [PLAIN]),
    "qwen": (QWEN, [PLAIN]),
    "mistral": (MISTRAL, [WIDE._replace(window=40)]),
    "gemma 2": (
        GEMMA_2,
        [WIDE._replace(window=40, softcap=50.0), WIDE._replace(softcap=50.0)],
    ),
    "gemma 3": (GEMMA_3, [WIDE._replace(window=40), WIDE]),
    "gpt-oss": (
        GPT_OSS,
        [WIDE._replace(window=40, has_sink=True), WIDE._replace(has_sink=True)],
    ),
    "deepseek": (DEEPSEEK, [Layer(4, 4, 24, 16)]),
    "llama 4": (LLAMA_4, [PLAIN._replace(chunk=50), PLAIN]),
    "bert": (BERT, [Layer(4, 4, 16, 16, causal=False)]),
    "gpt 2": (GPT_2, [Layer(4, 4, 16, 16)]),
}


@pytest.mark.parametrize(("config", "layers"), EXPECTED.values(), ids=list(EXPECTED))
def test_the_layers_of_a_model(config: dict[str, Any], layers: list[Layer]) -> None:
    assert layers_of(model_calls.text_config(config)) == layers


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**LLAMA, "model_type": "t5", "relative_attention_num_buckets": 32}, "relative position"),
        ({**LLAMA, "is_encoder_decoder": True}, "an encoder and a decoder"),
        ({**LLAMA, "alibi": True}, "ALiBi"),
        ({"model_type": "mamba", "hidden_size": 64}, "no `num_attention_heads`"),
        ({**LLAMA, "layer_types": ["moon_attention"]}, "moon_attention"),
    ],
)
def test_what_a_config_does_not_say_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        layers_of(config)


@pytest.mark.parametrize(("config", "layers"), EXPECTED.values(), ids=list(EXPECTED))
@pytest.mark.parametrize("page_size", [0, 16])
def test_every_call_of_a_model_runs(
    config: dict[str, Any], layers: list[Layer], page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_calls, "LENGTHS", (70,))
    monkeypatch.setattr(model_calls, "CAPACITY", 144)
    monkeypatch.setattr(model_calls, "BATCHES", (2,))
    calls = model_calls.calls_of(config, "both", page_size)
    kinds = {call.kind for call in calls}
    assert kinds == {"training", "packed training", "prefill"} | (
        {"decoding", "chunked prefill"} if layers[0].causal else set()
    )
    assert {call.dtype for call in calls} <= {"float16", "bfloat16"}
    for call in calls:
        warmup.make(call, "cpu")


def test_a_purpose_chooses_the_calls() -> None:
    kinds = {
        purpose: {call.kind for call in model_calls.calls_of(LLAMA, purpose, 0)}
        for purpose in model_calls.PURPOSES
    }
    assert kinds["training"] == {"training", "packed training"}
    assert kinds["serving"] == {"prefill", "decoding", "chunked prefill"}
    assert kinds["both"] == kinds["training"] | kinds["serving"]


def test_latents_are_decoded_as_one_head() -> None:
    calls = model_calls.calls_of(DEEPSEEK, "serving", 0)
    assert {call.layer for call in calls if call.kind == "decoding"} == {Layer(4, 1, 72, 64)}


@pytest.mark.parametrize("page_size", [0, 16])
def test_chunks_need_kernels_that_split_keys(
    page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []

    def explain(*call: Any, **options: Any) -> None:
        found = flashtile.explain(flashtile.attention_with_kvcache, *call, **options)
        reports.append(str(found))

    monkeypatch.setattr(current_target, "gpu", TARGETS["sm_90"])
    monkeypatch.setattr(hardware, "TRITON_IS_INSTALLED", True)
    monkeypatch.setattr(plan, "TRITON_VERSION", (3, 6))
    monkeypatch.setattr(api, "attention_with_kvcache", explain)
    flashtile.clear_caches()
    for call in model_calls.calls_of(MISTRAL | {"sliding_window": None}, "serving", page_size):
        if call.kind == "chunked prefill" and call.batch == 1:
            warmup.make(call, "cpu")
    (report,) = reports
    assert "-> triton: yes" in report and re.search(r"keys split into \d+ parts", report)


@pytest.mark.parametrize("page_size", [0, 16])
def test_values_of_latents_are_a_view(page_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(model_calls, "CAPACITY", 96)
    monkeypatch.setattr(api, "attention_with_kvcache", lambda *call, **_: seen.append(call))
    for call in model_calls.calls_of(DEEPSEEK, "serving", page_size):
        if call.kind == "decoding":
            warmup.make(call, "cpu")
    assert seen
    assert all(starts_after(k, v, 0) and v.shape[-1] == 64 for _, k, v, *_ in seen)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_config_is_read_from_its_file(is_folder: bool, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert model_calls.read_config(str(tmp_path if is_folder else path)) == LLAMA


def test_a_name_without_transformers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_calls, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'moon/rock'.*install transformers"):
        model_calls.read_config("moon/rock")


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []

    def here(function: Any, calls: list[Any], processes: int) -> Any:
        made.extend(calls)
        return ((call, None if number else OSError("lost")) for number, call in enumerate(calls))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(warmup, "in_processes", here)
    return made


def test_the_command_reports_what_failed(
    as_if_on_a_gpu: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["warmup", "--model", str(tmp_path), "--for", "serving"]) == 1
    printed = capsys.readouterr().out
    assert [str(call) for call in as_if_on_a_gpu] == printed.splitlines()[: len(as_if_on_a_gpu)]
    assert f"{len(as_if_on_a_gpu) - 1} of {len(as_if_on_a_gpu)} calls ready in" in printed
    assert "failed: prefill, 1 x 512 tokens: 4 heads on 2, head dim 16" in printed


def test_head_dims_without_a_model(as_if_on_a_gpu: list[Any]) -> None:
    main(["warmup", "--head-dim", "32", "--dtype", "float16", "--group", "2"])
    combined = [warmup.Combination("float16", 32, causal, 2, True) for causal in (False, True)]
    assert as_if_on_a_gpu == combined


def test_a_combination_makes_calls_of_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "LENGTHS", (8, 16))
    monkeypatch.setattr(warmup, "TOKENS", 32)
    found = []
    cpu = dispatch.BACKENDS["cpu"]
    reasons = cpu.unsupported_reasons

    def recorded(problem: AttentionProblem) -> list[str]:
        found.append((problem.B, problem.M))
        return reasons(problem)

    monkeypatch.setattr(cpu, "unsupported_reasons", recorded)
    warmup.Combination("bfloat16", 16, True, 2, True).run("cpu")
    assert set(found) == {(4, 8), (2, 16)}


@pytest.mark.parametrize("size", ["-1", "100"])
def test_a_wrong_page_size_is_named(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", f"--page-size={size}"]) == 1
    assert f"--page-size: got {size}, want" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no CUDA device here; --target compiles for one that is not here"),
        (["--target=sm_90"], "--target sm_90 needs Triton: pip install 'flashtile[triton]'"),
        (["--multiprocessors=114"], "--multiprocessors: got 114, want a positive number and a"),
        (["--target=sm_90", "--multiprocessors=-1"], "--multiprocessors: got -1, want"),
    ],
)
def test_what_is_missing_is_named(
    flags: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(warmup, "TRITON_IS_INSTALLED", False)
    assert main(["warmup", "--head-dim=64", *flags]) == 1
    assert f"flashtile warmup: {message}" in capsys.readouterr().out


def test_an_unknown_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["warmup", "--target=sm_75"])
    assert "--target: invalid choice: 'sm_75'" in capsys.readouterr().err


def test_tensors_on_the_cpu_represent_those_of_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.empty(1, 128, 2, 64, dtype=torch.float16)
    operands, options = describe((x, x, x), Dense(), {"causal": True})
    assert AttentionProblem.of(operands, options).device_type == "cpu"
    monkeypatch.setattr(current_target, "gpu", TARGETS["sm_90"]._replace(multiprocessors=114))
    problem = AttentionProblem.of(operands, options)
    assert (problem.device_type, problem.capability) == ("cuda", (9, 0))
    assert multiprocessors(x.device) == 114


def test_work_runs_in_processes_and_errors_are_kept() -> None:
    found = dict(in_processes.in_processes(int, ["1", "x", "3"], 2))
    assert (found["1"], found["3"]) == (1, 3)
    assert isinstance(found["x"], RuntimeError) and "ValueError: invalid" in str(found["x"])


def test_work_that_has_not_started_is_left_out_when_time_ends() -> None:
    begun = time.monotonic()
    items = [0.5] * 100
    assert list(in_processes.in_processes(time.sleep, items, 1, 0.0)) == []
    assert time.monotonic() - begun < sum(items)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_shows_what_is_done(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(in_processes, "BAR", 4)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert list(in_processes.with_progress(iter("ab"), 2, "compiled")) == ["a", "b"]
    lines = ["compiled [##..] 1 of 2", "compiled [####] 2 of 2"]
    wanted = "".join(f"\r{line}" for line in lines) if is_terminal else "\n".join(lines)
    assert capsys.readouterr().out == f"{wanted}\n"
