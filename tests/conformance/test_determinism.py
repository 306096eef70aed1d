"""The native backend's promise: a row's bits depend on nothing but the row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.conformance import oracle
from tests.conformance.oracle import random, slots_of, step_of
from torch import Tensor

from polygraft_kernels.api import Affine, Backend, LoraGroups, LoraPair, StepTensors

ROWS = 40


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("outputs", "inputs"), [(200, 577), (31, 1536)])
def test_linear_row_alone_and_in_every_batch(native: Backend, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    x = random(ROWS, inputs, dtype=dtype)
    weight = native.pack_linear(random(outputs, inputs, dtype=dtype), random(outputs, dtype=dtype))
    alone = torch.cat([native.linear(x[row : row + 1], weight) for row in range(ROWS)])
    for rows in range(1, ROWS + 1):
        assert torch.equal(native.linear(x[:rows], weight), alone[:rows])


def test_linear_on_one_thread_and_on_two(native: Backend, dtype: torch.dtype) -> None:
    x, weight = random(150, 576, dtype=dtype), native.pack_linear(random(960, 576, dtype=dtype))
    assert torch.equal(*(_on_threads(count, lambda: native.linear(x, weight)) for count in (1, 2)))


@pytest.mark.usefixtures("threads")
def test_lora_row_alone_and_among_others(native: Backend, dtype: torch.dtype) -> None:
    segments, ranks = (96, 33), (1, 8, 13)  # enough work for a second thread
    bank = native.lora_bank(576, segments, len(ranks), dtype)
    gain, shift = torch.rand(96), torch.randn(33)
    affines = (None, (Affine(gain, torch.randn(96)), Affine(None, shift)), (Affine(gain, None), Affine(shift, shift)))
    for slot, rank in enumerate(ranks):
        pairs = [LoraPair(random(rank, 576, dtype=dtype), random(n, rank, dtype=dtype), 0.3) for n in segments]
        bank.load(slot, pairs if slot < 2 else [pairs[0], None], affines[slot])
    x, y = random(ROWS, 576, dtype=dtype), random(ROWS, sum(segments), dtype=dtype)
    starts = (3, 10, 11, ROWS)
    together = y.clone()
    native.lora(together, x, bank, LoraGroups((0, 1, 2), starts))
    for slot in range(3):
        for row in range(starts[slot], starts[slot + 1]):
            alone = y[row : row + 1].clone()
            native.lora(alone, x[row : row + 1], bank, LoraGroups((slot,), (0, 1)))
            assert torch.equal(alone[0], together[row])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("block_size", [8, 16])
def test_prefill_chunks_and_decode_agree(
    native: Backend, dtype: torch.dtype, window: int | None, block_size: int
) -> None:
    tokens, blocks = 150, 64
    whole = oracle.sequences([0, 0], [tokens, 33], 2, 32, dtype)
    step = step_of(whole, block_size, blocks)
    cache = native.kv_cache(blocks, block_size, 2, 32, dtype)
    for i in range(2):
        at = slots_of(step, i, range(whole.new[i]), block_size)
        native.store_kv(whole.keys[i], whole.values[i], cache, at)
    q = random(tokens + 33, 6, 32, dtype=dtype)
    prefill = native.attention(q, cache, step, window)[:tokens]
    for chunk in (1, 7, 64):
        parts = [
            native.attention(q[first : first + chunk], cache, _part(step, first, min(chunk, tokens - first)), window)
            if first + chunk <= tokens
            else native.attention(q[first:tokens], cache, _part(step, first, tokens - first), window)
            for first in range(0, tokens, chunk)
        ]
        assert torch.equal(torch.cat(parts), prefill)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("window", [None, 1100])
def test_prefill_and_decode_agree_past_the_first_split(native: Backend, dtype: torch.dtype, window: int | None) -> None:
    tokens, blocks = 2080, 140
    whole = oracle.sequences([0], [tokens], 1, 16, dtype)
    step = step_of(whole, 16, blocks)
    cache = native.kv_cache(blocks, 16, 1, 16, dtype)
    native.store_kv(whole.keys[0], whole.values[0], cache, slots_of(step, 0, range(tokens), 16))
    q = random(tokens, 3, 16, dtype=dtype)
    prefill = native.attention(q, cache, step, window)
    for first, count in [(0, 1), (1000, 50), (1023, 1), (1024, 1), (2040, 40), (2047, 2), (tokens - 1, 1)]:
        part = native.attention(q[first : first + count], cache, _part(step, first, count), window)
        assert torch.equal(part, prefill[first : first + count])


def _part(step: StepTensors, first: int, count: int) -> StepTensors:
    """Rows first .. first + count of the step's first sequence, alone."""
    rows = slice(first, first + count)
    starts = torch.tensor([0, count], dtype=torch.int32)
    length = torch.tensor([first + count], dtype=torch.int32)
    return StepTensors(
        step.positions[rows].clone(),
        step.slot_mapping[rows].clone(),
        starts,
        length,
        step.block_tables[:1].clone(),
        step.groups,
    )


def _on_threads(count: int, compute: Callable[[], Tensor]) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return compute()
    finally:
        torch.set_num_threads(before)
