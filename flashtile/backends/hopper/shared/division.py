"""Division by a number that the host knows: a multiplication and a shift (Granlund and Montgomery
1994) instead of the 40 dependent instructions of a division.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def reciprocal(divisor: int) -> int:
    """What a kernel needs in order to divide by `divisor`, from 1 to 2**31 - 1, as a 64-bit
    argument.

    The low 32 bits are 2**shift / divisor, rounded up; the other bits are the shift. The shift is
    so large that the rounding changes no quotient of a number below 2**31, and so small that the
    product of such a number and the low bits has 63 bits.
    """
    shift = 31 + (divisor - 1).bit_length()
    return shift << 32 | -(-(2**shift) // divisor)


@gluon.jit
def divide(x, divisor, by):
    """(x // divisor, x % divisor) for 0 <= x < 2**31; `by` is the `reciprocal` of the divisor."""
    quotient = ((x.to(gl.int64) * (by & 0xFFFFFFFF)) >> (by >> 32)).to(gl.int32)
    return quotient, x - quotient * divisor


# Triton specialises the numbers in a tuple, even if the kernel forbids it for its parameters: it
# would compile other kernels for 1 and for multiples of 16.


def unspecialized(x: int) -> int:
    """An odd number, at least 3, that stands for `x`, from 0 to 2**62; see `restored`."""
    return 2 * x + 3


@gluon.jit
def restored(x):
    """The number from which `unspecialized` made `x`."""
    return (x >> 1) - 1
