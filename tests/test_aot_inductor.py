"""A module that calls attention, exported, and compiled ahead of time by AOTInductor."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from rounded_results import judge_client

import flashtile
from flashtile.testing import attention_reference

pytestmark = pytest.mark.slow


class Attend(torch.nn.Module):
    """Projections around one call with options of several kinds."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.sink = torch.nn.Parameter(torch.randn(4))

    def forward(self, x, attention=flashtile.attention):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
        out = attention(q, k, v, causal=True, window_size=(5, 0), sink=self.sink)
        return out.flatten(2).relu()


@pytest.fixture
def exported(seed):
    module = Attend().eval()
    length = torch.export.Dim("length", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(
            module, (torch.randn(2, 9, 32),), dynamic_shapes=({1: length},)
        )
    return module, program


def judge_at_other_lengths(module, run, seed):
    for length in (9, 2, 40):
        x = torch.randn(2, length, 32)

        def plain(dtype, x=x):
            def attention(*args, **options):
                return attention_reference(*args, **options, compute_dtype=dtype).out

            out = copy.deepcopy(module).to(dtype)(x.to(dtype), attention)
            return {"out": out.detach()}

        judge_client({"out": run(x).detach()}, plain, seed)


def test_export_with_a_dynamic_length(exported, tmp_path, seed):
    module, program = exported
    values = {node.op: node for node in program.graph.nodes}
    out = values["output"].args[0][0].meta["val"]
    x = program.graph.find_nodes(op="placeholder")[-1].meta["val"]
    assert isinstance(out.shape[1], torch.SymInt)  # makes a compiler allocate for any length
    assert out.shape == x.shape
    judge_at_other_lengths(module, program.module(), seed)
    torch.export.save(program, tmp_path / "attend.pt2")
    loaded = torch.export.load(tmp_path / "attend.pt2")
    judge_at_other_lengths(module, loaded.module(), seed)


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_aot_inductor(exported, tmp_path, seed):
    module, program = exported
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "attend.pt2")
    )
    judge_at_other_lengths(module, torch._inductor.aoti_load_package(package), seed)
