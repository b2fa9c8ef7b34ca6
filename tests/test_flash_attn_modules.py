"""flash_attn's modules and models: arguments, state dicts and experiments, as its repository has
them (`flash_attn_modules.json`, which names its source), against what `install()` provides.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from plain_layers import check_against_plain, plain_block
from torch import nn

from flashtile.integrations import flash_attn
from flashtile.integrations.flash_attn_modules import INSTEAD
from flashtile.layers.patch_embed import PatchEmbed
from flashtile.models import gpt
from flashtile.modules import block, embedding, mha, mlp

TESTS = Path(__file__).parent
FACTS = json.loads((TESTS / "flash_attn_modules.json").read_text())
NAMES = {"nn": nn, "F": F, "torch": torch, "partial": partial, "PatchEmbed": PatchEmbed}
LAYERS = {
    name: value
    for module in (block, embedding, mha, mlp)
    for name, value in vars(module).items()
    if inspect.isclass(value)
}


@pytest.fixture(scope="module")
def installed():
    with flash_attn.install():
        yield


def found(path):
    """What flash_attn's name leads to under `install()`; None if it is missing."""
    module, name = path.rsplit(".", 1)
    try:
        owner = importlib.import_module(f"flash_attn.{module}")
    except ModuleNotFoundError:
        owner = found(module)  # a class
    return getattr(owner, name, None)


@pytest.mark.parametrize("path", FACTS["signatures"])
def test_arguments(path, installed):
    """Ours has the same arguments in the same order, with the same defaults, and perhaps more."""
    ours = found(path)
    in_class = inspect.isclass(found(path.rpartition(".")[0]))
    if ours is None:
        # An error says what to use instead of it, or of its module.
        parts = f"flash_attn.{path}".split(".")
        named = any(".".join(parts[:end]) in INSTEAD for end in range(len(parts) + 1))
        assert named and not in_class
        return
    text = FACTS["signatures"][path].removeprefix("(").removesuffix(")")
    original = inspect.signature(eval(f"lambda {text}: None", dict(NAMES))).parameters.values()
    packed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    theirs = [(x.name, x.default) for x in original if x.kind not in packed]
    skipped = 1 if in_class and not inspect.ismethod(ours) else 0
    parameters = list(inspect.signature(ours).parameters.values())[skipped:]
    got = [(x.name, x.default) for x in parameters if x.kind not in packed]
    assert got[: len(theirs)] == theirs
    assert inspect.Parameter.empty not in [default for _, default in got[len(theirs) :]]


def test_missing_names_are_in_the_manual(installed):
    """And nothing else: `a.b` is a name or a whole module, `a.{b,c}` are several."""
    page = (TESTS.parent / "docs" / "migrating.md").read_text()
    entries = page.partition("these are missing:\n\n")[2].partition("\n\n")[0]
    listed = set()
    for before, names in re.findall(r"`([\w.]+?)(?:\.{([\w,]+)})?`", entries):
        listed |= {f"{before}.{name}" for name in names.split(",")} if names else {before}
    missing = {path for path in FACTS["signatures"] if found(path) is None}
    assert missing and not {x for x in missing if not {x, x.rpartition(".")[0]} & listed}
    for name in listed - {"from_pretrained", "decode", "flashtile.testing"}:
        assert importlib.util.find_spec(f"flash_attn.{name}") is None
        assert "." not in name or found(name) is None


@pytest.mark.parametrize("case", FACTS["state_dicts"])
def test_state_dicts(case):
    state = eval(case, NAMES | LAYERS).state_dict()
    assert [(name, list(x.shape)) for name, x in state.items()] == list(
        FACTS["state_dicts"][case].items()
    )


SHRUNK = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 2}
# Experiments that differ only in size are one experiment here.
DISTINCT = {json.dumps(config | SHRUNK): name for name, config in FACTS["configs"].items()}


def config_of(name, **changes):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    return transformers.GPT2Config(**FACTS["configs"][name] | SHRUNK | changes)


def plain_gpt(model, ids):
    """`GPTModel` without dropout."""
    x = F.embedding(ids, model.embeddings.word_embeddings.weight)
    if model.embeddings.max_position_embeddings:
        x = x + model.embeddings.position_embeddings.weight[: ids.shape[1]]
    for index, layer in enumerate(model.layers, 1):
        layer.mixer.softmax_scale = 16**-0.5 / index  # scale_attn_by_inverse_layer_idx
        x = plain_block(layer, x).sum(0)
    return model.ln_f(x)


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTINCT.values())
def test_experiments(name, seed):
    """Each builds its model, which equals its layers, and learns from a step."""
    ids, targets = torch.randint(0, 61, (2, 2, 9))
    config = config_of(name)
    with flash_attn.install():
        from flash_attn.losses.cross_entropy import CrossEntropyLoss
        from flash_attn.models.gpt import GPTLMHeadModel

        model = GPTLMHeadModel(config)
        loss = CrossEntropyLoss(inplace_backward=True)
    has_positions = "rotary_emb_fraction" not in FACTS["configs"][name]
    assert hasattr(model.transformer.embeddings, "position_embeddings") == has_positions

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1).add_(0.05)
    check_against_plain(
        model.transformer.eval(),
        lambda model: plain_gpt(model, ids),
        (),
        lambda model: model(ids),
    )

    def loss_now():
        logits = model(ids).logits
        return loss(logits.flatten(0, 1), targets.flatten())

    before = loss_now().item()
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    loss_now().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    optimizer.step()
    model.eval()
    assert loss_now() < before


@pytest.mark.parametrize("residual_in_fp32", [False, True])
def test_the_stream_of_an_experiment(residual_in_fp32, seed):
    """In bfloat16 the experiments keep it in float32."""
    config = config_of("owt/gpt2s-flash", residual_in_fp32=residual_in_fp32)
    model = gpt.GPTLMHeadModel(config, dtype=torch.bfloat16)
    streams = []
    for layer in model.transformer.layers:
        layer.register_forward_hook(lambda *call: streams.append(call[-1][-1].dtype))
    assert model(torch.randint(0, 61, (2, 9))).logits.dtype == torch.bfloat16
    assert streams == 2 * [torch.float32 if residual_in_fp32 else torch.bfloat16]


def test_parts_of_a_model(seed):
    """`create_block` and its parts, which models of other repositories call."""
    config = config_of("owt/gpt2s-flash", resid_pdrop=0.1, embd_pdrop=0.3)
    first, second = (gpt.create_block(config, index, None, "cpu") for index in range(2))
    assert (first.dropout1.p, second.dropout1.p, first.dropout2.p) == (0.3, 0.1, 0.1)
    assert (first.layer_idx, second.mixer.layer_idx) == (0, 1)
    assert second.mixer.softmax_scale == first.mixer.softmax_scale / 2 == 16**-0.5 / 2
    assert first.residual_in_fp32
    assert isinstance(gpt.create_mixer_cls(config, 0)(32), mha.MHA)
    assert gpt.create_mlp_cls(config, dtype=torch.float64)(32).fc1.weight.dtype == torch.float64
    config = config_of("owt/gpt2s", parallel_block=True, activation_function="swiglu")
    parallel = gpt.create_block(config, 1)
    assert isinstance(parallel, block.ParallelBlock)
    assert isinstance(parallel.mlp, mlp.GatedMlp)
    with pytest.raises(ValueError, match="layer_idx: needed with scale_attn_by_inverse_layer_idx"):
        gpt.create_mixer_cls(config)
    config.attn_dwconv = True
    assert gpt.create_mixer_cls(config, 0)(32).dwconv
    with pytest.raises(NotImplementedError, match="process_group: want None with dwconv"):
        gpt.create_mixer_cls(config, 0, object())


def test_positions_and_caches_of_a_model(seed):
    config = config_of("owt/gpt2s-flash")
    model, ids = gpt.GPTLMHeadModel(config).eval(), torch.randint(0, 61, (2, 6))
    at = torch.tensor([[3, 4, 5, 0, 1, 2]])
    got = model.transformer.embeddings(ids, at)
    seen = []
    model.transformer.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(ids, at)
    assert torch.equal(seen[0], got)
    memory = model.allocate_inference_cache(2, 8, torch.float16)
    assert [x.shape for x in memory.values()] == 2 * [(2, 8, 2, 2, 16)]
    assert all(x.dtype == torch.float16 for x in memory.values())
    cache = gpt.InferenceParams(8, 2, key_value_memory_dict=model.allocate_inference_cache(2, 8))
    whole = model(ids).logits
    for start, piece in ((0, ids[:, :4]), (4, ids[:, 4:])):
        got = model(piece, None, cache, 1).logits
        torch.testing.assert_close(got[:, 0], whole[:, start + piece.shape[1] - 1])
        cache.seqlen_offset += piece.shape[1]
