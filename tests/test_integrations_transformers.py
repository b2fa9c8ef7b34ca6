"""Tiny random models of many families, eager against flashtile: same logits, same gradients."""

from __future__ import annotations

import time
import types
from concurrent.futures import ThreadPoolExecutor

import processes
import pytest
import torch

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("flashtile.integrations.transformers")

from tiny_models import assert_same, build, padding, run, tokens  # noqa: E402  # needs transformers

from flashtile.integrations import transformers_attend  # noqa: E402  # needs transformers

pytestmark = pytest.mark.slow

AutoModel = transformers.AutoModel
AutoModelForCausalLM = transformers.AutoModelForCausalLM

NAME = integration.register()
PUBLIC_NAME = integration.register("tiles")  # no "flash": only public functions of transformers
both_names = pytest.mark.parametrize("name", [NAME, PUBLIC_NAME])

OLD = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 23)

DECODERS = ["mistral", "llama", "gemma2", "gemma3", "gpt2", "gpt_oss"]
ENCODERS = ["bert", "albert", "modernbert"]
ENCODER_DECODERS = ["t5", "bart"]


@pytest.fixture(autouse=True)
def one_thread():
    """The models are so small that threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def families(*families):
    """Each family under the name with "flash"; the first one under the public name, too."""
    cases = [(family, NAME) for family in families] + [(families[0], PUBLIC_NAME)]
    return pytest.mark.parametrize(("family", "name"), cases)


@pytest.fixture(params=["as on a GPU", "bias"])
def hidden_scores(request, monkeypatch):
    """Short sequences one by one and from all slots of a cache, and together, with a bias."""
    if request.param == "bias":
        monkeypatch.setattr(transformers_attend, "HIDDEN_SCORES", 10**9)
    else:
        monkeypatch.setattr(transformers_attend, "is_on_cpu", lambda x: False)


@families(*DECODERS, *ENCODERS)
@pytest.mark.parametrize("side", [None, "left", "right", "middle"])
@pytest.mark.usefixtures("hidden_scores")
@torch.no_grad()
def test_padded_batch(family, side, name):
    model = build(family, AutoModel if family in ENCODERS else AutoModelForCausalLM)
    mask = None if side is None else padding(side)
    want = run(model, "eager", input_ids=tokens(), attention_mask=mask)
    got = run(model, name, input_ids=tokens(), attention_mask=mask)
    assert_same(got, want, torch.ones(3, 24) if mask is None else mask)
    if side == "left":  # and the mask is not without consequence
        ignored = run(model, name, input_ids=tokens())
        assert (ignored - want)[mask.bool()].abs().max() > 1e-3


@pytest.mark.parametrize("side", [None, "left", "right"])
@torch.no_grad()
def test_chunks(side):
    model = build("llama4")
    mask = torch.ones(3, 24, dtype=torch.long) if side is None else padding(side)
    want = run(model, "eager", input_ids=tokens(), attention_mask=mask)
    got = run(model, PUBLIC_NAME, input_ids=tokens(), attention_mask=mask)
    assert_same(got, want, mask)


@families("t5", "bart")
@pytest.mark.parametrize("length", [24, 9])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_cross_attention_and_position_bias(family, side, length, name):
    model = build(family, transformers.AutoModelForSeq2SeqLM)
    decoder_mask = padding("right")[:, :length]
    inputs = {
        "input_ids": tokens(),
        "attention_mask": padding(side),
        "decoder_input_ids": tokens(length=length, seed=5),
        "decoder_attention_mask": decoder_mask,
    }
    assert_same(run(model, name, **inputs), run(model, "eager", **inputs), decoder_mask)


@families("mistral", "llama", "gemma2", "gpt2", "gpt_oss", "t5", "bart")
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.usefixtures("hidden_scores")
@torch.no_grad()
def test_generate_with_left_padding(family, cache, name):
    if family in ENCODER_DECODERS:
        model = build(family, transformers.AutoModelForSeq2SeqLM)
    else:
        model = build(family)
    results = []
    for implementation in ("eager", name):
        model.set_attn_implementation(implementation)
        results.append(
            model.generate(
                input_ids=tokens(),
                attention_mask=padding("left"),
                max_new_tokens=10,
                do_sample=False,
                cache_implementation=cache,
                disable_compile=True,
                return_dict_in_generate=True,
                output_logits=True,
            )
        )
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert_same(torch.stack(results[1].logits), torch.stack(results[0].logits))


LENGTHS = (5, 1, 10, 8)


@families(*DECODERS)
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "two rows"])
@torch.no_grad()
def test_packed_sequences(family, how, name):
    model = build(family)
    ids = tokens(1)
    alone = [run(model, "eager", input_ids=document) for document in ids.split(LENGTHS, dim=1)]
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    inputs = {"input_ids": ids, "position_ids": position_ids, "use_cache": False}
    want = torch.cat(alone, dim=1)
    if how == "cu_seq_lens":
        ends = torch.tensor((0, *LENGTHS)).cumsum(0).int()
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        inputs |= {"max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}
    elif how == "two rows":
        if family == "gpt_oss":
            pytest.skip("the model does not tell its masks the positions")
        inputs |= {"input_ids": ids.repeat(2, 1), "position_ids": position_ids.repeat(2, 1)}
        want = want.repeat(2, 1, 1)
    assert_same(run(model, name, **inputs), want)


@families("llama", "gemma2", "gpt_oss", "albert", "t5")
def test_gradients(family, name):
    auto = AutoModel if family == "albert" else AutoModelForCausalLM
    if family == "t5":
        auto = transformers.AutoModelForSeq2SeqLM
    model = build(family, auto)
    mask = padding("right")
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    if family == "t5":
        inputs["decoder_input_ids"] = tokens(length=24, seed=5)
    gradients = []
    for implementation in ("eager", name):
        model.zero_grad()
        run(model, implementation, **inputs)[mask.bool()].square().mean().backward()
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
    want, got = gradients
    assert got.keys() == want.keys()
    for parameter, gradient in want.items():
        torch.testing.assert_close(
            got[parameter], gradient, atol=2e-5, rtol=1e-4, msg=lambda m, p=parameter: f"{p}: {m}"
        )
    special = {"gpt_oss": "sinks", "t5": "relative_attention_bias"}.get(family)
    if special is not None:
        assert any(special in parameter and got[parameter].any() for parameter in got)


@torch.no_grad()
def test_dropout_while_training():
    """Seeded, off in evaluation mode, and scaled so that the mean stays."""
    model = build("llama", attention_dropout=0.3, num_hidden_layers=1)
    ids, mask = tokens(), padding("right")
    want = run(model, NAME, input_ids=ids, attention_mask=mask)
    model.train()
    torch.manual_seed(3)
    first = run(model, NAME, input_ids=ids, attention_mask=mask)
    torch.manual_seed(3)
    assert torch.equal(run(model, NAME, input_ids=ids, attention_mask=mask), first)
    assert not torch.allclose(first, want, atol=1e-3)

    rows = 400  # a batch of equal rows, each with its own dropout
    attention, inputs = model.model.layers[0].self_attn, torch.randn(1, 12, 64)
    cos_sin = model.model.rotary_emb(inputs, torch.arange(12)[None])
    outs, _ = attention(inputs.repeat(rows, 1, 1), cos_sin, attention_mask=None)
    exact, _ = attention.eval()(inputs, cos_sin, attention_mask=None)
    error = (outs.mean(0) - exact[0]).abs()
    assert (error < 6 * outs.std(0) / rows**0.5 + 1e-5).all()


@both_names
@torch.no_grad()
def test_images_of_different_sizes(name):
    """Packed by transformers under a name with "flash", masked or split under another one."""
    from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

    torch.manual_seed(0)
    sizes = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    model = qwen.Qwen2VisionTransformerPretrainedModel(
        qwen.Qwen2VLVisionConfig(**sizes, patch_size=4)
    ).eval()
    grid = torch.tensor([[1, 4, 6], [1, 8, 4], [2, 4, 4]])  # time, height, width in patches
    inputs = {"hidden_states": torch.randn(int(grid.prod(1).sum()), 96), "grid_thw": grid}
    assert_same(run(model, name, **inputs), run(model, "eager", **inputs))

    if OLD and name == NAME:
        pytest.skip("this transformers mixes up Pixtral's images under any name with flash")
    config = transformers.PixtralVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
    )
    model = transformers.PixtralVisionModel(config).eval()
    images = torch.randn(2, 3, 64, 64)
    inputs = {"pixel_values": images, "image_sizes": torch.tensor([[64, 48], [32, 64]])}
    assert_same(run(model, name, **inputs), run(model, "eager", **inputs))


@both_names
@torch.no_grad()
def test_custom_masks(name):
    """4-D masks from the user, bool and additive; image tokens that attend in both directions."""
    model = build("llama")
    visible = torch.rand(3, 1, 24, 24, generator=torch.Generator().manual_seed(2)) > 0.4
    visible |= torch.eye(24, dtype=torch.bool)
    additive = torch.zeros(3, 1, 24, 24).masked_fill(~visible, torch.finfo(torch.float32).min)
    want = run(model, "eager", input_ids=tokens(), attention_mask=additive)
    assert_same(run(model, name, input_ids=tokens(), attention_mask=additive), want)
    assert_same(run(model, name, input_ids=tokens(), attention_mask=visible), want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_left_padding_in_an_additive_mask(device):
    """Its rows hide every key by the smallest number, and weigh all keys equally. Outputs and
    gradients through all tokens, padding included."""
    model = build("llama").to(device)
    seen = padding("left").bool()[:, None, None] & torch.ones(24, 24, dtype=torch.bool).tril()
    mask = torch.zeros(3, 1, 24, 24).masked_fill(~seen, torch.finfo(torch.float32).min)
    found = []
    for name in ("eager", NAME):
        out = run(model, name, input_ids=tokens().to(device), attention_mask=mask.to(device))
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(device)
        gradients = torch.autograd.grad(out, list(model.parameters()), cotangent)
        found.append((out, *(x / x.abs().max() for x in gradients)))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@both_names
@torch.no_grad()
def test_unknown_mask_function(name):
    """A mask function that transformers did not compose becomes the exact mask."""
    from transformers.masking_utils import create_causal_mask

    model = build("llama")
    inputs = {
        "inputs_embeds": torch.zeros(3, 24, 64),
        "attention_mask": padding("right").bool(),
        "past_key_values": None,
        "or_mask_function": lambda b, h, q, kv: (q < 6) & (kv < 6),
    }
    want = run(
        model,
        "eager",
        input_ids=tokens(),
        attention_mask=create_causal_mask(model.config, **inputs),
    )
    model.set_attn_implementation(name)
    mask = create_causal_mask(model.config, **inputs)
    assert mask.shape == (3, 1, 24, 24)
    assert mask.dtype == torch.bool
    assert_same(run(model, name, input_ids=tokens(), attention_mask=mask), want, padding("right"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "gpt2", "bert"])
@pytest.mark.parametrize("side", [None, "left", "right"])
@torch.no_grad()
def test_on_a_gpu(family, side):
    model = build(family, AutoModel if family in ENCODERS else AutoModelForCausalLM).cuda()
    mask = torch.ones(3, 24, dtype=torch.long) if side is None else padding(side)
    inputs = {"input_ids": tokens().cuda(), "attention_mask": mask.cuda()}
    want, got = (run(model, name, **inputs) for name in ("eager", NAME))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=1e-4, rtol=1e-4)
    if side == "left" and family not in ENCODERS:
        written = []
        for name in ("eager", NAME):
            model.set_attn_implementation(name)
            written.append(model.generate(**inputs, max_new_tokens=8, do_sample=False))
        assert torch.equal(*written)


@both_names
@pytest.mark.parametrize("side", [None, "left"])
@torch.no_grad()
def test_compile(side, name):
    model = build("mistral", num_hidden_layers=1)
    mask = None if side is None else padding(side)
    want = run(model, "eager", input_ids=tokens(), attention_mask=mask, use_cache=False)
    model.set_attn_implementation(name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = compiled(input_ids=tokens(), attention_mask=mask, use_cache=False).logits
    assert_same(got, want, torch.ones(3, 24) if mask is None else mask)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
@torch.no_grad()
def test_continuous_batching(family):
    if family == "mistral" and OLD:
        pytest.skip("this transformers leaves Mistral's window out of its paged attention")
    model = build(family)
    prompts = [tokens(1, n, seed=n)[0].tolist() for n in (5, 17, 9, 30)]
    config = transformers.GenerationConfig(
        max_new_tokens=8, do_sample=False, eos_token_id=2, pad_token_id=0
    )
    want = [model.generate(torch.tensor([p]), config)[0, len(p) :].tolist() for p in prompts]
    model.set_attn_implementation(NAME)
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=64, max_batch_tokens=64, use_cuda_graph=False
    )
    outputs = model.generate_batch(
        prompts,
        generation_config=config,
        continuous_batching_config=batching,
        progress_bar=False,
    )
    got = [outputs[key].generated_tokens for key in sorted(outputs)]
    assert got == want


@torch.no_grad()
def test_paged_decoding_kernel():
    """The block-table call, which transformers makes only on a GPU."""
    loader = integration.patch_loader.__globals__
    flash_attn_with_kvcache = loader["flash_attn_with_kvcache"]
    page_size, pages = 16, 8
    cache = torch.randn(2, pages, page_size, 2, 16)
    k_cache, v_cache = cache[0].clone(), cache[1].clone()
    table = torch.tensor([[3, 1, -1], [0, 5, 6]], dtype=torch.int32)  # -1: no page yet
    lengths = torch.tensor([20, 40], dtype=torch.int32)
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    sink = torch.randn(4)
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True, s_aux=sink
    )
    for row in range(2):
        used = table[row][table[row] >= 0].long()
        keys = torch.cat([cache[0][used].flatten(0, 1)[: lengths[row]], k[row]])
        values = torch.cat([cache[1][used].flatten(0, 1)[: lengths[row]], v[row]])
        keys, values = (x.repeat_interleave(2, dim=1) for x in (keys, values))
        scores = torch.einsum("hd,nhd->hn", q[row, 0], keys) / 4
        weights = torch.cat([scores, sink[:, None]], dim=1).softmax(1)[:, :-1]
        assert_same(out[row, 0], torch.einsum("hn,nhd->hd", weights, values))
        page, slot = divmod(int(lengths[row]), page_size)
        assert torch.equal(k_cache[table[row, page], slot], k[row, 0])


def test_threads_may_register_the_same_name(monkeypatch):
    """While one thread is registering, the name is not registered yet."""
    half_done = types.SimpleNamespace(register=lambda name, function: time.sleep(0.05))
    monkeypatch.setattr(integration, "AttentionMaskInterface", half_done)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(integration.register, ["of_threads"] * 8)) == {"of_threads"}


# If the private loader of transformers has changed, only public functions are used.


def broken_by_removal(monkeypatch, loader):
    monkeypatch.delattr(loader, "_lazy_imports")


def broken_by_new_loader(monkeypatch, loader):
    def lazy_import_flash_attention(implementation):
        raise ValueError("Could not find the currently requested flash attention implementation")

    monkeypatch.setattr(loader, "lazy_import_flash_attention", lazy_import_flash_attention)


def broken_by_new_result(monkeypatch, loader):
    monkeypatch.setattr(loader, "lazy_import_flash_attention", lambda implementation: ((1, 2), 3))


@pytest.mark.parametrize("broken", [broken_by_removal, broken_by_new_loader, broken_by_new_result])
@torch.no_grad()
def test_fallback_when_the_private_loader_changed(broken, monkeypatch):
    import transformers.modeling_flash_attention_utils as loader

    broken(monkeypatch, loader)
    wanted = f"flash_{broken.__name__}"
    before = getattr(loader, "_lazy_imports", None)
    check = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    with pytest.warns(UserWarning, match="looks for flash attention in a new way"):
        name = integration.register(wanted)
    assert name == wanted.replace("flash", "Flash")
    assert getattr(loader, "_lazy_imports", None) is before  # nothing stays patched
    assert transformers.PreTrainedModel._check_and_adjust_attn_implementation is check
    model, mask = build("mistral"), padding("left")
    want = run(model, "eager", input_ids=tokens(), attention_mask=mask)
    assert_same(run(model, name, input_ids=tokens(), attention_mask=mask), want, mask)


def test_register_again_and_bad_names():
    assert integration.register() == NAME
    for taken in ("eager", "sdpa", "flash_attention_2"):
        with pytest.raises(ValueError, match="another attention implementation"):
            integration.register(taken)
    with pytest.raises(ValueError, match="plain word"):
        integration.register("paged|flashtile")


def test_old_transformers(monkeypatch):
    # Importing a model replaces `transformers` in sys.modules by a second module.
    monkeypatch.setattr(integration.transformers, "__version__", "5.2.0")
    with pytest.raises(ImportError, match=r"5\.2\.0, want 5\.17"):
        integration.register("late")


def test_transformers_absent_or_too_old_to_import(tmp_path):
    packages = {
        "absent": "raise ModuleNotFoundError('No module named transformers')",
        "old": "__version__ = '4.40.2'",
    }
    for name, text in packages.items():
        (tmp_path / name / "transformers").mkdir(parents=True)
        (tmp_path / name / "transformers" / "__init__.py").write_text(text)
    code = (
        "import sys\n"
        "for folder in sys.argv[1:]:\n"
        "    sys.path.insert(0, folder)\n"
        "    sys.modules.pop('transformers', None)\n"
        "    try:\n        import flashtile.integrations.transformers\n"
        "    except ImportError as error:\n        print(type(error).__name__, error)"
    )
    folders = [tmp_path / name for name in packages]
    absent, old = processes.python("-c", code, *folders).stdout.splitlines()
    assert absent.startswith("TransformersRequired") and old.startswith("TransformersRequired")
    assert "needs transformers 5.17 or newer: pip install 'transformers>=5.17'" in absent
    assert "transformers: got 4.40.2, want 5.17 or newer: pip install --up" in old


def test_other_flash_names_are_left_alone():
    """The wrapped loader passes every other implementation on."""
    model = build("llama")
    with pytest.raises((ImportError, ValueError)):
        model.set_attn_implementation("flash_attention_2")


def test_models_go_through_flashtile(monkeypatch):
    """The other tests do reach flashtile: without it the model cannot run."""

    def refuse(*args, **kwargs):
        raise RuntimeError("here")

    monkeypatch.setattr(transformers_attend, "attention", refuse)
    with pytest.raises(RuntimeError, match="here"):
        run(build("llama"), NAME, input_ids=tokens())
