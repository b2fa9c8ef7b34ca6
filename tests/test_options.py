"""The table of options agrees with the functions, the ops and the checks."""

from __future__ import annotations

import inspect

import pytest
import torch

import flashtile
from flashtile.call import options, prepare
from flashtile.call.layouts import Dense
from flashtile.problem import Operands, Options

pytestmark = pytest.mark.slow

KINDS = {
    "attention": options.AttentionOptions,
    "attention_varlen": options.VarlenOptions,
    "attention_with_kvcache": options.CacheOptions,
}
FLASH_ATTN = {
    "flash_attn_func": "attention",
    "flash_attn_varlen_func": "attention_varlen",
    "flash_attn_with_kvcache": "attention_with_kvcache",
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


@pytest.mark.parametrize("name", [*KINDS, *FLASH_ATTN])
def test_every_function_checks_the_numbers_under_their_names(name):
    q, ends = torch.randn(3, 2, 8), torch.tensor([0, 3], dtype=torch.int32)
    call = (q, q, q, ends, ends, 3, 3) if "varlen" in name else (q[None], q[None], q[None])
    numbers = options.NUMBERS.keys() & options.options_of(KINDS[FLASH_ATTN.get(name, name)])
    assert len(numbers) >= 4
    for number in numbers:
        with pytest.raises((TypeError, ValueError), match=f"^{number}: "):
            getattr(flashtile, name)(*call, **{number: "much"})


def test_defaults_are_those_of_the_fields():
    q = torch.randn(1, 3, 2, 8)
    _, found = prepare.describe((q, q, q), Dense(), {})
    wanted = Options(max_seqlen_q=3, max_seqlen_k=3, softmax_scale=8**-0.5)
    assert found == wanted


def test_the_schema_has_the_numbers_in_order():
    arguments = torch.ops.flashtile.attention_forward.default._schema.arguments
    assert [argument.name for argument in arguments] == [*Operands._fields, *Options._fields]
