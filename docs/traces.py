"""Writes what docs/learn/visualiser.md plays: the lessons' own code, run line by line.

Nothing is computed twice: Python's tracer stops after each line of a function in examples/learn,
and a step is what its variables hold there. What a tracer cannot see, which lines read or write
slow memory, is listed by line in `ALGORITHMS`.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise, product
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

D = 4  # the head dim of every trace
LENGTHS = ((8, 8), (16, 16), (6, 14))  # queries, keys
TILES = ((4, 4), (2, 2), (4, 8))  # queries, keys of a tile
MASKS = ("full", "causal", "window", "documents", "blocks")
RANKS = 4


class Problem(NamedTuple):
    """Inputs, mask and tile sizes."""

    Q: Tensor
    K: Tensor
    V: Tensor
    dO: Tensor
    visible: Tensor
    mask: str
    B_r: int
    B_c: int

    @property
    def other_mask(self) -> dict[str, Any]:
        """The mask as FlashAttention-2's lesson takes it."""
        if self.mask in ("full", "causal"):
            return {"causal": self.mask == "causal"}
        return {"visible": self.visible}


class Algorithm(NamedTuple):
    """A function of the lessons, and how to read it.

    `lines` says what a line does that contains a text: `load` from and `store` to slow memory,
    `make` in fast memory, `free` (without a name: everything), `score` where a tile of Q K^T is
    computed, and `show`, with the fields of its rows that change. A field is an expression, with
    one value for each row of the tile (`tile`) or for each query (`all`).
    """

    title: str
    function: Callable[..., Any]
    arguments: Callable[[Problem], tuple[Any, ...]]
    lines: dict[str, str]
    blocks: dict[str, str]  # what may be in fast memory, as an expression of the variables
    fields: dict[str, tuple[str, str]]
    result: str  # the field that has the result in the end
    outer: str = ""  # the variable of the outer loop over tiles


def reference(problem: Problem) -> dict[str, Tensor]:
    """O, L, P and the gradients, from the definition."""
    Q, K, V = (x.detach().clone().requires_grad_() for x in problem[:3])
    S = (Q @ K.T / D**0.5).masked_fill(~problem.visible, -torch.inf)
    P = torch.softmax(S, 1)
    O = P @ V
    dQ, dK, dV = torch.autograd.grad(O, (Q, K, V), problem.dO)
    found = {"O": O, "L": torch.logsumexp(S, 1), "P": P, "S": S, "dQ": dQ, "dK": dK, "dV": dV}
    return {name: x.detach() for name, x in found.items()}


def _first(p: Problem) -> tuple[Any, ...]:
    def is_kept(i: int, j: int) -> bool:
        rows, cols = slice(i * p.B_r, (i + 1) * p.B_r), slice(j * p.B_c, (j + 1) * p.B_c)
        return bool(p.visible[rows, cols].any())

    return p.Q, p.K, p.V, 4 * D * p.B_c, p.visible, is_kept


def _second(p: Problem) -> tuple[Any, ...]:
    how = {"causal": False, "visible": None} | p.other_mask
    return p.Q, p.K, p.V, how["causal"], p.B_r, p.B_c, how["visible"]


def _backward(p: Problem) -> tuple[Any, ...]:
    known = reference(p)
    Q, K, V, *how = _second(p)
    return Q, K, V, known["O"], known["L"], p.dO, *how


ALGORITHMS = {
    "standard": Algorithm(
        "standard attention",
        standard.attention,
        lambda p: (p.Q, p.K, p.V, p.visible),
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
        _first,
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
        _second,
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
        lambda p: (p.Q, p.K, p.V, p.visible, p.B_c),
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
        _backward,
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
        lambda p: (p.Q, p.K, p.V, p.visible, RANKS),
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


def make_problem(mask: str, M: int, N: int, B_r: int, B_c: int) -> Problem:
    """The same numbers for all algorithms of one size; the last query belongs to the last key."""
    generator = torch.Generator().manual_seed(M * N)
    Q, K, V, dO = (
        torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (M, N, N, M)
    )
    i, j = torch.arange(M)[:, None] + N - M, torch.arange(N)[None, :]
    ends = torch.tensor([N * 3 // 8, N * 5 // 8])
    document = [torch.bucketize(x, ends, right=True) for x in (i, j)]
    visible = {
        "full": (i >= 0) & (j >= 0),
        "causal": j <= i,
        "window": (j <= i) & (j > i - 4),
        "documents": (j <= i) & (document[0] == document[1]),
        "blocks": (j // 4 == 0) | ((i // 4 + j // 4) % 2 == 0),
    }[mask]
    return Problem(2 * Q, K, V, dO, visible, mask, B_r, B_c)


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


def steps(algorithm: Algorithm, problem: Problem) -> Iterator[Step]:
    """Every line that the algorithm runs on this problem."""
    M, N = len(problem.Q), len(problem.K)
    lines = source_of(algorithm.function)
    first = algorithm.function.__code__.co_firstlineno
    actions = {
        n: does
        for n, line in enumerate(lines)
        for text, does in algorithm.lines.items()
        if text in line
    }
    tile: dict[str, list[int]] = {}
    memory: dict[str, Tensor] = {}
    moved = 0
    for absolute, variables in executed(algorithm.function, *algorithm.arguments(problem)):
        line, shown, is_score = absolute - first, [], False
        assigned = lines[line].partition("=")[0]
        for name, length in (("rows", M), ("cols", N)):
            if name in assigned.replace(",", " ").split():
                if name == algorithm.outer:
                    tile.clear()
                tile[name] = _positions(variables[name], length)
        rows, cols = tile.get("rows", range(M)), tile.get("cols", range(N))
        for action in filter(None, actions.get(line, "").split(", ")):
            verb, *names = action.split(" ")
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
        place = (rows[0], cols[0]) if is_placed else None
        counters = {x: variables.get(x) for x in ("step", "rank", "i", "j")}
        loops = ", ".join(f"{x} = {n}" for x, n in counters.items() if isinstance(n, int))
        yield Step(line, place, moved, dict(memory), loops, is_score, shown)


def _positions(indices: slice | Tensor, length: int) -> list[int]:
    if isinstance(indices, slice):
        return list(range(length))[indices]
    return list(indices.tolist())


def edges(name: str, problem: Problem) -> tuple[list[int], list[int]]:
    """Where the tiles of an algorithm begin, and where the last ones end."""
    M, N = problem.visible.shape
    whole = ([0, M], [0, N])
    if name == "ring":
        rows, cols = (torch.arange(n).tensor_split(RANKS) for n in (M, N))
        return [*(int(x[0]) for x in rows), M], [*(int(x[0]) for x in cols), N]
    cut = ([*range(0, M, problem.B_r), M], [*range(0, N, problem.B_c), N])
    return {"standard": whole, "split": (whole[0], cut[1])}.get(name, cut)


def kinds(visible: Tensor, rows: list[int], cols: list[int]) -> list[list[int]]:
    """The kind of every tile: 0 empty, 1 full, 2 partial."""
    tiles = [
        [visible[i:i_end, j:j_end] for j, j_end in pairwise(cols)] for i, i_end in pairwise(rows)
    ]
    return [[0 if not x.any() else 1 if x.all() else 2 for x in row] for row in tiles]


def standard_traffic(name: str, M: int, N: int) -> int:
    """Numbers that standard attention moves, each step from memory to memory."""
    if name == "backward":  # dV = P^T dO, dP = dO V^T, dS = P (dP - delta), dQ = dS K, dK = dS^T Q
        return 7 * M * N + 4 * (M + N) * D
    return 4 * M * N + 2 * (M + N) * D


def rounded(x: Any, digits: int = 6) -> Any:
    """The same numbers, shorter."""
    if isinstance(x, list):
        return [rounded(y, digits) for y in x]
    return float(f"{x:.{digits}g}")


def run(name: str, problem: Problem) -> dict[str, Any]:
    """What the page needs to play one algorithm on one problem."""
    algorithm, known = ALGORITHMS[name], reference(problem)
    rows, cols = edges(name, problem)
    M, N = problem.visible.shape
    fields = list(algorithm.fields)
    blocks: list[list[Any]] = []
    memories: list[list[int]] = []
    loops: list[str] = []
    latest: dict[tuple[int, str], Any] = {}
    played = []
    for step in steps(algorithm, problem):
        memory = []
        for block, x in step.memory.items():
            described = [block, rounded(x.reshape(len(x), -1).tolist(), 3)]
            if described not in blocks:
                blocks.append(described)
            memory.append(blocks.index(described))
        if memory not in memories:
            memories.append(memory)
        if step.loops not in loops:
            loops.append(step.loops)
        changed = []
        for row, field, value in step.shown:
            value = rounded(value)
            if latest.get((row, field)) != value:
                latest[row, field] = value
                changed.append([row, fields.index(field), value])
        place = step.tile or (-1, -1)
        held, counted = memories.index(memory), loops.index(step.loops)
        played.append([step.line, *place, step.moved, held, counted, int(step.is_score), changed])
    return {
        "rows": rows,
        "cols": cols,
        "kinds": kinds(problem.visible, rows, cols),
        "visible": ["".join(str(int(x)) for x in row) for row in problem.visible.tolist()],
        "weights": rounded(known["P"].tolist(), 3),
        "reference": rounded(known[algorithm.result].tolist()),
        "standard": standard_traffic(name, M, N),
        "blocks": blocks,
        "memories": memories,
        "loops": loops,
        "steps": played,
    }


def tiles_of(name: str) -> tuple[tuple[int, int], ...]:
    """The choices of tiles that make a difference."""
    return TILES[:1] if name in ("standard", "ring") else TILES


def everything(name: str) -> dict[str, Any]:
    """All runs of an algorithm, by mask, lengths and tile."""
    algorithm = ALGORITHMS[name]
    runs = {
        f"{mask} {M}x{N} {B_r}x{B_c}": run(name, make_problem(mask, M, N, B_r, B_c))
        for mask, (M, N), (B_r, B_c) in product(MASKS, LENGTHS, tiles_of(name))
    }
    return {
        "title": algorithm.title,
        "file": f"{algorithm.function.__module__.replace('.', '/')}.py",
        "code": source_of(algorithm.function),
        "fields": list(algorithm.fields),
        "result": algorithm.result,
        "compared": "standard backward pass" if name == "backward" else "standard attention",
        "runs": runs,
    }


def write_all(folder: Path) -> None:
    """A script for each algorithm, which a page can load without a server."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ALGORITHMS:
        text = json.dumps(everything(name), separators=(",", ":"))
        script = f"(window.attentionTraces ??= {{}})[{json.dumps(name)}] = {text};\n"
        (folder / f"trace-{name}.js").write_text(script, encoding="utf-8")


if __name__ == "__main__":
    write_all(Path(__file__).parent / "traces")
