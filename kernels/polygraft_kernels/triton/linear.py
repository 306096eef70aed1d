"""y = x W^T + bias in tiles of one shape, so that a row's sums have one order whatever the number of rows.

y[t, n] = sum_k x[t, k] W[n, k] + bias[n], k ascending in steps of BLOCK_K; x [T, K], W [N, K], y [T, N].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polygraft_kernels.triton.numerics import product, rounded

BLOCK_T, BLOCK_N, BLOCK_K = 16, 64, 64


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    y,
    x,
    weight,
    bias,
    rows,
    outputs,
    inputs,
    x_stride,
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
        sums = product(part, w, sums)
    if BIASED:
        sums += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    mask = (t < rows)[:, None] & (n < outputs)[None, :]
    tl.store(y + t.to(tl.int64)[:, None] * outputs + n[None, :], rounded(sums, y.dtype.element_ty), mask=mask)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [T, K] with unit stride over K, weight [N, K], bias [N] -> [T, N] of `dtype`."""
    rows, outputs = x.shape[0], weight.shape[0]
    y = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if y.numel() > 0:
        grid = (triton.cdiv(rows, BLOCK_T), triton.cdiv(outputs, BLOCK_N))
        linear_kernel[grid](
            y,
            x,
            weight,
            weight if bias is None else bias,
            rows,
            outputs,
            weight.shape[1],
            x.stride(0),
            bias is not None,
            BLOCK_T,
            BLOCK_N,
            BLOCK_K,
            num_warps=4,
            num_stages=4,
        )
    return y
