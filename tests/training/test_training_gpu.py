"""On a GPU: every attention trains the same curve, and memory is measured.

Wants the packages of the extra `train`, and a C compiler, which Triton and FlexAttention call.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_runs import settings

from flashtile.testing import assert_close
from training import memory
from training.settings import ATTENTIONS
from training.train import Run

pytestmark = pytest.mark.gpu
PLAIN = (  # the smallest head dim that all of them take is 16
    *("model.hidden_size=64", "model.attention_dropout=0", "model.residual_dropout=0"),
    *("data.context=128", "data.validation_share=0.5", "trainer.accelerator=cuda"),
)


def losses(folder: Path, *changes: str) -> torch.Tensor:
    """The loss of the first steps, float32."""
    run = Run(settings(folder, *PLAIN, *changes))
    return torch.stack([run.train_step()[0].cpu() for _ in range(4)])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "eager"])
def test_every_attention_trains_in_bfloat16_as_the_textbook_does_in_float32(tmp_path, name, packed):
    if name == "sdpa-flash" and packed:
        pytest.skip("sdpa-flash takes no mask, which hides other documents")
    changes = (f"data.packed={packed}", "trainer.precision=bf16-mixed")
    exact = losses(tmp_path, "attn=eager", f"data.packed={packed}")
    plain = losses(tmp_path, "attn=eager", *changes)
    found = losses(tmp_path, f"attn={name}", *changes)
    assert not torch.equal(found, exact)  # it was bfloat16
    assert_close("losses", found, exact, plain, dtype=torch.bfloat16)


def test_memory_is_that_of_a_run_alone(tmp_path):
    """A large run before it in the same process does not count."""
    small = settings(tmp_path, *PLAIN)
    first = memory.measure(small)
    memory.measure(settings(tmp_path, *PLAIN, "model.hidden_size=512", "model.num_layers=8"))
    assert memory.measure(small).peak_memory_mib == pytest.approx(first.peak_memory_mib, rel=0.1)
