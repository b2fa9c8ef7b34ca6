"""Programs that say how an element of a row of bytes is computed: ``unpack(row, d)``.

Such a program reads bytes by indices that depend on ``d`` alone, so the index of every byte is
known before any row is, and so is every other number that depends on ``d`` alone: they are the
tables of the program.
"""

from __future__ import annotations

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
    sizes = {name: _block_size(table) for name, table in _tables(program, range(count)).items()}
    of_bytes, lines = set[Name](), list[Line]()
    for line in program.lines:
        sizes.setdefault(line.name, min((sizes[x] for x in line.names), default=count))
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
def shares_bytes(text: str, head_dim: int) -> bool:
    """Whether each two elements share a byte."""
    program = parsed(text)
    tables = _tables(program, range(head_dim))
    reads = (tables.get(line.arguments[2]) for line in program.lines if line.op == INTEGERS)
    return head_dim % 2 == 0 and any(x is not None and _block_size(x) == 2 for x in reads)


def _tables(program: Program, elements: range) -> dict[Name, Tensor]:
    """The numbers of `elements`, (elements,), of all lines that depend on d alone."""
    known, names = [], {ELEMENT}
    for line in program.lines:
        is_known = line.op not in (INTEGERS, BLOCKS, REPEATED)
        if is_known and names.issuperset(line.names):
            known.append(line)
            names.add(line.name)
    d = torch.arange(elements.start, elements.stop, elements.step)
    found = evaluate(replace(program, lines=tuple(known)), {"s": d, ELEMENT: d}, None, None)
    return {Name(x): found[x].expand(1, 1, 1, len(d)).reshape(-1) for x in names}
