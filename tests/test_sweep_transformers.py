"""A sample of the sweep over transformers' families, and tests of the sweep itself."""

from __future__ import annotations

from pathlib import Path

import processes
import pytest
import torch

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")
sweep = pytest.importorskip("sweep_transformers")

SAMPLE = [
    "bigbird_pegasus",  # layers that add the mask themselves, decoders with is_causal=False
    "bridgetower",  # a mask of one query, layers that claim to be causal
    "deepseek_v32",  # reads the mask and chooses keys
    "doge",
    "encoder-decoder",  # a mask with fewer keys than the cache
    "gemma3",  # image tokens that attend in both directions
    "git",  # text layers that add the mask themselves, under a vision tower that does not
    "inkling2_text",  # a sink of every query
    "llama4",  # chunks
    "informer",  # encoder layers that add the mask themselves
    "moshi",  # a mask made in advance
    "muse_glimmer_assistant",  # a window without a mask
    "pegasus_x",
    "siglip2",  # reads the mask of its images
    "t5",  # position bias
    "whisper",
]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("family", SAMPLE)
def test_family_is_equal(family):
    verdict, details = sweep.compare(family)
    assert verdict == sweep.EQUAL, details


def test_a_wrong_attention_differs(monkeypatch):
    """The sweep finds a layer that leaves its mask out."""
    right = sweep.integration.attention_forward

    def wrong(module, query, key, value, attention_mask, **options):
        return right(module, query, key, value, None, **options)

    monkeypatch.setattr(sweep.integration, "attention_forward", wrong)
    verdict, details = sweep.compare("llama")
    assert verdict == sweep.DIFFERS
    assert "outputs: error" in details


@pytest.mark.parametrize(
    ("family", "differing", "wanted"),
    [("vit", 2, sweep.EQUAL), ("vit", 3, sweep.DIFFERS), ("llama", 1, sweep.DIFFERS)],
)
def test_a_near_tie_differs_for_some_roundings_of_the_inputs(
    family, differing, wanted, monkeypatch
):
    """Numbers have three roundings; token ids have one."""
    right, calls = sweep.compare_model, iter(range(9))

    def differs_at_first(*args):
        if next(calls) < differing:
            raise sweep.Differs("planted")
        right(*args)

    monkeypatch.setattr(sweep, "compare_model", differs_at_first)
    verdict, details = sweep.compare(family)
    assert verdict == wanted
    assert ("near ties" in details) == (wanted == sweep.EQUAL)


def test_command_line():
    script = Path(sweep.__file__)
    run = processes.python(
        script, "--seconds", 300, "gpt2", "no_such_family", folder=script.parents[1]
    )
    assert run.returncode == 0, run.stderr
    assert "1 equal" in run.stdout
    assert "1 not built" in run.stdout
