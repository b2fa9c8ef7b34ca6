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


def unpacked(text: str, rows: Tensor, head_dim: int) -> Tensor:
    """The elements (..., head_dim) in float32 of rows (..., bytes) of uint8."""
    program, d = parsed(text), torch.arange(head_dim, device=rows.device)
    # (rows, 1, 1, 1, head_dim), where `evaluate` has (batch, heads, rows, keys)
    flat = rows.reshape(-1, rows.shape[-1])
    found = evaluate(program, {ELEMENT: d.view(1, 1, 1, -1)}, None, flat)[program.result]
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


def specialised(program: Program, elements: range) -> Program:
    """The program of the elements ``elements[d]``, for d from 0: what depends on d alone becomes a
    number, or a multiple of d plus a number, where it is one, and a choice between two numbers that
    is the same for all elements becomes that number.
    """
    tables = _tables(program, elements)
    lines: list[Line] = []
    names: dict[Any, Any] = {}  # what stands for a line

    def write(dtype: torch.dtype, op: str, *arguments: Any) -> Name:
        lines.append(Line(Name(f"u{len(lines)}"), dtype, op, arguments))
        return lines[-1].name

    def simple(name: Name, dtype: torch.dtype) -> Name | None:
        """A line that depends on d alone, as a number or as a multiple of d plus a number."""
        table = tables.get(name)
        if table is None:
            return None
        if bool((table == table[0]).all()):
            return write(dtype, CONSTANT, table[0].item())
        if dtype.is_floating_point or dtype == torch.bool or bool(table.diff().diff().any()):
            return None
        step, start = int(table[1] - table[0]), int(table[0])
        found = Name(ELEMENT) if step == 1 else write(dtype, "mul.Tensor", Name(ELEMENT), step)
        return write(dtype, "add.Tensor", found, start) if start else found

    names[ELEMENT] = simple(Name(ELEMENT), torch.int64)
    for line in program.lines:
        choice = tables.get(line.arguments[0]) if line.op == "where.self" else None
        found = simple(line.name, line.dtype)
        if found is None and choice is not None and bool((choice == choice[0]).all()):
            found = names.get(line.arguments[1 if choice[0] else 2])
        if found is None:
            arguments = tuple(names.get(x, x) for x in line.arguments)
            options = tuple((key, names.get(x, x)) for key, x in line.options)
            lines.append(line._replace(arguments=arguments, options=options))
            found = line.name
        names[line.name] = found
    return replace(program, lines=tuple(lines), result=names[program.result]).without_unused()


@memoised(256)
def shares_bytes(text: str, head_dim: int) -> bool:
    """Whether the even elements, or the odd ones, have simpler addresses than all elements."""
    program = parsed(text)
    every, even = (specialised(program, range(0, head_dim, step)) for step in (1, 2))
    return head_dim % 2 == 0 and _scattered_reads(even) < _scattered_reads(every)


def _scattered_reads(program: Program) -> int:
    """How many bytes it reads whose index is neither a number nor d plus a number."""
    lines = {line.name: line for line in program.lines}
    lines[Name(ELEMENT)] = Line(Name(ELEMENT), torch.int64, "add.Tensor", (Name(ELEMENT), 0))

    def is_scattered(index: Any) -> bool:
        line = lines.get(index)
        if line is None or line.op == CONSTANT:
            return False
        return line.op != "add.Tensor" or line.arguments[0] != ELEMENT

    return sum(is_scattered(line.arguments[2]) for line in program.lines if line.op == INTEGERS)


def _tables(program: Program, elements: range) -> dict[Name, Tensor]:
    """The numbers of `elements`, (elements,), of all lines that depend on d alone."""
    known, names = [], {Name(ELEMENT)}
    for line in program.lines:
        if line.op != INTEGERS and names.issuperset(line.names):
            known.append(line)
            names.add(line.name)
    d = torch.arange(elements.start, elements.stop, elements.step)
    found = evaluate(replace(program, lines=tuple(known)), {ELEMENT: d}, None, None)
    return {Name(x): found[x].expand(1, 1, 1, len(d)).reshape(-1) for x in names}
