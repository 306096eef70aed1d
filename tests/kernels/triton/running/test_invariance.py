"""The invariant variant: a row's bits depend on the row alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.conformance import oracle
from tests.conformance.oracle import random, slots_of, step_of

from polygraft_kernels.api import Affine, LoraGroups, LoraPair, StepTensors
from polygraft_kernels.triton import InvariantBackend

BLOCKS = 64


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def _rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy rounds a row of a matrix product by its place in the matrix, as no GPU does: multiply row by row."""
    matmul = np.matmul

    def by_rows(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return np.stack([matmul(row, b, dtype=dtype) for row in a])

    monkeypatch.setattr(np, "matmul", by_rows)


@pytest.fixture
def backend() -> InvariantBackend:
    torch.manual_seed(0)
    return InvariantBackend(torch.get_default_device())


def test_linear(backend: InvariantBackend, dtype: torch.dtype) -> None:
    x, weight = random(20, 150, dtype=dtype), backend.pack_linear(random(70, 150, dtype=dtype))
    together = backend.linear(x, weight)
    for first, rows in ((0, 1), (3, 2), (7, 13), (19, 1)):
        assert torch.equal(backend.linear(x[first : first + rows], weight), together[first : first + rows])


def test_lora(backend: InvariantBackend, dtype: torch.dtype) -> None:
    bank = backend.lora_bank(150, (48,), 2, dtype)
    for slot, rank in enumerate((5, 20)):
        pair = LoraPair(random(rank, 150, dtype=dtype), random(48, rank, dtype=dtype), 0.3)
        bank.load(slot, [pair], [Affine(torch.rand(48), torch.randn(48))] if slot else None)
    x, y = random(30, 150, dtype=dtype), random(30, 48, dtype=dtype)
    together = y.clone()
    backend.lora(together, x, bank, LoraGroups((0, 1), (2, 5, 30)))
    for row, slot in ((2, 0), (4, 0), (5, 1), (20, 1), (29, 1)):
        alone = y[row : row + 1].clone()
        backend.lora(alone, x[row : row + 1], bank, LoraGroups((slot,), (0, 1)))
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("window", [None, 20, 270])
def test_prefill_chunks_and_decode_agree(backend: InvariantBackend, dtype: torch.dtype, window: int | None) -> None:
    """Contexts of more than a span, so that one program merges spans in prefill, and another kernel in decode."""
    stored, new = 265, 30
    all_of = oracle.sequences([stored], [new], 1, 16, dtype)
    step = step_of(all_of, 16, BLOCKS)
    cache = backend.kv_cache(BLOCKS, 16, 1, 16, dtype)
    backend.store_kv(all_of.keys[0], all_of.values[0], cache, slots_of(step, 0, range(stored + new), 16))
    q = random(new, 3, 16, dtype=dtype)
    with np.errstate(all="ignore"):
        together = backend.attention(q, cache, step, window)
        oracle.assert_close(together, oracle.attention(q, all_of, window))
        for first, rows in ((0, 1), (1, 4), (5, 13), (29, 1)):
            part = StepTensors(
                step.positions[first : first + rows],
                step.slot_mapping[first : first + rows],
                torch.tensor([0, rows], dtype=torch.int32),
                torch.tensor([stored + first + rows], dtype=torch.int32),
                step.block_tables,
                LoraGroups(),
            )
            alone = backend.attention(q[first : first + rows], cache, part, window)
            assert torch.equal(alone, together[first : first + rows])
