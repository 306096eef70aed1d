"""y = gain * (y + scale * B (A x)) + shift: each adapter's own gains and shifts, beside adapters that have none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance import oracle
from tests.conformance.oracle import assert_close, random
from torch import Tensor

from polygraft_kernels.api import Affine, Backend, LoraBank, LoraGroups, LoraPair

INPUTS, SEGMENTS = 40, (33, 50, 16)
Pairs = Sequence[LoraPair | None]
Affines = Sequence[Affine | None]
KINDS = {"gain": (True, False), "shift": (False, True), "both": (True, True)}


def pair(rank: int, outputs: int, dtype: torch.dtype) -> LoraPair:
    return LoraPair(random(rank, INPUTS, dtype=dtype, scale=0.1), random(outputs, rank, dtype=dtype), 0.7)


def affine(outputs: int, kind: str = "both") -> Affine:
    gain, shift = KINDS[kind]
    return Affine(torch.rand(outputs) + 0.5 if gain else None, torch.randn(outputs) if shift else None)


def bank_of(
    backend: Backend,
    pairs: Sequence[Pairs],
    affines: Sequence[Affines | None],
    dtype: torch.dtype,
    segments: Sequence[int] = SEGMENTS,
) -> LoraBank:
    bank = backend.lora_bank(INPUTS, segments, len(pairs), dtype)
    for slot, mine in enumerate(pairs):
        bank.load(slot, mine, affines[slot])
    bank.check()
    return bank


def adapted(
    backend: Backend,
    y: Tensor,
    x: Tensor,
    pairs: Sequence[Pairs],
    affines: Sequence[Affines | None],
    groups: LoraGroups,
) -> Tensor:
    out = y.clone()
    backend.lora(out, x, bank_of(backend, pairs, affines, y.dtype), groups)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [(3, 2, 4, 1, 2), (1, 9, 20, 2, 0)], ids=str)
def test_mixed_with_plain_adapters_and_base_rows(
    backend: Backend, dtype: torch.dtype, counts: tuple[int, ...], kind: str
) -> None:
    first, second, third = SEGMENTS
    pairs: list[Pairs] = [
        [pair(4, n, dtype) for n in SEGMENTS],
        [pair(3 + n % 5, n, dtype) for n in SEGMENTS],
        [None, pair(7, second, dtype), pair(2, third, dtype)],
        [None, None, None],
        [None, None, None],
    ]
    affines: list[Affines | None] = [
        None,
        [affine(n, kind) for n in SEGMENTS],
        [affine(first, kind), None, affine(third, kind)],
        [None, affine(second, kind), None],
        None,
    ]
    starts = [2]
    for count in counts:
        starts.append(starts[-1] + count)
    groups = LoraGroups(tuple(range(5)), tuple(starts))
    x, y = random(starts[-1], INPUTS, dtype=dtype), random(starts[-1], sum(SEGMENTS), dtype=dtype)
    got = adapted(backend, y, x, pairs, affines, groups)
    expected = oracle.affine(oracle.lora(y, x, pairs, groups), affines, SEGMENTS, groups)
    assert_close(got, expected)
    plain = adapted(backend, y, x, pairs, [None] * 5, groups)
    alike = [
        (slice(0, starts[1]), slice(0, sum(SEGMENTS))),
        (slice(starts[2], starts[3]), slice(first, first + second)),
    ]
    alike += [(slice(starts[3], starts[4]), columns) for columns in (slice(0, first), slice(first + second, None))]
    for rows, columns in [*alike, (slice(starts[4], None), slice(None))]:
        assert torch.equal(got[rows, columns], plain[rows, columns])
    assert torch.equal(got[:2], y[:2])
    assert torch.equal(got[starts[4] :], y[starts[4] :])


@pytest.mark.parametrize("rank", [0, 1, 2, 15, 64, 256])
def test_ranks(backend: Backend, dtype: torch.dtype, rank: int) -> None:
    pairs = [[pair(rank, n, dtype) if rank else None for n in SEGMENTS[:2]]]
    affines = [[affine(n) for n in SEGMENTS[:2]]]
    bank = bank_of(backend, pairs, affines, dtype, SEGMENTS[:2])
    groups = LoraGroups((0,), (1, 4))
    x, y = random(4, INPUTS, dtype=dtype), random(4, sum(SEGMENTS[:2]), dtype=dtype)
    expected = oracle.lora(y, x, pairs, groups) if rank else y.double()
    expected = oracle.affine(expected, affines, SEGMENTS[:2], groups)
    backend.lora(y, x, bank, groups)
    assert_close(y, expected)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("outputs", [1, 7, 8, 17, 127, 129, 300])
def test_widths(backend: Backend, dtype: torch.dtype, outputs: int, rank: int) -> None:
    """Beside a segment that must not change."""
    affines = [[affine(outputs), None]]
    bank = bank_of(backend, [[pair(rank, outputs, dtype) if rank else None, None]], affines, dtype, (outputs, 5))
    x, y = random(6, INPUTS, dtype=dtype), random(6, outputs + 5, dtype=dtype)
    before, groups = y.clone(), LoraGroups((0,), (0, 6))
    backend.lora(y, x, bank, groups)
    if rank == 0:
        assert_close(y, oracle.affine(before.double(), affines, (outputs, 5), groups))
    assert torch.equal(y[:, outputs:], before[:, outputs:])
    assert not torch.equal(y[:, :outputs], before[:, :outputs])


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    ranks=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    counts=st.lists(st.integers(0, 6), min_size=4, max_size=4),
    adjusted=st.lists(st.sampled_from([None, *KINDS]), min_size=4, max_size=4),
)
def test_neighbours_with_an_affine_change_no_bit(
    backend: Backend, dtype: torch.dtype, ranks: list[int], counts: list[int], adjusted: list[str | None]
) -> None:
    pairs = [[pair(rank, n, dtype) if rank else None for n in SEGMENTS] for rank in ranks]
    affines: list[Affines | None] = [
        None if kind is None else [affine(n, kind) for n in SEGMENTS] for kind in adjusted[: len(ranks)]
    ]
    starts = [1]
    for count in counts[: len(ranks)]:
        starts.append(starts[-1] + count)
    groups = LoraGroups(tuple(range(len(ranks))), tuple(starts))
    x, y = random(starts[-1], INPUTS, dtype=dtype), random(starts[-1], sum(SEGMENTS), dtype=dtype)
    mixed = adapted(backend, y, x, pairs, affines, groups)
    plain = adapted(backend, y, x, pairs, [None] * len(ranks), groups)
    assert torch.equal(mixed[:1], y[:1])
    for slot, kind in enumerate(adjusted[: len(ranks)]):
        rows = slice(starts[slot], starts[slot + 1])
        if kind is None:
            assert torch.equal(mixed[rows], plain[rows])


def test_negative_zeros_stay(backend: Backend) -> None:
    """Of an adapter without affine whose delta is -0 everywhere: an absent shift is not a zero that is added."""
    zeros = LoraPair(-torch.zeros(2, INPUTS), torch.ones(16, 2), -0.5)
    bank = bank_of(backend, [[zeros], [None]], [None, [affine(16)]], torch.float32, (16,))
    x, y = torch.randn(3, INPUTS).abs(), -torch.zeros(3, 16)
    backend.lora(y, x, bank, LoraGroups((0, 1), (0, 2, 3)))
    assert torch.signbit(y[:2]).all()


def test_dora(backend: Backend) -> None:
    """m (W + scale B A) x / ||W + scale B A|| + bias, the norm over each output's weights (arXiv 2402.09353)."""
    (outputs, *_), mine = SEGMENTS, pair(5, SEGMENTS[0], torch.float32)
    weight, bias, x = torch.randn(outputs, INPUTS), torch.randn(outputs), torch.randn(7, INPUTS)
    magnitude = torch.rand(outputs) + 1
    whole = weight.double() + mine.scale * mine.b.double() @ mine.a.double()
    gain = magnitude.double() / whole.norm(dim=1)
    bank = bank_of(backend, [[mine]], [[Affine(gain, (1 - gain) * bias)]], torch.float32, (outputs,))
    y = backend.linear(x, backend.pack_linear(weight, bias))
    backend.lora(y, x, bank, LoraGroups((0,), (0, 7)))
    assert_close(y, x.double() @ (gain.unsqueeze(1) * whole).T + bias.double(), steps=4)


def test_a_slot_is_replaced_whole_and_cleared(backend: Backend, dtype: torch.dtype) -> None:
    first, second = SEGMENTS[:2]
    bank = bank_of(backend, [[None, None]], [[affine(first), affine(second)]], dtype, (first, second))
    x, y = random(3, INPUTS, dtype=dtype), random(3, first + second, dtype=dtype)
    groups, affines = LoraGroups((0,), (0, 3)), [[None, affine(second, "gain")]]
    bank.load(0, [None, None], affines[0])
    bank.check()
    got = y.clone()
    backend.lora(got, x, bank, groups)
    assert_close(got, oracle.affine(y.double(), affines, (first, second), groups))
    assert torch.equal(got[:, :first], y[:, :first])
    for empty in (lambda: bank.load(0, [None, None]), lambda: bank.clear(0)):
        bank.load(0, [None, None], affines[0])
        empty()
        bank.check()
        got = y.clone()
        backend.lora(got, x, bank, groups)
        assert torch.equal(got, y)


@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_vectors_of_any_float_dtype_are_copied(backend: Backend, dtype: torch.dtype, given: torch.dtype) -> None:
    wide = affine(16)
    assert wide.gain is not None
    assert wide.shift is not None
    narrow = Affine(wide.gain.to(given).repeat_interleave(2)[::2], wide.shift.to(given))
    assert narrow.gain is not None
    assert narrow.shift is not None
    kept = [[Affine(narrow.gain.clone(), narrow.shift.clone())]]
    bank = bank_of(backend, [[None]], [[narrow]], dtype, (16,))
    x, y = random(3, INPUTS, dtype=dtype), random(3, 16, dtype=dtype)
    expected = oracle.affine(y.double(), kept, (16,), LoraGroups((0,), (0, 3)))
    narrow.gain.zero_()
    narrow.shift.zero_()
    backend.lora(y, x, bank, LoraGroups((0,), (0, 3)))
    assert_close(y, expected)
