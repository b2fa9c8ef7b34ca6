"""The demo with a tiny random model: its checks, its table, its picture, its exit status."""

from __future__ import annotations

import argparse
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import flashtile
from examples.demo import __main__ as demo
from examples.demo import inputs

transformers = pytest.importorskip("transformers")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from examples.demo import layer, model_checks, progress, show, turns  # noqa: E402  # it needs these

pytestmark = pytest.mark.slow

PLAY = "List of persons.\n\n" + "\n\n".join(
    ["Ham.\nTo be, or not to be, that is the question:\nWhether 'tis nobler"]
    + [f"Oph.\n{'my lord ' * n}" for n in range(1, 14)]
)
SIZE = show.Size(tokens=200, new_tokens=5, lengths=(256, 512, 1024))


class ByteTokenizer:
    """A token for each byte."""

    def __call__(self, text, return_tensors):
        assert return_tensors == "pt"
        ids = torch.tensor([list(text.encode())], dtype=torch.long)
        return argparse.Namespace(input_ids=ids)

    def decode(self, ids, skip_special_tokens=False):
        return bytes(ids.tolist()).decode(errors="replace")


def tiny_model():
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Arguments of a demo that reads `PLAY` with a tiny model."""
    play, model = tmp_path / "play.txt", tmp_path / "model.gguf"
    play.write_text(PLAY)
    model.touch()
    monkeypatch.setattr(
        inputs, "load", lambda path, device: (tiny_model().to(device), ByteTokenizer())
    )
    output = tmp_path / "picture.png"
    return argparse.Namespace(data=play, model=model, output=output, device="cpu", quick=True)


def test_every_check_holds_and_in_a_pipe_lines_say_how_far_it_is(arguments, capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert show.show(arguments, SIZE) == 0
    printed = capsys.readouterr().out
    for words in ("All four checks hold", "standard", "flashtile", "1,024", "picture.png"):
        assert words in printed
    closing = " ".join(printed.replace("│", " ").split())
    assert "as fast as PyTorch's SDPA" in closing
    assert "runs such a plain call with SDPA's own kernel" in closing
    assert "FAILED" not in printed
    assert arguments.output.read_bytes().startswith(b"\x89PNG")
    lines = [line.partition(",")[0].strip() for line in printed.splitlines()]
    assert [line for line in lines if line.startswith("1 reading:")] == [
        f"1 reading: {number} of 12" for number in range(13)
    ]
    assert "3 measuring: 18 of 18" in lines


def test_the_ways_take_turns_and_the_best_counts(monkeypatch):
    order = []
    took = iter([5.0, 1.0, 3.0, 4.0, 9.0, 2.0])  # milliseconds

    def timer(call):
        call()
        return next(took)

    monkeypatch.setattr(turns, "timer_for", lambda device: timer)
    calls = {name: partial(order.append, name) for name in "ab"}
    assert turns.best_of_three(calls, "cpu") == {"a": 3e-3, "b": 1e-3}
    assert "".join(order) == "ababab"


@pytest.mark.gpu
def test_every_check_holds_on_a_gpu(arguments, capsys):
    arguments.device = "cuda"
    assert show.show(arguments, SIZE) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_a_failed_check_fails_the_demo(arguments, capsys, monkeypatch):
    monkeypatch.setattr(model_checks, "LOSS_TOLERANCE", -1.0)
    monkeypatch.setattr(model_checks, "LOGIT_TOLERANCE", -1.0)
    monkeypatch.setattr(layer, "TOLERANCES", {torch.float32: -1.0})
    assert show.show(arguments, SIZE._replace(lengths=(128, 256, 512))) == 1
    assert "These checks FAILED: loss, memory, padded batch." in capsys.readouterr().out


def test_ctrl_c_ends_with_one_line(capsys, monkeypatch):
    def stopped(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(show, "show", stopped)
    assert demo.main([]) == 130
    assert capsys.readouterr().out.strip().startswith("demo: stopped")


def test_standard_attention_that_does_not_fit(arguments, capsys, monkeypatch):
    """It is left out, and the others are measured."""
    too_much = layer.standard_bytes(1024)
    monkeypatch.setattr(layer, "free_bytes", lambda device: too_much)
    assert show.show(arguments, SIZE) == 0
    assert "Training on 512 tokens" in capsys.readouterr().out


def test_nan_never_passes():
    nan = torch.tensor([float("nan")], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    for losses in ({"a": one, "b": nan}, {"a": nan, "b": one}, {"a": nan, "b": nan}):
        assert not model_checks.Loss(losses, {}).passed
    assert model_checks.Loss({"a": one, "b": one + 1e-6}, {}).passed
    for differences in ({"a": 0.0, "b": float("nan")}, {"a": float("nan"), "b": 0.0}):
        assert not model_checks.Packed([3, 2], differences, True, {}).passed
    rows = [
        layer.Row(name, length, direction, 1.0, float(length**power), float("nan"))
        for name, power in (("standard", 2), ("sdpa", 1), ("flashtile", 1))
        for length in (512, 1024)
        for direction in layer.PASSES
    ]
    assert not layer.Layers(rows).passed
    assert layer.Layers([row._replace(error=0.0) for row in rows]).passed
    quadratic = [row._replace(error=0.0, peak_mib=float(row.length**2)) for row in rows]
    assert not layer.Layers(quadratic).passed


def test_continuation_tells_different_tokens_apart():
    tokens = torch.arange(5)
    assert model_checks.Continuation({"a": tokens, "b": tokens.clone()}, {}).passed
    assert not model_checks.Continuation({"a": tokens, "b": tokens + 1}, {}).passed


def test_packed_counts(arguments):
    sentences = [torch.arange(1, n) for n in (9, 4, 30)]
    model = tiny_model()
    name = flashtile.integrations.transformers.register()
    packed = model_checks.packed(model, sentences, name, lambda: None)
    assert packed.passed
    assert (packed.real, packed.padded) == (8 + 3 + 29, 3 * 29)


def test_memory_of_the_layer():
    """Standard attention takes at least two score matrices, flashtile little more than out."""
    rows = {(r.name, r.direction): r for r in layer.measure((1024,), "cpu")}
    scores = layer.HEADS * 1024**2 * 4 / 2**20
    result = layer.HEADS * 1024 * layer.HEAD_DIM * 4 / 2**20
    for direction, matrices in zip(layer.PASSES, (2, 3), strict=True):
        standard, ours = rows["standard", direction], rows["flashtile", direction]
        assert matrices * scores < standard.peak_mib
        assert standard.peak_mib * 2**20 < layer.standard_bytes(1024) * 1.05
        assert result < ours.peak_mib < 8 * result
        assert ours.error < layer.TOLERANCES[torch.float32]


def test_find_model(tmp_path, monkeypatch):
    file = tmp_path / "weights.gguf"
    with pytest.raises(inputs.MissingInputError, match="no file"):
        inputs.find_model(file)
    file.touch()
    assert inputs.find_model(file) == file

    class Listed(type(Path())):
        def locate(self):
            return tmp_path / self

    listed = [Listed("__init__.py"), Listed("weights.gguf")]
    monkeypatch.setattr(inputs, "files", lambda package: listed)
    assert inputs.find_model() == file

    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(inputs, "files", missing)
    with pytest.raises(inputs.MissingInputError, match="make demo"):
        inputs.find_model()


@pytest.mark.parametrize("inside", inputs.INSIDE)
def test_find_play(tmp_path, monkeypatch, inside):
    with pytest.raises(inputs.MissingInputError, match="make demo"):
        inputs.find_play(tmp_path)
    play = tmp_path / inside / inputs.PLAY
    play.parent.mkdir(parents=True, exist_ok=True)
    play.write_text(PLAY)
    assert inputs.find_play(tmp_path) == play
    assert inputs.find_play(play) == play
    monkeypatch.setenv("FLASHTILE_DATA", str(tmp_path))
    assert inputs.find_play() == play


def test_cut():
    text = inputs.cut(PLAY, ByteTokenizer(), 100, "cpu")
    assert text.passage.shape == (1, 100)
    assert bytes(text.prompt[0].tolist()).decode().endswith("\nWhether 'tis nobler")
    assert len(text.sentences) == inputs.SENTENCES
    assert len({len(sentence) for sentence in text.sentences}) > 5


def test_command_line_without_the_inputs(tmp_path, capsys):
    status = demo.main(["--quick", "--data", str(tmp_path), "--model", str(tmp_path / "no")])
    assert status == 2
    assert "no file" in capsys.readouterr().out


def test_missing_package(monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "examples.demo.show", None)
    assert demo.run(argparse.Namespace()) == 2
    assert "pip install -e '.[demo]'" in capsys.readouterr().out


@pytest.mark.parametrize("works", [True, False])
def test_gpu_when_flashtile_can_use_it(works, monkeypatch, capsys):
    def attend(q, k, v):
        if not works:
            raise NotImplementedError("no backend can run this call")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(show, "attention", attend)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    assert show.usable_device(show.Console()) == ("cuda" if works else "cpu")
    assert ("no backend can run" in capsys.readouterr().out) is not works
