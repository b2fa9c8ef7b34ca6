"""Score functions in the emulated Hopper kernels, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from configurations import one_kind_each
from torch import Tensor

pytest.importorskip("triton", reason="the package triton is not installed")

from flashtile.backends.hopper.relative_bias import with_program, with_table
from flashtile.call.layouts import Dense, Layout, Packed
from flashtile.call.prepare import describe
from flashtile.masks import Spans
from flashtile.problem import AttentionProblem, Operands
from flashtile.testing import alibi_slopes, generator, normal

from . import emulator
from . import test_backward_emulated as backward
from . import test_forward_emulated as forward
from .inputs import OF_LISTS, dense_inputs, packed_inputs, random_mask
from .score_functions import FUNCTIONS, MASKED, described


def check(
    passes: Any, tensors: list[Tensor], layout: Layout, given: dict[str, Any], seed: int,
    **how: Any,
) -> None:  # fmt: skip
    packed = layout if isinstance(layout, Packed) else None
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OF_LISTS.items():
            patch.setitem(emulator.LANGUAGE, name, value)
        if passes is forward:
            forward.say_more(patch)
        make = described if "score_mod" in given else describe
        operands, options = make(tensors, layout, given)
        options = with_program(AttentionProblem.of(operands, options)).options
        operands = Operands(*with_table(operands))
        passes.check(operands, options, given, packed, seed, **how)


@pytest.mark.parametrize("passes", [forward, backward], ids=["forward", "backward"])
@pytest.mark.parametrize(("name", "head_dim"), one_kind_each(FUNCTIONS, [64, 128, 96, 192]))
def test_functions(name: str, head_dim: int, passes: Any) -> None:
    tensors = dense_inputs(1, "contiguous", {"B": 2, "M": 150, "N": 200, "Hq": 2, "D": head_dim})
    check(passes, tensors, Dense(), {"score_mod": FUNCTIONS[name]} | MASKED.get(name, {}), 1)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (50, 20)},
    "softcap": {"softcap": 3.0, "window_size": (70, 0)},
    "alibi": {"alibi_slopes": alibi_slopes(generator(3), 2)},
    "sink": {"sink": normal(generator(0), 2), "causal": True},
    "negative scale": {"softmax_scale": -0.1, "attention_chunk": 64},
    "block_mask": {"block_mask": random_mask((1, 1, 270, 330), (128, 128), 3)},
    "spans": {"mask": Spans.documents_of_lengths(torch.tensor([[130, 1, 139]]), 270)},
}


@pytest.mark.parametrize("passes", [forward, backward], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("option", "case"),
    one_kind_each(OPTIONS, [(64, "whole table"), (128, "infinite slope"), (80, "causal")]),
    ids=str,
)
def test_with_options(option: str, case: tuple[int, str], passes: Any) -> None:
    head_dim, name = case
    N = 270 if option == "spans" else 330
    tensors = dense_inputs(2, "contiguous", {"M": 270, "N": N, "D": head_dim})
    given = {"score_mod": FUNCTIONS[name], **OPTIONS[option]}
    check(passes, tensors, Dense(), given, 2)


@pytest.mark.parametrize("passes", [forward, backward], ids=["forward", "backward"])
@pytest.mark.parametrize(("name", "head_dim"), [("table", 64), ("undefined ahead", 128)])
def test_packed(name: str, head_dim: int, passes: Any) -> None:
    tensors, layout, counts = packed_inputs(4, head_dim, [70, 0, 1, 129], [130, 40, 0, 165], {})
    given = {"score_mod": FUNCTIONS[name], **MASKED.get(name, {}), **counts}
    check(passes, tensors, layout, given, 4)


@pytest.mark.parametrize(("head_dim", "more"), [(64, {"parts": 2}), (128, {"parts": 3})])
def test_parts_of_tiles(head_dim: int, more: dict[str, Any]) -> None:
    sizes = {"B": 2, "Hq": 3, "Hk": 1, "M": 190, "N": 230, "D": head_dim}
    tensors = dense_inputs(3, "contiguous", sizes)
    check(backward, tensors, Dense(), {"score_mod": FUNCTIONS["alibi"], "causal": True}, 3, **more)


def test_deterministic() -> None:
    tensors = dense_inputs(3, "contiguous", {"M": 260, "N": 500, "D": 128})
    given = {"score_mod": FUNCTIONS["batch and head"], "deterministic": True}
    check(backward, tensors, Dense(), given, 3)


def test_a_batch_with_lengths() -> None:
    tensors = dense_inputs(6, "contiguous", {"B": 2, "M": 210, "N": 290, "D": 64})
    lengths = torch.tensor([290, 40], dtype=torch.int32)
    check(forward, tensors, Dense(), {"score_mod": FUNCTIONS["table"], "seqused_k": lengths}, 6)


def test_rows_that_the_function_hides() -> None:
    """They are empty, in the first blocks that their tile visits or in all of them."""
    tensors = dense_inputs(7, "contiguous", {"M": 200, "N": 400, "D": 64})
    seen = torch.arange(200) % 3 * 200  # rows see no key, the first half, or all
    hidden = {"score_mod": lambda s, b, h, i, j: torch.where(j < seen[i], s, -torch.inf)}
    for passes in (forward, backward):
        check(passes, tensors, Dense(), hidden, 7)


# Tables of other dtypes; distances from the position of a query, which is not its row.
RELATIVE: dict[str, dict[str, Any]] = {
    "near": {"relative_bias": normal(generator(5), 2, 61)},
    "float16": {"relative_bias": normal(generator(6), 2, 1201, dtype=torch.float16)},
    "causal": {"relative_bias": normal(generator(7), 2, 257, dtype=torch.bfloat16), "causal": True},
    "one number": {"relative_bias": normal(generator(8), 2, 1), "softcap": 3.0},
    "function": {
        "relative_bias": normal(generator(9), 2, 81).mT.contiguous().mT,
        "score_mod": FUNCTIONS["softcap"],
        "alibi_slopes": alibi_slopes(generator(3), 2),
        "window_size": (90, 30),
    },
}


@pytest.mark.parametrize("passes", [forward, backward], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("case", "sizes"),
    one_kind_each(RELATIVE, [(64, 150, 200), (128, 200, 150), (96, 129, 129)]),
    ids=str,
)
def test_a_relative_bias(case: str, sizes: tuple[int, int, int], passes: Any) -> None:
    head_dim, M, N = sizes
    tensors = dense_inputs(8, "contiguous", {"B": 2, "M": M, "N": N, "Hq": 2, "D": head_dim})
    check(passes, tensors, Dense(), RELATIVE[case], 8)


@pytest.mark.parametrize("passes", [forward, backward], ids=["forward", "backward"])
def test_a_relative_bias_of_packed_sequences(passes: Any) -> None:
    tensors, layout, counts = packed_inputs(4, 64, [70, 0, 1, 129], [130, 40, 0, 165], {})
    table = normal(generator(5), tensors[0].shape[-2], 61)
    check(passes, tensors, layout, {"relative_bias": table, **counts}, 4)
