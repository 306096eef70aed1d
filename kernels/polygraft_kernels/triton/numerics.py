"""Device functions that every kernel uses: products in float32, rounding, exact zeros.

Triton's interpreter multiplies bfloat16 matrices wrongly and truncates float32 to bfloat16; both are worked round here
and nowhere else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

INTERPRETED: bool = knobs.runtime.interpret
"""Whether kernels of this process run in Triton's interpreter, on tensors in host memory."""

EMULATED = tl.constexpr(INTERPRETED)
LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_E_REST = tl.constexpr(1.925963033500e-08)
"""log2(e) less its nearest float32."""
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def product(a, b, acc):
    """acc + a b: a [M, K] and b [K, N] of one dtype, acc float32 [M, N]."""
    if EMULATED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def product_of_sums(a, b, acc):
    """acc + a b for float32 a [M, K] and b [K, N] of the model's dtype, on the matrix units.

    A bfloat16 b is multiplied by the two halves of a, each of bfloat16: 16 bits of a count, not 8.
    """
    if EMULATED or b.dtype == tl.float32:
        return tl.dot(a, b.to(tl.float32), acc, input_precision="ieee")
    high = a.to(b.dtype)
    low = (a - high.to(tl.float32)).to(b.dtype)
    acc = tl.dot(high, b, acc)
    return tl.dot(low, b, acc)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 x in `dtype`, to nearest and even."""
    if EMULATED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    return x.to(dtype)


@triton.jit
def exp(x):
    """e^x to a few units in the last place, also far from 0, where x log2(e) rounded once is too coarse."""
    if EMULATED:
        return tl.exp(x)
    whole = x * LOG2_E
    rest = tl.fma(x, LOG2_E, -whole) + x * LOG2_E_REST
    power = tl.exp2(whole)
    # beyond the exponents of float32 the rest is noise, and 0 * inf no number
    return tl.where((power > 0.0) & (power < float("inf")), power + power * (rest * LN_2), power)
