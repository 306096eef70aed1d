"""y += scale * B (A x), rows grouped by slot, over the ways that adapters are popular."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.conformance import oracle
from tests.conformance.oracle import assert_close, random

from polygraft_kernels.api import Backend, LoraBank, LoraGroups, LoraPair

RANKS = (8, 1, 16, 3, 32, 7, 64, 13)
POPULARITY = {
    "identical": [0, 24, 0, 0, 0, 0, 0, 0],
    "uniform": [3, 3, 3, 3, 3, 3, 3, 3],
    "zipf": [12, 6, 4, 3, 2, 2, 2, 1],
    "skewed": [30, 1, 0, 1, 0, 1, 1, 1],
    "mostly base": [0, 0, 0, 0, 0, 1, 0, 0],
}
Slots = Sequence[Sequence[LoraPair | None]]


def pair(rank: int, inputs: int, outputs: int, dtype: torch.dtype) -> LoraPair:
    a, b = random(rank, inputs, dtype=dtype, scale=0.1), random(outputs, rank, dtype=dtype)
    return LoraPair(a, b, 0.5 + rank / 10)


def bank_of(backend: Backend, slots: Slots, inputs: int, segments: Sequence[int], dtype: torch.dtype) -> LoraBank:
    bank = backend.lora_bank(inputs, segments, len(slots), dtype)
    for slot, pairs in enumerate(slots):
        bank.load(slot, pairs)
    bank.check()
    return bank


def groups_of(counts: Sequence[int], base: int) -> LoraGroups:
    """Rows of each slot in order, after `base` rows of none; slots without rows have empty groups."""
    starts = [base]
    for count in counts:
        starts.append(starts[-1] + count)
    return LoraGroups(tuple(range(len(counts))), tuple(starts))


@pytest.mark.parametrize("popularity", POPULARITY)
@pytest.mark.parametrize("segments", [(48,), (96, 32, 32), (33, 50)], ids=str)
def test_popularity(backend: Backend, dtype: torch.dtype, segments: tuple[int, ...], popularity: str) -> None:
    slots = [[pair(rank + i, 72, n, dtype) for i, n in enumerate(segments)] for rank in RANKS]
    bank = bank_of(backend, slots, 72, segments, dtype)
    groups = groups_of(POPULARITY[popularity], base=5)
    x, y = random(groups.starts[-1], 72, dtype=dtype), random(groups.starts[-1], sum(segments), dtype=dtype)
    expected = oracle.lora(y, x, slots, groups)
    base = y[:5].clone()
    backend.lora(y, x, bank, groups)
    assert_close(y, expected, steps=1)
    assert torch.equal(y[:5], base)


def test_absent_segments_are_left_alone(backend: Backend, dtype: torch.dtype) -> None:
    segments = (40, 24, 56)
    slots = [
        [None, pair(5, 33, 24, dtype), None],
        [pair(2, 33, 40, dtype), None, pair(9, 33, 56, dtype)],
        [None, None, pair(1, 33, 56, dtype)],
        [None, None, None],
    ]
    bank = bank_of(backend, slots, 33, segments, dtype)
    groups = groups_of([3, 4, 1, 2], base=2)
    x, y = random(12, 33, dtype=dtype), random(12, 120, dtype=dtype)
    before = y.clone()
    expected = oracle.lora(y, x, slots, groups)
    backend.lora(y, x, bank, groups)
    assert_close(y, expected)
    untouched = [(slice(2, 5), slice(0, 40)), (slice(2, 5), slice(64, 120)), (slice(5, 9), slice(40, 64))]
    for rows, columns in [*untouched, (slice(9, 10), slice(0, 64)), (slice(10, 12), slice(0, 120))]:
        assert torch.equal(y[rows, columns], before[rows, columns])


@pytest.mark.parametrize("rank", [1, 2, 15, 17, 100, 256])
def test_ranks(backend: Backend, dtype: torch.dtype, rank: int) -> None:
    slots = [[pair(rank, 40, 56, dtype)]]
    bank = bank_of(backend, slots, 40, (56,), dtype)
    groups = LoraGroups((0,), (1, 4))
    x, y = random(4, 40, dtype=dtype), random(4, 56, dtype=dtype)
    expected = oracle.lora(y, x, slots, groups)
    backend.lora(y, x, bank, groups)
    assert_close(y, expected)


def test_base_rows_meet_no_adapter_not_even_a_broken_one(backend: Backend, dtype: torch.dtype) -> None:
    broken = LoraPair(torch.full((4, 16), float("nan"), dtype=dtype), random(16, 4, dtype=dtype), 1.0)
    bank = bank_of(backend, [[broken], [pair(4, 16, 16, dtype)]], 16, (16,), dtype)
    x, y = random(9, 16, dtype=dtype), random(9, 16, dtype=dtype)
    before = y.clone()
    backend.lora(y, x, bank, LoraGroups((0, 1), (6, 7, 9)))
    assert torch.equal(y[:6], before[:6])
    assert y[6].isnan().all()
    assert y[7:].isfinite().all()


def test_no_groups_and_no_rows(backend: Backend, dtype: torch.dtype) -> None:
    bank = bank_of(backend, [[pair(4, 16, 16, dtype)]], 16, (16,), dtype)
    x, y = random(3, 16, dtype=dtype), random(3, 16, dtype=dtype)
    before = y.clone()
    backend.lora(y, x, bank, LoraGroups((), (3,)))
    backend.lora(y, x, bank, LoraGroups((0,), (3, 3)))
    backend.lora(y[:0], x[:0], bank, LoraGroups((0,), (0, 0)))
    assert torch.equal(y, before)


def test_a_slot_is_replaced_whole_and_cleared(backend: Backend, dtype: torch.dtype) -> None:
    segments = (16, 24)
    bank = bank_of(backend, [[pair(4, 16, 16, dtype), pair(6, 16, 24, dtype)]], 16, segments, dtype)
    second = [None, pair(3, 16, 24, dtype)]
    bank.load(0, second)
    bank.check()
    groups = LoraGroups((0,), (0, 5))
    x, y = random(5, 16, dtype=dtype), random(5, 40, dtype=dtype)
    expected = y.double()
    expected[:, 16:] += second[1].scale * (x.double() @ second[1].a.double().T @ second[1].b.double().T)
    backend.lora(y, x, bank, groups)
    assert_close(y, expected)
    bank.clear(0)
    bank.check()
    before = y.clone()
    backend.lora(y, x, bank, groups)
    assert torch.equal(y, before)


def test_the_bank_copies_what_it_is_given(backend: Backend, dtype: torch.dtype) -> None:
    given = pair(4, 16, 16, dtype)
    bank = bank_of(backend, [[given]], 16, (16,), dtype)
    x, y = random(2, 16, dtype=dtype), random(2, 16, dtype=dtype)
    expected = oracle.lora(y, x, [[given]], LoraGroups((0,), (0, 2)))
    given.a.zero_()
    given.b.zero_()
    backend.lora(y, x, bank, LoraGroups((0,), (0, 2)))
    assert_close(y, expected)
