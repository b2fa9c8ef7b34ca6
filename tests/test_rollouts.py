"""Folded rollouts are a tree of their tokens, and give what the separate sequences give."""

from __future__ import annotations

import csv
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashtile import Folded, attention, fold
from flashtile.masks import MAX_INTERVALS
from flashtile.testing import assert_close, dense_spans, generator, normal

often = settings(max_examples=150, deadline=None)
rollouts_of_few_tokens = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=7)


def mask_by_paths(folded: Folded, left: int) -> Tensor:
    """The mask as its definition says: each token sees its path, `left` tokens back."""
    total = len(folded.tokens)
    mask = torch.zeros(total, total, dtype=torch.bool)
    for row in range(total):
        key, distance = row, 0
        while key >= 0 and (left < 0 or distance <= left):
            mask[row, key] = True
            key, distance = int(folded.parents[key]), distance + 1
    return mask


@often
@given(rollouts_of_few_tokens, st.integers(-1, 4))
def test_tree(rollouts, left) -> None:
    folded = fold(rollouts)
    total = len(folded.tokens)
    assert total == len({tuple(x[: n + 1]) for x in rollouts for n in range(len(x))})
    for rows, rollout in zip(folded.rows.tolist(), rollouts, strict=True):
        path, padding = rows[: len(rollout)], rows[len(rollout) :]
        assert folded.tokens[path].tolist() == rollout
        assert folded.positions[path].tolist() == list(range(len(rollout)))
        assert folded.parents[path].tolist() == [-1, *path][: len(rollout)]
        assert padding == [-1] * len(padding)
    mask = folded.spans((left, 0))
    assert mask.starts.dtype == mask.stops.dtype == torch.int32
    assert torch.equal(dense_spans(mask, total)[0, 0], mask_by_paths(folded, left))


def test_path_with_many_branches() -> None:
    """A comb of tokens, whose last rollout leaves more paths than a mask has intervals for."""
    spine = list(range(12))
    rollouts = [[*reversed(spine[n:]), *[99 - n] * 3] for n in range(len(spine))]
    rollouts += [[*spine[:n], -1] for n in range(len(spine))] + [spine]
    folded = fold(rollouts)
    assert folded.paths.starts.shape[-1] <= MAX_INTERVALS
    for rows, rollout in zip(folded.rows.tolist(), rollouts, strict=True):
        assert folded.tokens[rows[: len(rollout)]].tolist() == rollout
    mask = dense_spans(folded.spans(), len(folded.tokens))[0, 0]
    assert torch.equal(mask, mask_by_paths(folded, -1))
    # What the ninth interval would have shared is there twice.
    assert len(folded.tokens) > len({tuple(x[: n + 1]) for x in rollouts for n in range(len(x))})


def test_bad_rollouts() -> None:
    with pytest.raises(ValueError, match="rollouts: got none, want at least one"):
        fold([])
    with pytest.raises(TypeError, match=r"rollouts: got dtype torch\.float32, want integers"):
        fold([torch.zeros(3)])
    with pytest.raises(ValueError, match=r"rollouts: got shape \(2, 3\), want \(length,\)"):
        fold([torch.zeros(2, 3, dtype=torch.int64)])


def answers(seed: int) -> list[Tensor]:
    """Two prompts with answers, of which some share first steps."""
    g = torch.Generator().manual_seed(seed)

    def draw(*lengths: int) -> list[Tensor]:
        return [torch.randint(40, (length,), generator=g) for length in lengths]

    (first, second), (step,) = draw(37, 11), draw(8)
    rollouts = [torch.cat((first, x)) for x in draw(5, 21, 1)]
    rollouts += [torch.cat((first, step, x)) for x in draw(9, 3)]
    return rollouts + [torch.cat((second, x)) for x in draw(4, 30)] + [second]


@pytest.mark.parametrize("options", [{}, {"window_size": (6, 0)}, {"sink": True, "softcap": 5.0}])
def test_attention_of_separate_sequences(options) -> None:
    """Outputs and gradients, where a shared token's gradient is the sum over its rollouts."""
    rollouts = answers(seed=1)
    folded = fold(rollouts)
    total, g = len(folded.tokens), generator(2)
    q, k, v = (normal(g, 1, total, heads, 16, dtype=torch.float32) for heads in (4, 2, 2))
    numbers = {name: x for name, x in options.items() if name == "softcap"}
    if "sink" in options:
        numbers["sink"] = normal(g, 4, dtype=torch.float32)
    window = options.get("window_size", (-1, -1))
    dout = normal(g, *folded.rows.shape, 4, 16, dtype=torch.float32)

    def results(dtype: torch.dtype, separately: bool) -> list[Tensor]:
        def converted(x: Tensor) -> Tensor:
            return x.to(dtype).requires_grad_()

        leaves = [converted(x) for x in (q, k, v)]
        here = {n: converted(x) if isinstance(x, Tensor) else x for n, x in numbers.items()}
        if separately:
            out = torch.zeros(dout.shape, dtype=dtype)
            for i, rollout in enumerate(rollouts):
                rows = folded.rows[i, : len(rollout)]
                parts = [x[:, rows] for x in leaves]
                part = attention(*parts, causal=True, window_size=window, **here)
                out = out.index_put((torch.tensor(i), torch.arange(len(rollout))), part[0])
        else:
            row = attention(*leaves, mask=folded.spans(window), **here)
            out = folded.unfold(row[0])
        tensors = leaves + [x for x in here.values() if isinstance(x, Tensor)]
        return [out, *torch.autograd.grad(out, tensors, dout.to(dtype))]

    truth = results(torch.float64, separately=True)
    plain = results(torch.float32, separately=True)
    ours = results(torch.float32, separately=False)
    for name, *three in zip(("out", "dq", "dk", "dv", "dsink"), ours, truth, plain, strict=False):
        assert_close(name, *three, dtype=torch.float32)


def test_log_probs() -> None:
    """Those of each token after its own path; gradients add over the rollouts of a token."""
    rollouts = answers(seed=3)
    folded = fold(rollouts)
    logits = normal(generator(4), len(folded.tokens), 40, dtype=torch.float64).requires_grad_()
    found = folded.unfold(folded.log_probs(logits), fill=7.0)
    total = torch.zeros((), dtype=torch.float64)
    for rows, rollout, one in zip(folded.rows, rollouts, found, strict=True):
        expected = logits[rows[: len(rollout) - 1]].log_softmax(-1)
        expected = expected.gather(-1, rollout[1:, None])[:, 0]
        torch.testing.assert_close(one[1 : len(rollout)], expected)
        assert one[0] == 0 and (one[len(rollout) :] == 7.0).all()
        total = total + expected.sum()
    torch.testing.assert_close(
        *(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (found.sum(), total))
    )
    assert folded.log_probs(logits.bfloat16()).dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Mistral", "GptOss"])
def test_transformers(family) -> None:
    """A model's log-probabilities and gradients; windows of layers count along each rollout.

    In float64, because sums over a whole model have no floor; its norms round to float32.
    """
    transformers = pytest.importorskip("transformers")
    from flashtile.integrations.transformers import register

    options = {"Mistral": {"sliding_window": 7}, "GptOss": {"sliding_window": 7, "head_dim": 16}}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **options.get(family, {}),
        **({"num_local_experts": 2, "num_experts_per_tok": 2} if family == "GptOss" else {}),
    )
    experts = {"experts_implementation": "eager"} if family == "GptOss" else {}
    model = transformers.AutoModelForCausalLM.from_config(config, **experts)
    rollouts = answers(seed=5)
    folded = fold(rollouts)

    def results(dtype: torch.dtype, separately: bool) -> list[Tensor]:
        model.to(dtype).set_attn_implementation("eager" if separately else register())
        if separately:
            found = torch.zeros(folded.rows.shape, dtype=dtype)
            for i, tokens in enumerate(rollouts):
                one = model(tokens[None]).logits[0, :-1].log_softmax(-1)
                at = torch.tensor(i), torch.arange(1, len(tokens))
                found = found.index_put(at, one.gather(-1, tokens[1:, None])[:, 0])
        else:
            row = {"input_ids": folded.tokens[None], "position_ids": folded.positions[None]}
            logits = model(**row, rollouts=folded).logits[0]
            found = folded.unfold(folded.log_probs(logits))
        weights = [x for x in model.parameters() if x.dim() > 1]
        return [found, *torch.autograd.grad(found.sum(), weights)]

    truth = results(torch.float64, separately=True)
    plain = results(torch.float32, separately=True)
    ours = results(torch.float64, separately=False)
    for name, *three in zip(map(str, range(len(ours))), ours, truth, plain, strict=True):
        assert_close(name, *three, dtype=torch.float32)


@pytest.mark.slow
def test_what_transformers_may_not_combine() -> None:
    transformers = pytest.importorskip("transformers")
    from flashtile.integrations.transformers import register

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=8, num_hidden_layers=1, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=register())
    folded = fold([[1, 2, 3], [1, 2, 4, 5]])
    row = {"input_ids": folded.tokens[None], "position_ids": folded.positions[None]}
    with pytest.raises(ValueError, match=r"want input_ids of shape \(1, 5\), the folded tokens"):
        model(torch.ones(2, 3, dtype=torch.int64), rollouts=folded)
    hiding = torch.tensor([[0, 1, 1, 1, 1]])
    with pytest.raises(NotImplementedError, match="an attention_mask that hides tokens"):
        model(**row, attention_mask=hiding, rollouts=folded)
    with pytest.raises(ValueError, match="position_ids: got others than those of the rollouts"):
        model(folded.tokens[None], rollouts=folded)
    shown = model(**row, attention_mask=torch.ones_like(hiding), rollouts=folded).logits
    assert torch.equal(shown, model(**row, rollouts=folded).logits)


@pytest.mark.slow
def test_benchmark(tmp_path, capsys) -> None:
    pytest.importorskip("transformers")
    from benchmarks import rollouts

    file = tmp_path / "rollouts.csv"
    sizes = ["--answers", "3", "--prompt", "20", "--answer", "4", "--hidden", "64", "--layers", "1"]
    rollouts.main([*sizes, "--device", "cpu", "--budget", "1", "--csv", str(file)])
    (line,) = csv.DictReader(file.open())
    assert (line["tokens_separately"], line["tokens_as_tree"]) == ("72", "32")
    assert float(line["speedup"]) > 0 and line["command"].startswith("python -m benchmarks.roll")


def test_bad_windows_and_tokens() -> None:
    folded = fold([[1, 2, 3], [1, 4]])
    for window in ((-3, 0), (3, -2), (None, 0), (True, 0)):
        with pytest.raises(ValueError, match=r"window_size: got .* want two ints from -1 on"):
            folded.spans(window)
    with pytest.raises(TypeError, match="rollouts: want integers"):
        fold([[1.2, 3.0]])
    for rows in (3, 5):
        with pytest.raises(ValueError, match=rf"values: got shape \({rows}, 2\), want \(4, ...\)"):
            folded.unfold(torch.zeros(rows, 2))
        with pytest.raises(ValueError, match=rf"logits: got shape \({rows}, 9\), want \(4, ...\)"):
            folded.log_probs(torch.zeros(rows, 9))


def test_negative_tokens_have_no_probability() -> None:
    """Placeholders of images, or padding of lists of equal lengths."""
    folded = fold([[1, 2, -1], [1, 3, 2]])
    found = folded.unfold(folded.log_probs(torch.zeros(5, 4))).tolist()
    log_4 = pytest.approx(-math.log(4))
    assert found == [[0, log_4, 0], [0, log_4, log_4]]
