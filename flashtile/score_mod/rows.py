"""Programs that say how an element of a row of bytes is computed: ``unpack(row, d)``.

Such a program reads bytes by indices that depend on ``d`` alone, so the index of every byte is
known before any row is, and so is every other number that depends on ``d`` alone: they are the
tables of the program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..lru import memoised
from .evaluate import evaluate
from .program import CONSTANT, ELEMENT, INTEGERS, Line, Name, Program, parsed

# Operations of a program that computes some numbers once for a block of elements (`blocked`): the
# index of every block of so many elements, and a number of each block for all of its elements.
BLOCKS, REPEATED = "blocks", "repeated"
# A number of the code of an element; see `backends/triton/lanes.py`.
LANES = "lanes"


def unpacked(text: str, rows: Tensor, head_dim: int) -> Tensor:
    """The elements (..., head_dim) in float32 of rows (..., bytes) of uint8."""
    program, d = parsed(text), torch.arange(head_dim, device=rows.device)
    # (rows, 1, 1, 1, head_dim), where `evaluate` has (batch, heads, rows, keys)
    flat = rows.reshape(-1, rows.shape[-1])
    given = {"s": d, ELEMENT: d.view(1, 1, 1, -1)}  # there is no score
    found = evaluate(program, given, None, flat)[program.result]
    return found.expand(flat.shape[0], 1, 1, 1, head_dim).reshape(*rows.shape[:-1], head_dim)


@memoised(256)
def check_reads(text: str, head_dim: int, bytes_per_row: int) -> None:
    """Raise unless a program of elements 0 to `head_dim` - 1 reads bytes inside of the row only.

    Raises:
        IndexError: it reads past the row.
        NotImplementedError: the index of a byte depends on another byte.
        ValueError: it reads no byte.
    """
    program = parsed(text)
    tables = _tables(program, range(head_dim))
    reads = [line for line in program.lines if line.op == INTEGERS]
    if not reads:
        raise ValueError("score_mod: reads no byte of its row")
    for line in reads:
        index = line.arguments[2]
        if isinstance(index, Name) and index not in tables:
            raise NotImplementedError(
                "score_mod: reads a byte whose index depends on another byte; want an index that "
                "depends on d"
            )
        table = tables[index] if isinstance(index, Name) else torch.tensor([index])
        least = 0 if isinstance(index, Name) else -bytes_per_row  # row[-1] is the last byte
        if int(table.min()) < least or int(table.max()) >= bytes_per_row:
            raise IndexError(
                f"score_mod: reads bytes {int(table.min())} to {int(table.max())} for the elements "
                f"0 to {head_dim - 1}, past its row of {bytes_per_row} bytes"
            )


def specialised(
    program: Program, elements: range, prefix: str = "u", index: Name = ELEMENT
) -> Program:
    """The program of the elements ``elements[index]``, for indices from 0, in lines whose names
    begin with `prefix`: what depends on d alone becomes a number, or a multiple of the index plus a
    number, where it is one, and a choice between two numbers that is the same for all elements
    becomes that number.
    """
    tables = _tables(program, elements)
    lines: list[Line] = []
    names: dict[Any, Any] = {}  # what stands for a line

    def write(dtype: torch.dtype, op: str, arguments: Any, options: Any = ()) -> Name:
        lines.append(Line(Name(f"{prefix}{len(lines)}"), dtype, op, tuple(arguments), options))
        return lines[-1].name

    def simple(name: Name, dtype: torch.dtype) -> Name | None:
        """A line that depends on d alone, as a number or as a multiple of the index plus one."""
        table = tables.get(name)
        if table is None:
            return None
        if bool((table == table[0]).all()):
            return write(dtype, CONSTANT, (table[0].item(),))
        if dtype.is_floating_point or dtype == torch.bool or bool(table.diff().diff().any()):
            return None
        step, start = int(table[1] - table[0]), int(table[0])
        found = index if step == 1 else write(dtype, "mul.Tensor", (index, step))
        return write(dtype, "add.Tensor", (found, start)) if start else found

    names[ELEMENT] = simple(ELEMENT, torch.int64)
    for line in program.lines:
        choice = tables.get(line.arguments[0]) if line.op == "where.self" else None
        found = simple(line.name, line.dtype)
        if found is None and choice is not None and bool((choice == choice[0]).all()):
            found = names.get(line.arguments[1 if choice[0] else 2])
        if found is None:
            options = tuple((key, names.get(x, x)) for key, x in line.options)
            given = (names.get(x, x) for x in line.arguments)
            found = write(line.dtype, line.op, given, options)
        names[line.name] = found
    return replace(program, lines=tuple(lines), result=names[program.result]).without_unused()


def blocked(program: Program, count: int) -> Program:
    """The program of elements 0 to `count` - 1, in which numbers that are the same for blocks of
    elements, such as their scales, are computed once for each block.
    """
    sizes, of_bytes, lines = _sizes(program, range(count)), set[Name](), list[Line]()
    for line in program.lines:
        if line.op == INTEGERS or not of_bytes.isdisjoint(line.names):
            of_bytes.add(line.name)
    most = 1 << (count - 1).bit_length() >> 1  # two blocks, where all elements have one number
    for line in program.lines:
        size = min(sizes[line.name], most)
        if line.name not in of_bytes or size < 2:
            lines.append(line)
            continue
        index, whole = Name(f"{line.name}_d"), replace(program, result=line.name)
        own = specialised(whole, range(0, count, size), f"{line.name}_", index)
        lines += [Line(index, torch.int32, BLOCKS, (size,)), *own.lines]
        lines.append(Line(line.name, line.dtype, REPEATED, (own.result, size)))
    return replace(program, lines=tuple(lines)).without_unused()


def split_scale(program: Program, count: int) -> tuple[Program, Program | None]:
    """Two programs whose product are elements 0 to `count` - 1, the second of which is the same for
    all of them; None if there is no such factor. Powers of two, which are exact, stay in the first.
    """
    sizes = _sizes(program, range(count))
    own, common = list[Any](), list[Any]()
    for x in factors(program):
        is_common = sizes[x] == count if isinstance(x, Name) else math.frexp(x)[0] != 0.5
        (common if is_common else own).append(x)
    if not own or not common:
        return program, None
    return product(program, own, "own"), product(program, common, "common")


def is_within(program: Program, count: int, least: float, most: float) -> bool:
    """Whether elements 0 to `count` - 1 are known to be 0 or of magnitudes between two numbers,
    whatever the row holds. Factors that read several bytes are not known.
    """
    low = high = 1.0
    for x in factors(program):
        part = product(program, [x], "factor")
        sizes = [line.arguments[1][0] for line in part.lines if line.op == INTEGERS]
        if len(sizes) > 1:
            return False
        rows = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, *(sizes or [1]))
        found = unpacked(str(part), rows, count).double().abs()
        found = found[(found > 0) & found.isfinite()]
        if len(found):
            low, high = low * float(found.min()), high * float(found.max())
    return least <= low and high <= most


def factors(program: Program) -> list[Any]:
    """The names and numbers whose product, in float32, is the result."""
    lines = {line.name: line for line in program.lines}

    def split(x: Any) -> list[Any]:
        line = lines.get(x)
        if line is None or line.op != "mul.Tensor" or line.dtype != torch.float32:
            return [x]
        return [factor for argument in line.arguments for factor in split(argument)]

    return split(program.result)


def product(
    program: Program, given: Sequence[Any], prefix: str, dtype: torch.dtype = torch.float32
) -> Program:
    """The program whose result is the product of names and numbers, in `dtype`."""
    names, lines = [x for x in given if isinstance(x, Name)], list(program.lines)
    number = math.prod(x for x in given if not isinstance(x, Name))
    if not names:
        lines.append(Line(Name(prefix), dtype, CONSTANT, (number,)))
        names, number = [lines[-1].name], 1
    last, *others = [*names, number] if number != 1 else names
    for n, x in enumerate(others):
        lines.append(Line(Name(f"{prefix}{n}"), dtype, "mul.Tensor", (last, x)))
        last = lines[-1].name
    return replace(program, lines=tuple(lines), result=last).without_unused()


def _sizes(program: Program, elements: range) -> dict[Name, int]:
    """Of every line, the largest known size of blocks of elements that have the same number."""
    sizes = {name: _block_size(table) for name, table in _tables(program, elements).items()}
    for line in program.lines:
        sizes.setdefault(line.name, min((sizes[x] for x in line.names), default=len(elements)))
    return sizes


def _block_size(table: Tensor) -> int:
    """The largest power of two such that the numbers of all blocks of so many elements are equal;
    the number of elements if all are.
    """
    size, index = 1, torch.arange(len(table))
    if bool((table == table[0]).all()):
        return len(table)
    while torch.equal(table, table[index - index % (2 * size)]):
        size *= 2
    return size


@memoised(256)
def bytes_per_row(text: str) -> int:
    """The size of the rows that a program reads."""
    return next(int(x.arguments[1][0]) for x in parsed(text).lines if x.op == INTEGERS)


@memoised(256)
def elements_per_word(text: str, head_dim: int) -> int:
    """How many neighbouring elements two bytes hold, 2 or 4; 1 if others."""
    program = parsed(text)
    tables = _tables(program, range(head_dim))
    reads = [tables.get(line.arguments[2]) for line in program.lines if line.op == INTEGERS]
    for count in (4, 2):
        if head_dim % count == 0 and any(
            x is not None and bool((x.view(-1, count).diff(dim=0) == 2).all()) for x in reads
        ):
            return count
    return 1


def steps(program: Program, count: int) -> dict[Name, tuple[int, int]]:
    """Of the lines that are a multiple of the index plus a number: this number and the factor."""
    found = {}
    for name, table in _tables(program, range(count)).items():
        step = table.diff()
        if not table.dtype.is_floating_point and count > 1 and bool((step == step[0]).all()):
            found[name] = int(table[0]), int(step[0])
    return found


def _tables(program: Program, elements: range) -> dict[Name, Tensor]:
    """The numbers of `elements`, (elements,), of all lines that depend on d alone, or on the index
    of a block in the same place.
    """
    indices = {ELEMENT, *(line.name for line in program.lines if line.op == BLOCKS)}
    known, names = [], set(indices)
    for line in program.lines:
        is_known = line.op not in (INTEGERS, BLOCKS, REPEATED, LANES)
        if is_known and names.issuperset(line.names):
            known.append(line)
            names.add(line.name)
    d = torch.arange(elements.start, elements.stop, elements.step)
    inputs: dict[str, Tensor] = {"s": d} | dict.fromkeys(indices, d)
    found = evaluate(replace(program, lines=tuple(known)), inputs, None, None)
    return {Name(x): found[x].expand(1, 1, 1, len(d)).reshape(-1) for x in names}
