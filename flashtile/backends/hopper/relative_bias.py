"""A relative bias as a score function, which the kernels call as any other.

A few lines of program read the table, in its own dtype, in place of captured numbers. Beyond the
indices of a score function they know `shift`: distances count from the position of a query.
"""

from __future__ import annotations

from ...backend_interface import Tensors
from ...gpu.score_source import SHIFT
from ...problem import AttentionProblem, Operands
from ...score_mod.derivative import UNCHANGED
from ...score_mod.program import VALUES, fact, parsed

CAPTURED, TABLE = map(Operands._fields.index, ("captured", "relative_bias"))


def with_program(problem: AttentionProblem) -> AttentionProblem:
    """The problem with its relative bias after its score function, in one program."""
    R, options = problem.relative_distance, problem.options
    if R is None:
        return problem
    program = _program(options.score_mod, problem.Hq, R)
    gradient = options.score_mod_gradient or UNCHANGED
    options = options._replace(score_mod=program, score_mod_gradient=gradient)
    return problem._replace(options=options, relative_distance=None)


@fact
def _program(text: str, Hq: int, R: int) -> str:
    """A score function, if there is one, and then the relative bias."""
    lines, _, result = text.rpartition("return ")
    return f"""{lines}r0: int64 = sub.Tensor(j, i)
r1: int64 = sub.Tensor(r0, {SHIFT})
r2: int64 = clamp.default(r1, {-R}, {R})
r3: int64 = add.Tensor(r2, {R})
r4: float32 = values(0, ({Hq}, {2 * R + 1}), h, r3)
r5: float32 = add.Tensor({result or "s"}, r4)
return r5"""


def relative_bias_reasons(problem: AttentionProblem) -> list[str]:
    """Why the table of `problem` cannot be what its program captures."""
    text = problem.options.score_mod
    if problem.relative_distance is None or not text:
        return []
    if all(line.op != VALUES for line in parsed(text).lines):
        return []
    return ["a relative_bias with a score_mod that captures numbers (not on this backend)"]


def with_table(tensors: Tensors) -> Tensors:
    """Tensors that begin with the operands of a call, with its table as captured numbers."""
    table = tensors[TABLE]
    if table is None:
        return tensors
    between, others = tensors[CAPTURED + 1 : TABLE], tensors[TABLE + 1 :]
    return (*tensors[:CAPTURED], table.reshape(-1), *between, None, *others)
