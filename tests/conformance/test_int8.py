"""Weights of 8 bits: y[n] = scale[n] * sum_k x[k] q[n, k] + bias[n], and how they are made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.oracle import assert_close, random

from polygraft_kernels.api import Backend
from polygraft_kernels.quantization import quantize


def check(backend: Backend, dtype: torch.dtype, rows: int, outputs: int, inputs: int, bias: bool) -> None:
    x, weight = random(rows, inputs, dtype=dtype), quantize(random(outputs, inputs, dtype=dtype))
    added = random(outputs, dtype=dtype) if bias else None
    expected = x.double() @ weight.dequantized().double().T
    if added is not None:
        expected = expected + added.double()
    got = backend.linear(x, backend.pack_int8(weight, added))
    assert got.dtype == dtype
    assert_close(got, expected, steps=2)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=st.integers(0, 40), outputs=st.integers(1, 140), inputs=st.integers(1, 300), bias=st.booleans())
def test_any_shape(backend: Backend, dtype: torch.dtype, rows: int, outputs: int, inputs: int, bias: bool) -> None:
    check(backend, dtype, rows, outputs, inputs, bias)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 16, 150])
def test_shapes_of_a_model(backend: Backend, dtype: torch.dtype, rows: int) -> None:
    check(backend, dtype, rows, 968, 576, bias=False)


@pytest.mark.usefixtures("threads")
def test_a_row_does_not_depend_on_the_others(native: Backend, dtype: torch.dtype) -> None:
    x, weight = random(40, 301, dtype=dtype), native.pack_int8(quantize(random(100, 301, dtype=dtype)))
    together = native.linear(x, weight)
    for rows in (1, 2, 3, 5, 13):
        assert torch.equal(native.linear(x[:rows], weight), together[:rows])


def test_logits_keep_float32(backend: Backend, dtype: torch.dtype) -> None:
    x, weight = random(5, 64, dtype=dtype), quantize(random(100, 64, dtype=dtype))
    got = backend.logits(x, backend.pack_int8(weight))
    assert got.dtype == torch.float32
    assert_close(got, x.double() @ weight.dequantized().double().T, steps=2)


def test_quantizing_is_to_nearest_and_reaches_the_largest(dtype: torch.dtype) -> None:
    weight = random(20, 30, dtype=dtype)
    weight[3] = 0
    quantized = quantize(weight)
    assert quantized.q.dtype == torch.int8
    assert quantized.q[torch.arange(20) != 3].abs().amax(dim=1).eq(127).all()
    error = (quantized.dequantized() - weight.float()).abs()
    assert bool((error <= quantized.scale.unsqueeze(1) * 0.5001).all())
    assert bool((quantized.dequantized()[3] == 0).all())
