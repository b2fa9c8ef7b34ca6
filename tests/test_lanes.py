"""Codes of packed rows that become numbers of 16 bits two at a time, and the assembly that does it.

Needs no GPU and no Triton.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from packed_rows import E2M1

from flashtile import CacheFormat, cache_formats
from flashtile.backends.triton.lanes import Bits, conversion, with_lanes
from flashtile.score_mod.program import parsed
from flashtile.score_mod.rows import LANES, specialised, split_scale

BYTES = torch.arange(256)
SIGNED_E2M1 = torch.cat((E2M1, -E2M1))
FUNCTIONS = {
    "int8": BYTES - 128.0,
    "signed": BYTES.to(torch.uint8).view(torch.int8).float(),
    "low half": BYTES % 16 - 8.0,
    "high half": BYTES // 16 - 8.0,
    "three bits": BYTES // 8 % 8 - 1.0,
    "e2m1": SIGNED_E2M1[BYTES % 16],
    "e2m1 times 6": 6 * SIGNED_E2M1[BYTES // 16],
    "e5m2": BYTES.to(torch.uint8).view(torch.float8_e5m2).float(),
}
KNOWN = [(name, torch.bfloat16) for name in FUNCTIONS if "times" not in name]
KNOWN += [(name, torch.float16) for name in ("int8", "low half", "e2m1", "e5m2")]


def assembled(bits: Bits, first: int, second: int) -> list[float]:
    """What the assembly makes of a register of two words."""
    lanes = {"$1": first | second << 16}
    instructions = re.findall(r"(\w+)\.b32 \$0, (\$\d), (\w+)(?:, (\w+), 0x6A)?;", bits.assembly)
    assert len(instructions) == bits.assembly.count(";")
    for name, source, *numbers in instructions:
        x, y = lanes[source], int(numbers[0], 0)
        if name == "lop3":
            lanes["$0"] = x & y ^ int(numbers[1], 0)
        else:
            lanes["$0"] = x >> y if name == "shr" else x << y & 0xFFFFFFFF
    halves = torch.tensor([lanes["$0"] & 0xFFFF, lanes["$0"] >> 16])
    return halves.to(torch.int16).view(bits.dtype).double().tolist()


@pytest.mark.parametrize("place", [0, 8])
@pytest.mark.parametrize(("name", "dtype"), KNOWN, ids=str)
def test_every_code_becomes_its_number(name: str, dtype: torch.dtype, place: int):
    """Whatever lies beside it, in its word and in the word that shares the register."""
    made = conversion(FUNCTIONS[name], place, dtype)
    assert made is not None
    for code in range(256):
        words = [code << place | other << 8 - place for other in (0, 255, 90)]
        found = made.of(torch.tensor(words))
        torch.testing.assert_close(
            found, FUNCTIONS[name][code].double().expand(3), rtol=0, atol=0, equal_nan=True
        )
        for bits in (made.first, made.second):
            if isinstance(bits, Bits):
                wanted = bits.of(torch.tensor([words[1], words[2]])).tolist()
                assert repr(assembled(bits, words[1], words[2])) == repr(wanted)


def test_what_is_not_exact_is_not_converted():
    wide = BYTES * 1.0
    wide[77] += 0.25
    e4m3 = BYTES.to(torch.uint8).view(torch.float8_e4m3fn).float()  # NaN where others are 480
    for function in (wide, e4m3, BYTES.sqrt(), BYTES * 0.0):
        assert conversion(function, 0, torch.bfloat16) is None
    assert conversion(FUNCTIONS["signed"], 0, torch.float16) is None


def lanes_of(cache_format: CacheFormat, count: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the first of each so many elements are converted so."""
    head_dim = cache_format.head_dim or 64
    whole, _ = split_scale(specialised(parsed(cache_format.program), range(head_dim)), head_dim)
    program = specialised(whole, range(0, head_dim, count))
    made = with_lanes(program, head_dim // count, dtype)
    return any(line.op == LANES for line in made.lines)


def test_which_formats_have_lanes():
    assert lanes_of(cache_formats.int8(64), 2) and lanes_of(cache_formats.int4(64), 4)
    assert lanes_of(cache_formats.nvfp4(64), 4) and lanes_of(cache_formats.e5m2(64), 2)
    assert lanes_of(CacheFormat(64, lambda row, d: (row[d] - 128.0) * row[d // 32].float()), 2)
    # Elements that are not in neighbouring words, rows of odd size, numbers of two bytes, and those
    # that depend on their index
    assert not lanes_of(cache_formats.int8(64), 1) and not lanes_of(cache_formats.int4(64), 2)
    assert not lanes_of(CacheFormat(65, lambda row, d: row[d] - 128.0), 2)
    assert not lanes_of(CacheFormat(64, lambda row, d: row[d] - row[d // 2] * 1.0), 2)
    assert not lanes_of(CacheFormat(64, lambda row, d: row[d] - d * 1.0), 2)
    assert not lanes_of(cache_formats.int8(64), 2, torch.float32)


@pytest.mark.parametrize("count", [1, 2])
def test_only_one_scale_is_multiplied_in_16_bits(count: int):
    """The product of two may be rounded twice, or be too large."""

    def unpack(row: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        scales = [row[64 + n].view(torch.float8_e5m2).float() for n in range(count)]
        return math.prod(scales, start=row[d] - 128.0)

    program = specialised(parsed(CacheFormat(66, unpack).program), range(0, 64, 2))
    made = with_lanes(program, 32, torch.float16)
    (line,) = (line for line in made.lines if line.op == LANES)
    assert len(line.arguments) - 3 == (count == 1)
