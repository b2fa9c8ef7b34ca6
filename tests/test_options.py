"""The table of options agrees with the functions, the ops and the checks.

The last test adds an option to a copy of the package by two edits outside the backends.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashtile
from flashtile.call import options, prepare
from flashtile.call.layouts import Dense
from flashtile.problem import Operands, Options

pytestmark = pytest.mark.slow

PACKAGE = Path(flashtile.__file__).parent
KINDS = {
    "attention": options.AttentionOptions,
    "attention_varlen": options.VarlenOptions,
    "attention_with_kvcache": options.CacheOptions,
}


@pytest.mark.parametrize("name", KINDS)
def test_signatures_list_the_options_with_their_defaults(name):
    parameters = inspect.signature(getattr(flashtile, name)).parameters
    assert "options" not in parameters
    for option, entry in options.options_of(KINDS[name]).items():
        assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[option].default == entry.default


def test_signatures_show_the_type_of_an_option_without_its_table_entry():
    parameters = inspect.signature(flashtile.attention).parameters
    found = {name: parameters[name].annotation for name in ("softcap", "window_size", "bias")}
    assert found == {"softcap": "float", "window_size": "WindowSize", "bias": "Tensor | None"}


@pytest.mark.parametrize("name", KINDS)
def test_every_option_is_described(name):
    described = (flashtile.attention.__doc__ or "") + (getattr(flashtile, name).__doc__ or "")
    for option in options.options_of(KINDS[name]):
        assert option in described, option


def test_numbers_and_tensors_have_their_fields():
    assert set(options.NUMBERS) <= set(Options._fields)
    assert set(Operands._fields) >= options.TENSORS


def test_numbers_are_checked_under_their_names():
    q = torch.randn(1, 3, 2, 8)
    for name in options.NUMBERS:
        with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
            flashtile.attention(q, q, q, **{name: "much"})


def test_defaults_are_those_of_the_fields():
    q = torch.randn(1, 3, 2, 8)
    _, found = prepare.describe((q, q, q), Dense(), {})
    wanted = Options(max_seqlen_q=3, max_seqlen_k=3, softmax_scale=8**-0.5)
    assert found == wanted


def test_the_schema_has_the_numbers_in_order():
    arguments = torch.ops.flashtile.attention_forward.default._schema.arguments
    assert [argument.name for argument in arguments] == [*Operands._fields, *Options._fields]


# The steps of `CONTRIBUTING.md`: a line of the table, a fact.
EDITS = {
    "call/options.py": (
        "    attention_chunk: Annotated[int, number(0, checks.chunk)]\n",
        "    tilt: Annotated[float, number(0.0, checks.probability)]\n",
    ),
    "problem.py": ("    deterministic: bool = False\n", "    tilt: float = 0.0\n"),
}
USES = """
import inspect, torch, flashtile
from flashtile.backends import cpu
seen = []
forward = cpu.forward
def recording(problem, operands):
    seen.append(problem.options.tilt)
    return forward(problem, operands)
cpu.forward = recording
q = torch.randn(1, 3, 2, 8)
cu = torch.tensor([0, 3], dtype=torch.int32)
calls = {
    flashtile.attention: (q, q, q),
    flashtile.flash_attn_func: (q, q, q),
    flashtile.attention_varlen: (q[0], q[0], q[0], cu, cu, 3, 3),
    flashtile.flash_attn_varlen_func: (q[0], q[0], q[0], cu, cu, 3, 3),
    flashtile.attention_with_kvcache: (q, q, q),
    flashtile.flash_attn_with_kvcache: (q, q, q),
}
for function, call in calls.items():
    for tilt in (0.5, 0.5, 0.25):
        function(*call, tilt=tilt)
        assert seen.pop() == tilt and not seen, function
    try:
        function(*call, tilt=2.0)
    except ValueError as error:
        assert str(error).startswith("tilt: got 2.0"), error
    else:
        raise AssertionError(function)
    assert flashtile.explain(function, *call, tilt=0.5).problem.options.tilt == 0.5
leaf = q.clone().requires_grad_()
flashtile.attention(leaf, q, q, tilt=0.5).sum().backward()
torch.compile(flashtile.attention, backend="eager", fullgraph=True)(q, q, q, tilt=0.75)
assert seen[-1] == 0.75
assert inspect.signature(flashtile.attention).parameters["tilt"].default == 0.0
print("float tilt" in str(torch.ops.flashtile.attention_backward.default._schema))
"""


def test_a_new_number_takes_two_edits_outside_the_backends(tmp_path):
    copy = tmp_path / "flashtile"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (line, added) in EDITS.items():
        text = (copy / name).read_text()
        assert text.count(line) == 1
        (copy / name).write_text(text.replace(line, line + added))
    done = subprocess.run(
        [sys.executable, "-c", USES],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"
