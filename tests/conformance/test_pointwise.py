"""Norm, rotary embedding, gated activation."""

from __future__ import annotations

import pytest
import torch
from tests.conformance import oracle
from tests.conformance.oracle import assert_close, random
from torch.nn import functional

from polygraft_kernels.api import Backend


@pytest.mark.parametrize("shape", [(0, 8), (1, 576), (5, 33), (4, 3, 64), (2, 3, 6)], ids=str)
def test_rms_norm(backend: Backend, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert_close(backend.rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_of_heads_inside_wider_rows(backend: Backend, dtype: torch.dtype) -> None:
    x, weight = random(6, 100, dtype=dtype)[:, 20:84].unflatten(1, (4, 16)), random(16, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert_close(backend.rms_norm(x, weight, 1e-6), expected)


def test_rms_norm_of_zeros(backend: Backend, dtype: torch.dtype) -> None:
    got = backend.rms_norm(torch.zeros(2, 16, dtype=dtype), torch.ones(16, dtype=dtype), 1e-6)
    assert not got.any()


@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 128])
def test_rope(backend: Backend, dtype: torch.dtype, head_dim: int) -> None:
    qkv = random(7, 6 * head_dim, dtype=dtype)
    before = qkv.clone()
    q, k, rest = (part.unflatten(1, (-1, head_dim)) for part in qkv.split([3 * head_dim, 2 * head_dim, head_dim], 1))
    table = oracle.rope_table(50, head_dim)
    positions = torch.tensor([0, 1, 49, 7, 7, 30, 2])
    expected = [oracle.rope(each, positions, table) for each in (q, k)]
    backend.rope(q, k, positions, table)
    assert_close(q, expected[0])
    assert_close(k, expected[1])
    assert torch.equal(rest.flatten(1), before[:, 5 * head_dim :])


@pytest.mark.parametrize("width", [1, 12, 33, 1536])
def test_silu_mul(backend: Backend, dtype: torch.dtype, width: int) -> None:
    gate_up = random(5, 2 * width, dtype=dtype, scale=4.0)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(backend.silu_mul(gate_up), functional.silu(gate) * up)


def test_silu_is_accurate_everywhere(backend: Backend) -> None:
    gate = torch.cat((torch.linspace(-87, 87, 100_000), torch.linspace(-1e-3, 1e-3, 1000)))
    got = backend.silu_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    expected = functional.silu(gate.double())
    assert ((got - expected).abs() <= 1e-6 * expected.abs()).all()


def test_silu_of_extremes(backend: Backend, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e30, -1e4, -100.0, 100.0, 1e4, 0.0], dtype=dtype)
    got = backend.silu_mul(torch.cat((gate, torch.ones_like(gate))).unsqueeze(0))[0]
    assert torch.allclose(got.float(), torch.tensor([0.0, 0, 0, 100, 1e4, 0]), atol=1e-4, rtol=2**-8)


def test_not_a_number_stays(backend: Backend, dtype: torch.dtype) -> None:
    gate_up = torch.ones(2, 16, dtype=dtype)
    gate_up[0, 3] = float("nan")
    got = backend.silu_mul(gate_up)
    assert got[0, 3].isnan()
    assert got.isnan().sum() == 1


def test_no_rows(backend: Backend, dtype: torch.dtype) -> None:
    assert backend.silu_mul(random(0, 8, dtype=dtype)).shape == (0, 4)
    empty = random(0, 2, 8, dtype=dtype)
    backend.rope(empty, empty.clone(), torch.zeros(0, dtype=torch.int64), oracle.rope_table(4, 8))
