"""y = x W^T + bias."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.oracle import assert_close, random

from polygraft_kernels.api import Backend


def check(backend: Backend, dtype: torch.dtype, rows: int, outputs: int, inputs: int, bias: bool) -> None:
    x = random(rows, inputs, dtype=dtype)
    weight = random(outputs, inputs, dtype=dtype)
    added = random(outputs, dtype=dtype) if bias else None
    packed = backend.pack_linear(weight, added)
    assert (packed.out_features, packed.in_features) == (outputs, inputs)
    expected = x.double() @ weight.double().T
    if added is not None:
        expected = expected + added.double()
    got = backend.linear(x, packed)
    assert got.dtype == dtype
    assert got.is_contiguous()
    assert_close(got, expected, steps=2)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=st.integers(0, 40), outputs=st.integers(1, 140), inputs=st.integers(1, 100), bias=st.booleans())
def test_any_shape(backend: Backend, dtype: torch.dtype, rows: int, outputs: int, inputs: int, bias: bool) -> None:
    check(backend, dtype, rows, outputs, inputs, bias)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 13, 100])
def test_shapes_of_a_model(backend: Backend, dtype: torch.dtype, rows: int) -> None:
    check(backend, dtype, rows, 960, 576, bias=False)


def test_logits_are_not_rounded_to_the_dtype(backend: Backend, dtype: torch.dtype) -> None:
    x, weight = random(5, 64, dtype=dtype), random(100, 64, dtype=dtype)
    got = backend.logits(x, backend.pack_linear(weight))
    assert got.dtype == torch.float32
    assert_close(got, x.double() @ weight.double().T, steps=2)


def test_deep_and_many_rows(backend: Backend, dtype: torch.dtype) -> None:
    check(backend, dtype, 150, 72, 1536, bias=True)


def test_the_packed_weight_is_a_copy(backend: Backend, dtype: torch.dtype) -> None:
    weight, bias, x = random(20, 12, dtype=dtype), random(20, dtype=dtype), random(3, 12, dtype=dtype)
    packed = backend.pack_linear(weight, bias)
    before = backend.linear(x, packed)
    weight.zero_()
    bias.zero_()
    assert torch.equal(backend.linear(x, packed), before)


def test_rows_of_a_wider_matrix(backend: Backend, dtype: torch.dtype) -> None:
    wide = random(9, 80, dtype=dtype)
    weight = random(33, 48, dtype=dtype)
    got = backend.linear(wide[:, 16:64], backend.pack_linear(weight))
    assert_close(got, wide[:, 16:64].double() @ weight.double().T, steps=2)


def test_infinity_stays_in_its_row(backend: Backend, dtype: torch.dtype) -> None:
    x = random(8, 33, dtype=dtype)
    weight = backend.pack_linear(random(17, 33, dtype=dtype))
    clean = backend.linear(x, weight)
    x[3, 5] = float("inf")
    x[4, 32] = float("nan")
    got = backend.linear(x, weight)
    assert not got[3:5].isfinite().any()
    others = [0, 1, 2, 5, 6, 7]
    assert torch.equal(got[others], clean[others])
