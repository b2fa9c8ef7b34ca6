"""`with layout: model(...)`: results of several ranks are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashtile
from flashtile.distributed import ContextParallel, Layout, shift_labels
from flashtile.losses.cross_entropy import CrossEntropyLoss
from flashtile.models.gpt import GPTConfig, GPTLMHeadModel
from flashtile.testing.wires import run_ranks

transformers = pytest.importorskip("transformers")
integration = pytest.importorskip("flashtile.integrations.transformers")

from tiny_models import build, tokens  # noqa: E402  # needs transformers

pytestmark = pytest.mark.slow

NAME = integration.register()
CU_SEQLENS = [0, 13, 14, 47, 53]
FAMILIES = ["llama", "gemma2", "gpt_oss", "gpt2"]

Step = Callable[[torch.nn.Module, Layout], Any]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def on_ranks(ranks: int, model: torch.nn.Module, step: Step, **layout: Any) -> list[Any]:
    """What `step` returns on every rank, each with a copy of the model."""

    def run(comm: Any) -> Any:
        parallel = ContextParallel.over(comm)
        return step(copy.deepcopy(model), parallel.layout(**{"grain": 4, **layout}))

    return run_ranks(ranks, run)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_sum_is(parts: list[dict[str, Tensor]], whole: dict[str, Tensor]) -> None:
    """The gradients of the ranks sum up to those of one process, up to float32 rounding."""
    assert parts[0].keys() == whole.keys()
    for name, want in whole.items():
        total = sum(part[name] for part in parts)
        scale = want.abs().max().item()
        torch.testing.assert_close(total, want, rtol=1e-4, atol=2e-5 * scale + 1e-7, msg=name)


def hugging_face(family: str, **changes: Any) -> torch.nn.Module:
    model = build(family, **changes)
    model.set_attn_implementation(NAME)
    return model


def hugging_face_step(inputs: dict[str, Tensor]) -> Step:
    def step(model: torch.nn.Module, layout: Layout) -> Any:
        with layout:
            out = model(**layout.batch(**inputs))
            out.loss.backward()
        return layout.unshard(out.logits, 1).detach(), out.loss.detach(), gradients(model)

    return step


def positions_of(cu_seqlens: list[int]) -> Tensor:
    lengths = torch.tensor(cu_seqlens).diff().tolist()
    return torch.cat([torch.arange(length) for length in lengths])[None]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("training", [False, True])  # checkpointing, which has no cache
def test_transformers_model(family: str, packed: bool, training: bool) -> None:
    model = hugging_face(family, **({"use_cache": False} if training else {}))
    if training:
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.config.attention_dropout = model.config.attn_pdrop = 0.0
        model.gradient_checkpointing_enable()
    if packed:
        ids, layout = tokens(1, CU_SEQLENS[-1]), {"cu_seqlens": CU_SEQLENS}
        extra = {"position_ids": positions_of(CU_SEQLENS)}
        labels = shift_labels(ids, CU_SEQLENS)
    else:
        ids, layout, extra = tokens(2, 37), {"seq_len": 37, "batch": 2}, {}
        labels = shift_labels(ids)
    labels[:, 5:9] = -100
    given = torch.cat([ids[:, :1] * 0 - 100, labels[:, :-1]], 1)  # not shifted
    parts = on_ranks(3, model, hugging_face_step({"input_ids": ids, "labels": given}), **layout)
    whole = model(ids, **extra)
    loss = F.cross_entropy(whole.logits.flatten(0, 1).float(), labels.flatten())
    loss.backward()
    for logits, _, _ in parts:
        torch.testing.assert_close(logits, whole.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sum(part[1] for part in parts), loss.detach())
    assert_sum_is([part[2] for part in parts], gradients(model))


@pytest.mark.parametrize("position", ["learned", "rotary", "alibi"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_own_model(position: str, packed: bool, recomputes: bool) -> None:
    torch.manual_seed(0)
    config = GPTConfig.gpt2(
        vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, position=position
    )
    model = GPTLMHeadModel(config, activation_checkpointing=recomputes)
    for name, parameter in model.named_parameters():
        if "Wqkv.weight" in name:
            parameter.data.mul_(20)  # far from uniform
    if packed:
        ids = tokens(1, CU_SEQLENS[-1])[0]
        targets, layout = shift_labels(ids, CU_SEQLENS), {"cu_seqlens": CU_SEQLENS}
        cu_seqlens = torch.tensor(CU_SEQLENS, dtype=torch.int32)
        packing: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": 33}
    else:
        ids, layout, packing = tokens(2, 37), {"seq_len": 37, "batch": 2}, {}
        targets = shift_labels(ids)
    count = int((targets != -100).sum())

    def step(model: torch.nn.Module, layout: Layout) -> Any:
        mine = layout.shard(targets, fill=-100)
        with layout:
            out = model(layout.shard(ids), targets=mine, loss=CrossEntropyLoss(reduction="sum"))
        (out.loss / count).backward()  # outside: the recomputed layers keep the layout
        return out.loss.detach() / count, gradients(model)

    parts = on_ranks(3, model, step, **layout)
    loss = model(ids, targets=targets, **packing).loss
    loss.backward()
    torch.testing.assert_close(sum(part[0] for part in parts), loss.detach())
    assert_sum_is([part[1] for part in parts], gradients(model))


def refused(model: torch.nn.Module, call: Step, error: type[Exception], match: str) -> None:
    """All ranks raise the error, and no layout stays in force."""

    def step(model: torch.nn.Module, layout: Layout) -> None:
        with pytest.raises(error, match=match), layout:
            call(model, layout)
        x = torch.randn(1, 4, 2, 8)
        flashtile.attention(x, x, x)

    on_ranks(2, model, step, seq_len=24, way="contiguous")


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda model, layout: model(layout.shard(tokens(1))),  # fits rank 0 alone
            ValueError,
            "rank 1: position_ids: they contradict the layout",
        ),
        (
            lambda model, layout: model(
                **layout.batch(input_ids=tokens(1)),
                attention_mask=torch.arange(12)[None] >= layout.rank,
            ),
            NotImplementedError,
            "rank 1: attention_mask",
        ),
        (
            lambda model, layout: model(
                **layout.batch(input_ids=tokens(1)), attention_mask=torch.ones(1, 1, 12, 12).bool()
            ),
            NotImplementedError,
            "attention_mask: got a mask with an element for each",
        ),
        (
            lambda model, layout: model(
                **layout.batch(input_ids=tokens(1)),
                past_key_values=model(**layout.batch(input_ids=tokens(1))).past_key_values,
            ),
            NotImplementedError,
            "past_key_values: got 12 queries and 24 keys",
        ),
        (lambda model, layout: layout.batch(input_ids=tokens(1, 23)), ValueError, "input_ids"),
        (
            lambda model, layout: layout.batch(
                input_ids=tokens(1), attention_mask=torch.arange(24)[None] > 2
            ),
            NotImplementedError,
            "attention_mask",
        ),
        (
            lambda model, layout: layout.batch(input_ids=tokens(1), position_ids=tokens(1)),
            ValueError,
            "position_ids: the layout makes it",
        ),
        (
            lambda model, layout: flashtile.attention(*torch.randn(3, 1, 12, 2, 8).unbind()),
            RuntimeError,
            "this rank's tokens only",
        ),
        (lambda model, layout: None, RuntimeError, "no attention over all ranks was called"),
    ],
)
def test_what_a_layout_refuses(call: Step, error: type[Exception], match: str) -> None:
    refused(hugging_face("llama"), call, error, match)


def test_other_attention_than_flashtiles_is_noticed() -> None:
    model = build("llama")  # eager
    refused(
        model,
        lambda model, layout: model(**layout.batch(input_ids=tokens(1))),
        RuntimeError,
        "no attention over all ranks",
    )


def test_inputs_of_a_layout_need_its_block() -> None:
    def step(model: torch.nn.Module, layout: Layout) -> None:
        with pytest.raises(RuntimeError, match="not in force"):
            model(**layout.batch(input_ids=tokens(1)))

    on_ranks(2, hugging_face("llama"), step, seq_len=24)


def test_a_loss_that_shifts_by_itself_fails() -> None:
    def step(model: torch.nn.Module, layout: Layout) -> None:
        batch = layout.batch(input_ids=tokens(1), labels=tokens(1))
        logits = torch.randn(1, layout.local_tokens, 97)
        shifted = batch["labels"][..., 1:]
        with pytest.raises(ValueError, match="batch_size"):
            F.cross_entropy(logits[:, :-1].flatten(0, 1), shifted.flatten())

    on_ranks(2, torch.nn.Identity(), step, seq_len=24)


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({}, ValueError, "loss: got the mean"),
        ({"targets": None, "num_last_tokens": 1}, NotImplementedError, "num_last_tokens"),
        ({"input_ids": tokens(1)}, ValueError, "input_ids: got shape"),
        (
            {"cu_seqlens": torch.tensor([0, 12], dtype=torch.int32), "max_seqlen": 12},
            ValueError,
            "cu_seqlens",
        ),
    ],
)
def test_what_the_own_model_refuses(
    keywords: dict[str, Any], error: type[Exception], match: str
) -> None:
    config = GPTConfig.gpt2(vocab_size=97, hidden_size=32, num_layers=1, num_heads=4)

    def call(model: torch.nn.Module, layout: Layout) -> None:
        shard = layout.shard(tokens(1))
        model(**{"input_ids": shard, "targets": shard, **keywords})

    refused(GPTLMHeadModel(config), call, error, match)


def test_a_compiled_model_runs_its_attention_without_a_graph() -> None:
    config = GPTConfig.gpt2(vocab_size=97, hidden_size=32, num_layers=1, num_heads=4)
    torch.manual_seed(0)
    model = GPTLMHeadModel(config).eval()
    compiled = torch.compile(model, backend="eager")
    ids = tokens(1)
    with torch.no_grad():
        want = compiled(ids).logits  # compiled without a layout

        def one_rank(comm: Any) -> Tensor:
            layout = ContextParallel.over(comm).layout(seq_len=24)
            with layout:
                return compiled(layout.shard(ids)).logits

        (got,) = run_ranks(1, one_rank)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("family", "outcome"),
    [
        ("qwen3", "equal"),
        (
            "bart",
            "NotImplementedError: context parallel: rank 0: position_ids: the model does not take",
        ),
        (
            "roberta",
            "NotImplementedError: context parallel: rank 0: position_ids: the model does not count",
        ),
        ("bamba", "NotImplementedError: context parallel: rank 0: layer_types: linear_attention"),
        ("minimax", "NotImplementedError: context parallel: rank 0: layer_types: linear_attention"),
        ("falcon_h1", "NotImplementedError: context parallel: rank 0: layer_types: hybrid"),
        ("lfm2_moe", "NotImplementedError: context parallel: rank 0: layer_types: conv"),
        ("llama4_text", "NotImplementedError: context parallel: rank 0: position_ids: the model p"),
        ("bloom", "RuntimeError: with layout: no attention over all ranks"),
    ],
)
def test_models_that_would_be_wrong_raise(family: str, outcome: str) -> None:
    sweep = pytest.importorskip("sweep_layouts")
    assert sweep.outcome(family).startswith(outcome)


def test_a_compiled_transformers_model_sees_each_layout() -> None:
    model = hugging_face("llama")
    compiled = torch.compile(model, backend="eager")
    ids = tokens(1, 36)
    for cu_seqlens in ([0, 18, 36], [0, 7, 36]):

        def one_rank(comm: Any, ends: list[int] = cu_seqlens) -> Tensor:
            layout = ContextParallel.over(comm).layout(ends)
            with layout, torch.no_grad():
                return compiled(**layout.batch(input_ids=ids)).logits

        (got,) = run_ranks(1, one_rank)
        with torch.no_grad():
            want = model(ids, position_ids=positions_of(cu_seqlens), use_cache=False).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
