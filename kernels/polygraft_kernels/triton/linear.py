"""y = x W^T + bias where torch's product will not do: int8 weights, float32 results, one order of sums for any batch.

y[t, n] = scale[n] * sum_k x[t, k] W[n, k] + bias[n], k ascending in steps of BLOCK_K; x [T, K], W [N, K], y [T, N].
Int8 weights become x's dtype on the way to the matrix units, which holds them exactly; others have no scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polygraft_kernels.triton.numerics import product, rounded

LEAST_ROWS, MANY_ROWS = 16, 64
"""Rows of a tile: for few of them, and for many."""
BLOCK_N, BLOCK_K = 64, 64


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    y,
    x,
    weight,
    bias,
    scale,
    rows,
    outputs,
    inputs,
    x_stride,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (t, n): BLOCK_T x BLOCK_N of y. Those that read the same weights are neighbours."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for k0 in range(0, inputs, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        mask = (t < rows)[:, None] & (k < inputs)[None, :]
        part = tl.load(x + t.to(tl.int64)[:, None] * x_stride + k[None, :], mask=mask, other=0.0)
        mask = (n < outputs)[None, :] & (k < inputs)[:, None]
        w = tl.load(weight + n.to(tl.int64)[None, :] * inputs + k[:, None], mask=mask, other=0.0)
        if SCALED:
            w = w.to(tl.float32).to(x.dtype.element_ty)  # exact, and the interpreter knows no way from int8 to bfloat16
        sums = product(part, w, sums)
    if SCALED:
        sums *= tl.load(scale + n, mask=n < outputs, other=0.0)[None, :]
    if BIASED:
        sums += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    mask = (t < rows)[:, None] & (n < outputs)[None, :]
    tl.store(y + t.to(tl.int64)[:, None] * outputs + n[None, :], rounded(sums, y.dtype.element_ty), mask=mask)


def launch_options(itemsize: int) -> dict[str, int]:
    """For activations of `itemsize` bytes: as many tiles on their way as the smallest shared memory holds (64 KiB)."""
    return {"num_warps": 4, "num_stages": 4 if itemsize < 4 else 2}


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, dtype: torch.dtype, block_t: int
) -> Tensor:
    """x [T, K] with unit stride over K, weight [N, K] of x's dtype, or int8 with scale float32 [N], bias [N] -> [T, N]
    of `dtype`, in tiles of `block_t` rows.
    """
    rows, outputs = x.shape[0], weight.shape[0]
    y = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if y.numel() > 0:
        linear_kernel[(triton.cdiv(rows, block_t), triton.cdiv(outputs, BLOCK_N))](
            y,
            x,
            weight,
            weight if bias is None else bias,
            weight if scale is None else scale,
            rows,
            outputs,
            weight.shape[1],
            x.stride(0),
            scale is not None,
            bias is not None,
            block_t,
            BLOCK_N,
            BLOCK_K,
            **launch_options(x.element_size()),
        )
    return y
