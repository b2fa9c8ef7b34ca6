"""Convert codes of a few bits to 16-bit numbers, two at a time.

A GPU converts integers one by one, at a fraction of the speed of its other instructions, and Triton
computes with single bytes. But a code of a few bits is a number but for a sum or a product: its
bits, moved into the mantissa of a power of two, are that power plus the code; moved into exponent
and mantissa, they are a small floating-point number times a power of two. The bits of two codes
are moved at once, in the two halves of a register.

What a function of a code computes is known before any row is: its numbers for all codes. So a
conversion is tried on all of them, and used only if every number is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...score_mod.evaluate import evaluate
from ...score_mod.program import ELEMENT, INTEGERS, Line, Name, Program
from ...score_mod.rows import LANES, factors, product, steps

FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2  # whose numbers 16 bits hold exactly


class Bits(NamedTuple):
    """Of a 16-bit word that holds codes: ``(word >> shift) & mask ^ flipped``, the bits of a number
    of `dtype`; a negative shift is one to the left."""

    shift: int
    mask: int
    flipped: int
    dtype: torch.dtype

    def of(self, words: Tensor) -> Tensor:
        """The numbers (float64) of words (int32)."""
        moved = words >> self.shift if self.shift >= 0 else words << -self.shift
        return (moved & self.mask ^ self.flipped).to(torch.int16).view(self.dtype).double()

    @property
    def assembly(self) -> str:
        """PTX of two words $1 in a register. What crosses from one to the other is masked."""
        mask, flipped = (f"{x << 16 | x:#010x}" for x in (self.mask, self.flipped))
        move = f"{'shr' if self.shift >= 0 else 'shl'}.b32 $0, $1, {abs(self.shift)}; "
        source = "$0" if self.shift else "$1"
        # 0x6A is the table of (a & b) ^ c.
        return f"{move if self.shift else ''}lop3.b32 $0, {source}, {mask}, {flipped}, 0x6A;"


class Conversion(NamedTuple):
    """A number of a code: `first`, or `first` with `second` subtracted or multiplied."""

    first: Bits
    operation: str = ""  # "-" or "*"
    second: Bits | float = 0.0

    def of(self, words: Tensor) -> Tensor:
        """The numbers (float64) of words (int32), rounded once."""
        x, dtype = self.first.of(words), self.first.dtype
        if isinstance(self.second, Bits):
            y = self.second.of(words)
        else:
            y = torch.tensor(self.second, dtype=dtype).double()
        found = {"": x, "-": x - y, "*": x * y}[self.operation]
        return found.to(dtype).double()


def with_lanes(program: Program, count: int, dtype: torch.dtype) -> Program:
    """The program of `count` elements in which a `Conversion` makes, of their bytes, what depends
    on nothing else: the whole element, or a factor of it. The same program if none can.

    The bytes follow each other in 16-bit words. If there is one other factor and it is exact in
    `dtype`, so is its product with the first but for one rounding, as in float32.
    """
    indices, lines = steps(program, count), {line.name: line for line in program.lines}
    # The bytes, or the index, on which lines depend
    sources: dict[Name, set[Name]] = {ELEMENT: {ELEMENT}}
    for line in program.lines:
        found = (sources.get(x, set()) for x in line.names)
        sources[line.name] = {line.name} if line.op == INTEGERS else set().union(*found)
    words = {x.name for x in program.lines if x.op == INTEGERS and x.arguments[2] in indices}
    given = factors(program)
    others = [x for x in given if isinstance(x, Name) and sources[x].isdisjoint(words)]
    codes = [x for x in given if x not in others]
    read = set[Name]().union(*(sources[x] for x in codes if isinstance(x, Name)))
    if dtype.itemsize != 2 or len(read) != 1 or not read <= words:
        return program
    (name,) = read
    _, (size,), index = lines[name].arguments
    first, step = indices[index]
    numbers = _of_all_bytes(product(program, codes, "code"), size)
    made = conversion(numbers, first % 2 * 8, dtype)
    if step != 2 or size % 2 or made is None:
        return program
    copied = [lines[x].arguments[0] for x in others if lines[x].op == "_to_copy.default"]
    exact = [x for x in copied if lines[x].dtype in (dtype, *FLOAT8)]
    scales = list[Line]()
    if made.first.dtype == dtype and len(exact) == len(others) == 1:
        scales = [Line(Name(f"{x}_scale"), dtype, "_to_copy.default", (x,)) for x in exact]
        others = []
    arguments = ELEMENT, first // 2, made, *(x.name for x in scales)
    line = Line(Name(f"{name}_code"), made.first.dtype, LANES, arguments)
    whole = replace(program, lines=(*program.lines, *scales, line))
    return product(whole, [line.name, *others], f"{name}_scaled")


def _of_all_bytes(program: Program, size: int) -> Tensor:
    """The result (256,) of a program that reads one byte of a row of so many, for all bytes."""
    rows = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, size)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    return evaluate(program, {"s": zero, ELEMENT: zero}, None, rows)[program.result].flatten()


def conversion(numbers: Tensor, place: int, dtype: torch.dtype) -> Conversion | None:
    """How the numbers (256,) of the codes in a byte become numbers of `dtype` (16 bits), which they
    must equal; None if no conversion is known. The byte is at bit `place` of a word.
    """
    codes, numbers = torch.arange(256, dtype=torch.int32), numbers.double().nan_to_num(0.5)
    used = [n for n in range(8) if not torch.equal(numbers, numbers[codes ^ 1 << n])]
    for found in _conversions(numbers, used, place, dtype) if used else ():
        if torch.equal(found.of(codes << place).nan_to_num(0.5), numbers):
            return found
    return None


def _conversions(
    numbers: Tensor, used: list[int], place: int, dtype: torch.dtype
) -> Iterator[Conversion]:
    """Conversions of codes that are the `used` bits of a byte."""
    lowest, bits = used[0], used[-1] + 1 - used[0]
    place, unit = place + lowest, float(numbers[1 << lowest])
    mantissa, one = (7, 0x3F80) if dtype == torch.bfloat16 else (10, 0x3C00)
    power = one + (mantissa << mantissa)  # 2 ** mantissa: the bits below it count ones
    codes = (1 << bits) - 1
    if bits == 8:  # the first byte of a float16
        yield Conversion(Bits(place - 8, 0xFF00, 0, torch.float16))
    # Integers, in the bits of the mantissa; one more bit, the highest, chooses what is subtracted.
    if bits <= mantissa:
        yield Conversion(Bits(place, codes, power, dtype), "-", 2.0**mantissa - float(numbers[0]))
    if bits == mantissa + 1:
        for flipped in (power, power ^ 1 << mantissa):
            highest = Bits(place, 1 << mantissa, flipped, dtype)
            yield Conversion(Bits(place, codes >> 1, power, dtype), "-", highest)
    # Floating-point numbers with a sign, times a power of two
    sign = place + bits - 16
    for fraction in range(bits - 1):
        shift, mask = place + fraction - mantissa, codes >> 1 << mantissa - fraction
        if mask < 1 << 15:
            first = Bits(shift, mask, 0, dtype)
            least = float(first.of(torch.tensor(1 << place)))
            factor = int(torch.tensor(unit / least).to(dtype).view(torch.int16))
            if factor > 0:
                yield Conversion(first, "*", Bits(sign, 1 << 15, factor, dtype))
