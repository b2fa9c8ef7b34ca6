"""Write the gradients of what a score function captures as the source of Triton functions.

Pure Python. A tile of scores adds to a captured number what all scores that read it contribute.
Which scores share a number decides where they are added up: see
`score_gradients.captured_gradient_kernel`.
"""

from __future__ import annotations

from ...gpu.score_source import DIFFERENCE, KEY, QUERY, Axes, Writer, module_of
from ...lru import memoised
from ...score_mod.program import INDICES, Name, Program, parsed

# What a function is for: to add up the gradients of a tile, and to add the sums of a band.
CAPTURED, SUMS = "captured", "sums"
_CAPTURED_INPUTS = {
    CAPTURED: ("s", *INDICES, "g", "visible", "values_ptr", "integers_ptr", "total_ptr", "kept"),
    SUMS: (*INDICES, "values_ptr", "integers_ptr", "total_ptr", "kept"),
}


@memoised(256)
def captured_source(text: str, kind: str, by_difference: bool) -> str:
    """The source of a module with the function ``score`` for a program with gradients of captured
    values. ``total_ptr`` are the gradients of all captured values.

    CAPTURED: of a tile with rows (SIDE, 1) and keys (1, SIDE), where it is ``visible``. Adds those
    that tiles of a band share to the tiles ``kept``, which it returns, and all others to
    ``total_ptr``. SUMS: adds the sums ``kept`` (SIDE,) of the diagonals of these tiles, for one
    query and SIDE keys, to ``total_ptr``.

    `by_difference`: rows and keys stand next to each other, so that j - i is the same for the same
    diagonal of all tiles of a band.
    """
    program = parsed(text)
    writer = Writer(program, is_branching=False)
    if kind == CAPTURED:
        statements = [*writer.statements(), *_additions(program, writer, by_difference)]
    else:
        statements = [*writer.statements(_needed(program)), *_sums(program, writer, by_difference)]
    return module_of(statements, _CAPTURED_INPUTS[kind])


def kept_tiles(text: str, by_difference: bool) -> int:
    """How many tiles a program keeps for its band."""
    program = parsed(text)
    facts = Writer(program, is_branching=False).facts
    return sum(_is_kept(facts.axes(line), by_difference) for line, _ in program.captured)


def _is_kept(axes: Axes, by_difference: bool) -> bool:
    return not axes or (by_difference and axes == {DIFFERENCE})


def _additions(program: Program, writer: Writer, by_difference: bool) -> list[str]:
    """Add up the gradients of a tile, each summed over what shares one in the tile."""
    found: list[str] = []
    kept: list[str] = []
    for number, (line, gradient) in enumerate(program.captured):
        x, axes = f"x{number}", writer.facts.axes(line)
        found.append(f"{x} = tl.where(visible, {writer.spread(gradient)}, 0.0)")
        if _is_kept(axes, by_difference):
            kept.append(f"kept[{len(kept)}] + {x}")
            continue
        if axes == {QUERY}:
            found.append(f"{x} = tl.sum({x}, 1)[:, None]")
        elif axes == {KEY}:
            found.append(f"{x} = tl.sum({x}, 0)[None, :]")
        found.append(_addition(x, *writer.addresses[line]))
    return [*found, f"return ({', '.join(kept)},)" if kept else "return kept"]


def _sums(program: Program, writer: Writer, by_difference: bool) -> list[str]:
    """Add the sums of the kept tiles."""
    found, count = [], 0
    for number, (line, _) in enumerate(program.captured):
        x, axes = f"x{number}", writer.facts.axes(line)
        if _is_kept(axes, by_difference):
            sums = f"kept[{count}]"
            found.append(f"{x} = {sums if axes else f'tl.sum({sums}, 0)'}")
            found.append(_addition(x, *writer.addresses[line]))
            count += 1
    return found


def _addition(x: str, address: str, inside: str) -> str:
    mask = f"{inside} & ({x} != 0)" if inside else f"{x} != 0"
    return f"tl.atomic_add(total_ptr + {address}, {x}, mask={mask})"


def _needed(program: Program) -> set[Name]:
    """The lines that read what the program has gradients of, and those that their indices need."""
    needed = {line for line, _ in program.captured}
    for line in reversed(program.lines):
        if line.name in needed:
            needed.update(line.names)
    return needed
