"""Writes docs/traces/lessons.js, from which docs/learn/visualiser.md plays the lessons' own code.

The script has the syntax trees of functions in examples/learn. _static/python.js runs them line by
line for the sizes and the mask that a reader chooses. `ALGORITHMS` lists what a line does to fast
memory. `steps` does the same with Python's tracer: tests compare the two, step by step.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from math import sqrt
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from examples.learn import (
    backward,
    flash_attention_1,
    flash_attention_2,
    merging,
    standard,
)

D = 4  # the head dim
RANKS = 4  # GPUs of a ring
LONGEST = 32  # queries and keys
INFINITY = float("inf")


def inputs() -> dict[str, list[list[float]]]:
    """Rows of Q, K, V and dO, with three digits: the same numbers for Python and JavaScript."""
    generator = torch.Generator().manual_seed(0)
    rows = {x: torch.randn(LONGEST, D, generator=generator) for x in ("Q", "K", "V", "dO")}
    rows["Q"] *= 2  # so that the weights of a row differ more
    return {name: [[round(x, 3) for x in row] for row in x.tolist()] for name, x in rows.items()}


# The player runs the functions from here to `standard_traffic` as it runs the lessons, so they keep
# to the same small part of Python.


def tile_sizes(name: str, B_r: int, B_c: int) -> tuple[int, int]:
    """The tile of an algorithm; FlashAttention-1 takes as many queries as `block_sizes` says."""
    return (min(B_c, D), B_c) if name == "fa1" else (B_r, B_c)


def visible_keys(mask: str, M: int, N: int, size: int) -> Tensor:
    """(M, N), True where a query sees a key; the last query belongs to the last key."""
    i, j = torch.arange(M)[:, None] + N - M, torch.arange(N)[None, :]
    if mask == "full":
        return (j < N).expand(M, N)
    if mask == "blocks":  # of size x size: the first column, and every second one
        return (j // size == 0) | ((i // size + j // size) % 2 == 0)
    causal = j <= i
    if mask == "window":  # of so many keys
        return causal & (j > i - size)
    if mask == "documents":  # so many, of nearly one length
        return causal & (i * size // N == j * size // N)
    return causal


def definition(
    Q: Tensor, K: Tensor, V: Tensor, dO: Tensor, visible: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """O, L, P, dQ, dK and dV of standard attention."""
    S = (Q @ K.T / sqrt(D)).masked_fill(~visible, -INFINITY)
    m = S.amax(1, keepdim=True)
    P = torch.exp(S - m.masked_fill(m == -INFINITY, 0.0))
    l = P.sum(1, keepdim=True)
    P = P / l.masked_fill(l == 0, 1.0)
    O = P @ V
    dS = P * (dO @ V.T - (dO * O).sum(1, keepdim=True)) / sqrt(D)
    return O, (m + torch.log(l)).squeeze(1), P, dS @ K, dS.T @ Q, P.T @ dO


def edges(name: str, M: int, N: int, B_r: int, B_c: int) -> tuple[list[int], list[int]]:
    """Where the tiles of an algorithm begin, and where the last ones end."""
    rows, cols = [*range(0, M, B_r), M], [*range(0, N, B_c), N]
    if name == "ring":
        shares = [(M // RANKS, M % RANKS), (N // RANKS, N % RANKS)]
        return [[share * r + min(r, more) for r in range(RANKS + 1)] for share, more in shares]
    return [0, M] if name in ("standard", "split") else rows, [0, N] if name == "standard" else cols


def kind(tile: Tensor) -> str:
    """Of the visible scores of a tile."""
    return "full" if tile.all() else "partial" if tile.any() else "empty"


def kinds(visible: Tensor, rows: list[int], cols: list[int]) -> list[list[str]]:
    """The kind of every tile."""
    return [
        [kind(visible[i:i_end, j:j_end]) for j, j_end in pairwise(cols)]
        for i, i_end in pairwise(rows)
    ]


def standard_traffic(name: str, M: int, N: int) -> int:
    """Numbers that standard attention moves, each step from memory to memory."""
    if name == "backward":  # dV = P^T dO, dP = dO V^T, dS = P (dP - delta), dQ = dS K, dK = dS^T Q
        return 7 * M * N + 4 * (M + N) * D
    return 4 * M * N + 2 * (M + N) * D


FUNCTIONS = (
    tile_sizes,
    visible_keys,
    definition,
    edges,
    kind,
    kinds,
    standard_traffic,
    flash_attention_1.block_sizes,
    flash_attention_2.forward,
    merging.merge,
)


class Algorithm(NamedTuple):
    """A function of the lessons, and how to read it.

    For lines that contain a text, `lines` says what they do: `load` from and `store` to slow
    memory, `make` in fast memory, `free` (without a name: everything), `score` where a tile of
    Q K^T is computed, and `show`, with the fields of its rows that change. A field is an
    expression, with one value for each row of the tile (`tile`) or for each query (`all`).
    Expressions are Python.
    """

    title: str
    function: Callable[..., Any]
    arguments: str  # an expression of what `make_problem` makes
    lines: dict[str, str]
    blocks: dict[str, str]  # what may be in fast memory, as an expression of the variables
    fields: dict[str, tuple[str, str]]
    result: str  # the field that has the result in the end
    outer: str = ""  # the variable of the outer loop over tiles


OTHER_MASK = "mask == 'causal', B_r, B_c, None if mask in ('full', 'causal') else visible"
IS_KEPT = "lambda i, j: visible[i * B_r : (i + 1) * B_r, j * B_c : (j + 1) * B_c].any()"

ALGORITHMS = {
    "standard": Algorithm(
        "standard attention",
        standard.attention,
        "Q, K, V, visible",
        {
            "S = Q @ K.T": "load Q K, make S, store S, free, score",
            "m = S.amax": "load S, show m",
            "l = P.sum": "show l",
            "P = P / l": "make P, store P, free",
            "O = P @ V": "load P V, make O, store O, free, show O",
        },
        {x: x for x in ("Q", "K", "V", "S", "P", "O")},
        {"m": ("m[:, 0]", "all"), "l": ("l[:, 0]", "all"), "O": ("O", "all")},
        "O",
    ),
    "fa1": Algorithm(
        "FlashAttention-1",
        flash_attention_1.attention,
        f"Q, K, V, 4 * D * B_c, visible, {IS_KEPT}",
        {
            "K_j, V_j = K[cols], V[cols]": "free, load K_j V_j",
            "S = Q[rows] @ K_j.T": "free Q_i O_i m_i l_i, load Q_i, make S_ij, score",
            "S = S.masked_fill": "make S_ij",
            "m_new = torch.maximum": "load m_i",
            "P = torch.exp": "free S_ij, make P_ij",
            "l_new = rescale": "load l_i",
            "O[rows] = (l[rows]": "load O_i, store O_i, free P_ij, show O",
            "l[rows], m[rows] = l_new, m_new": "make l_i m_i, store l_i m_i, show m l",
        },
        {
            "K_j": "K_j", "V_j": "V_j", "Q_i": "Q[rows]", "S_ij": "S", "P_ij": "P",
            "m_i": "m[rows]", "l_i": "l[rows]", "O_i": "O[rows]",
        },
        {"m": ("m[rows, 0]", "tile"), "l": ("l[rows, 0]", "tile"), "O": ("O[rows]", "tile")},
        "O",
        "cols",
    ),
    "fa2": Algorithm(
        "FlashAttention-2",
        flash_attention_2.forward,
        f"Q, K, V, {OTHER_MASK}",
        {
            "Q_i = Q[rows]": "load Q_i",
            "O_i = Q.new_zeros": "make O_i, show O_i",
            "l = Q.new_zeros": "make l_i, show l",
            "m = Q.new_full": "make m_i, show m",
            "S = Q_i @ K[cols].T": "load K_j, make S_ij, score",
            "S = S.masked_fill(cols": "make S_ij",
            "S = S.masked_fill(~visible": "make S_ij",
            "P = torch.exp": "free S_ij, make P_ij",
            "l = rescale * l": "make l_i, show l",
            "O_i = rescale * O_i": "load V_j, make O_i, show O_i",
            "m = m_new": "make m_i, free K_j V_j P_ij, show m",
            "O[rows] = O_i": "store O_i, show O",
            "L[rows] =": "make L_i, store L_i, free, show L",
        },
        {
            "Q_i": "Q_i", "K_j": "K[cols]", "V_j": "V[cols]", "S_ij": "S", "P_ij": "P",
            "O_i": "O_i", "l_i": "l", "m_i": "m", "L_i": "L[rows]",
        },
        {
            "m": ("m[:, 0]", "tile"), "l": ("l[:, 0]", "tile"), "O_i": ("O_i", "tile"),
            "O": ("O[rows]", "tile"), "L": ("L[rows]", "tile"),
        },
        "O",
        "rows",
    ),
    "split": Algorithm(
        "split keys (flash-decoding)",
        merging.split_kv,
        "Q, K, V, visible, B_c",
        {
            "O_j, L_j = forward": (
                "free, load Q K_j V_j, make O_j L_j, store O_j L_j, score, show O_j L_j"
            ),
            "O, L = parts[0]": "free, load O L, show O L",
            "O, L = merge": "load O_j L_j, make O L, show O L",
            "return O, L": "store O, free",
        },
        {
            "Q": "Q", "K_j": "K[cols]", "V_j": "V[cols]", "O_j": "O_j", "L_j": "L_j", "O": "O",
            "L": "L",
        },
        {
            "L_j": ("L_j", "all"), "O_j": ("O_j", "all"), "L": ("L", "all"), "O": ("O", "all"),
        },
        "O",
    ),
    "backward": Algorithm(
        "the backward pass",
        backward.backward,
        f"Q, K, V, O, L, dO, {OTHER_MASK}",
        {
            "delta = (dO * O)": "load dO O, make delta, store delta, free, show delta",
            "K_j, V_j = K[cols], V[cols]": "store dK_j dV_j, free, load K_j V_j",
            "Q_i, dO_i = Q[rows], dO[rows]": "load Q_i dO_i",
            "S = Q_i @ K_j.T": "make S_ij, score",
            "S = S.masked_fill(cols": "make S_ij",
            "S = S.masked_fill(~visible": "make S_ij",
            "P = torch.exp(S - L[rows, None])": "load L_i, free S_ij, make P_ij, show L",
            "dV[cols] += P.T @ dO_i": "make dV_j",
            "dP = dO_i @ V_j.T": "make dP_ij",
            "dS = P * (dP": "load delta_i, free P_ij dP_ij, make dS_ij",
            "dQ[rows] += dS @ K_j": "load dQ_i, store dQ_i, show dQ",
            "dK[cols] += dS.T @ Q_i": "make dK_j, free Q_i dO_i dS_ij L_i delta_i dQ_i",
            "return dQ, dK, dV": "store dK_j dV_j, free",
        },
        {
            "dO": "dO", "O": "O", "delta": "delta", "K_j": "K_j", "V_j": "V_j", "Q_i": "Q_i",
            "dO_i": "dO_i", "S_ij": "S", "L_i": "L[rows]", "P_ij": "P", "dP_ij": "dP",
            "delta_i": "delta[rows]", "dS_ij": "dS", "dQ_i": "dQ[rows]", "dK_j": "dK[cols]",
            "dV_j": "dV[cols]",
        },
        {
            "L": ("L[rows]", "tile"), "delta": ("delta", "all"), "dQ": ("dQ[rows]", "tile"),
        },
        "dQ",
        "cols",
    ),
    "ring": Algorithm(
        f"a ring of {RANKS} GPUs",
        merging.ring,
        "Q, K, V, visible, RANKS",
        {
            "rows, cols = queries[rank]": "free",
            "K_j, V_j = K[cols], V[cols]": "load K_j V_j",
            "O_j, L_j = forward": "load Q_i, score",
            "O[rows], L[rows] = merge": "load O_i L_i, store O_i L_i, show L O",
        },
        {"Q_i": "Q[rows]", "K_j": "K_j", "V_j": "V_j", "O_i": "O[rows]", "L_i": "L[rows]"},
        {"L": ("L[rows]", "tile"), "O": ("O[rows]", "tile")},
        "O",
    ),
}  # fmt: skip


def make_problem(
    name: str, mask: str, size: int, M: int, N: int, B_r: int, B_c: int
) -> dict[str, Any]:
    """What the arguments of an algorithm are made of, by name; `size` is the mask's number."""
    B_r, B_c = tile_sizes(name, B_r, B_c)
    rows = {x: torch.tensor(numbers, dtype=torch.float64) for x, numbers in inputs().items()}
    Q, K, V, dO = (rows[x][:n] for x, n in (("Q", M), ("K", N), ("V", N), ("dO", M)))
    visible = visible_keys(mask, M, N, size)
    results = ("O", "L", "P", "dQ", "dK", "dV")
    known = zip(results, definition(Q, K, V, dO, visible), strict=True)
    given = {"Q": Q, "K": K, "V": V, "dO": dO, "visible": visible, "mask": mask}
    return {**given, **dict(known), "B_r": B_r, "B_c": B_c, "D": D, "RANKS": RANKS}


class Step(NamedTuple):
    """The state after a line."""

    line: int  # from the first line of the function
    tile: tuple[int, int] | None  # its first query and its first key
    moved: int  # numbers, since the start
    memory: dict[str, Tensor]  # what fast memory holds
    loops: str  # the variables that count
    is_score: bool
    shown: list[tuple[int, str, Any]]  # row, field, value


def executed(function: Callable[..., Any], *given: Any) -> list[tuple[int, dict[str, Any]]]:
    """The lines of a call as they ran, each with a copy of the variables after it."""
    code, found, current = function.__code__, [], 0

    def at_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal current
        if event in ("line", "return"):  # the line before has done its work
            if current:
                copied = {
                    name: x.clone() if isinstance(x, Tensor) else x
                    for name, x in frame.f_locals.items()
                }
                found.append((current, copied))
            current = frame.f_lineno
        return at_line

    def at_call(frame: FrameType, event: str, _: Any) -> Any:
        return at_line if frame.f_code is code else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        function(*given)
    finally:
        sys.settrace(before)
    return found


def source_of(function: Callable[..., Any]) -> list[str]:
    """Its lines; those of the docstring are empty."""
    lines = inspect.getsource(function).rstrip().split("\n")
    docstring = ast.parse("\n".join(lines)).body[0].body[0]  # type: ignore[attr-defined]  # a function
    for n in range(docstring.lineno - 1, docstring.end_lineno):
        lines[n] = ""
    return lines


def actions(algorithm: Algorithm) -> dict[int, tuple[list[str], list[list[str]]]]:
    """By line: which sides of the tile it moves, and what it does, each a verb and its names."""
    found = {}
    for n, line in enumerate(source_of(algorithm.function)):
        assigned = line.partition("=")[0].replace(",", " ").split()
        sides = [x for x in ("rows", "cols") if x in assigned]
        does = [
            action.split(" ")
            for text, listed in algorithm.lines.items()
            if text in line
            for action in listed.split(", ")
        ]
        if sides or does:
            found[n] = sides, does
    return found


def steps(algorithm: Algorithm, problem: dict[str, Any]) -> Iterator[Step]:
    """Every line that the algorithm runs on this problem."""
    M, N = problem["visible"].shape
    first = algorithm.function.__code__.co_firstlineno
    listed = actions(algorithm)
    tile: dict[str, list[int]] = {}
    memory: dict[str, Tensor] = {}
    moved = 0
    arguments = eval(algorithm.arguments, dict(problem))
    for absolute, variables in executed(algorithm.function, *arguments):
        line, shown, is_score = absolute - first, [], False
        sides, does = listed.get(line, ([], []))
        for side in sides:
            if side == algorithm.outer:
                tile.clear()
            tile[side] = _positions(variables[side], M if side == "rows" else N)
        rows, cols = tile.get("rows", range(M)), tile.get("cols", range(N))
        for verb, *names in does:
            if verb == "free" and not names:
                memory.clear()
            is_score |= verb == "score"
            for name in names:
                if verb in ("load", "make"):
                    memory[name] = eval(algorithm.blocks[name], {}, variables)
                if verb in ("load", "store") and name in memory:
                    moved += memory[name].numel()
                elif verb == "free":
                    memory.pop(name, None)
                elif verb == "show":
                    expression, where = algorithm.fields[name]
                    values = eval(expression, {}, variables).tolist()
                    numbers = rows if where == "tile" else range(M)
                    shown += [(row, name, x) for row, x in zip(numbers, values, strict=True)]
        is_placed = tile.keys() >= ({"rows", "cols"} if algorithm.outer else {"cols"})
        corner = (rows[0], cols[0]) if is_placed and len(rows) and len(cols) else None
        counters = {x: variables.get(x) for x in ("step", "rank", "i", "j")}
        loops = ", ".join(f"{x} = {n}" for x, n in counters.items() if isinstance(n, int))
        yield Step(line, corner, moved, dict(memory), loops, is_score, shown)


def _positions(indices: slice | Tensor, length: int) -> list[int]:
    if isinstance(indices, slice):
        return list(range(length))[indices]
    return list(indices.tolist())


SKIPPED = ("ctx", "annotation", "returns", "type_comment", "kind")


def tree(node: Any) -> Any:
    """A syntax tree for JSON: `is` is the kind of a node; lines of statements count from 0."""
    if isinstance(node, list):
        return [tree(x) for x in node]
    if not isinstance(node, ast.AST):
        return node
    fields = {name: tree(x) for name, x in ast.iter_fields(node) if name not in SKIPPED}
    line = {"line": node.lineno - 1} if isinstance(node, ast.stmt) else {}
    return {"is": type(node).__name__, **{x: y for x, y in fields.items() if y is not None}, **line}


def tree_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The tree of a function without its docstring."""
    found = ast.parse(inspect.getsource(function)).body[0]
    assert isinstance(found, ast.FunctionDef)
    names = [x.arg for x in found.args.args]
    given = tree(found.args.defaults)  # those of the last arguments
    defaults = dict(zip(names[len(names) - len(given) :], given, strict=True))
    return {"names": names, "defaults": defaults, "body": tree(found.body[1:])}


def tree_of_expression(text: str) -> Any:
    return tree(ast.parse(text, mode="eval").body)


def exported(name: str) -> dict[str, Any]:
    """An algorithm as the player reads it."""
    algorithm = ALGORITHMS[name]
    return {
        "title": algorithm.title,
        "file": f"{algorithm.function.__module__.replace('.', '/')}.py",
        "code": source_of(algorithm.function),
        "function": tree_of(algorithm.function),
        "arguments": tree_of_expression(algorithm.arguments),
        "actions": actions(algorithm),
        "blocks": {x: tree_of_expression(text) for x, text in algorithm.blocks.items()},
        "fields": {
            x: {"value": tree_of_expression(text), "where": where}
            for x, (text, where) in algorithm.fields.items()
        },
        "result": algorithm.result,
        "outer": algorithm.outer,
        "compared": "standard backward pass" if name == "backward" else "standard attention",
    }


def write_all(folder: Path) -> None:
    """One script, which a page can load without a server."""
    folder.mkdir(parents=True, exist_ok=True)
    lessons = {
        "constants": {"D": D, "RANKS": RANKS},
        "longest": LONGEST,
        "inputs": inputs(),
        "functions": {function.__name__: tree_of(function) for function in FUNCTIONS},
        "algorithms": {name: exported(name) for name in ALGORITHMS},
    }
    text = json.dumps(lessons, separators=(",", ":"))
    (folder / "lessons.js").write_text(f"window.lessons = {text};\n", encoding="utf-8")


if __name__ == "__main__":
    write_all(Path(__file__).parent / "traces")
