"""A step in fixed tensors, as a captured graph replays it, computes what the step alone does, for any adapter mix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tests.conformance import oracle
from tests.conformance.oracle import random, slots_of, step_of
from torch import Tensor

from polygraft_kernels.api import Affine, LoraBank, LoraGroups, LoraPair
from polygraft_kernels.triton import TritonBackend
from polygraft_kernels.triton.fixed import FixedStep
from polygraft_kernels.triton.kv import TritonCache

ROWS, INPUTS, SEGMENTS, BLOCKS = 8, 40, (32, 16), 48


@pytest.fixture
def backend() -> TritonBackend:
    torch.manual_seed(0)
    return TritonBackend(torch.get_default_device())


def bank_of(backend: TritonBackend, ranks: Sequence[int]) -> LoraBank:
    bank = backend.lora_bank(INPUTS, SEGMENTS, len(ranks), torch.float32)
    for slot, rank in enumerate(ranks):  # every other one with an affine
        affines = [Affine(torch.rand(width) + 0.5, torch.randn(width)) if slot % 2 else None for width in SEGMENTS]
        bank.load(slot, [_pair(rank, width) for width in SEGMENTS], affines)
    return bank


def _pair(rank: int, width: int) -> LoraPair:
    a, b = random(rank, INPUTS, dtype=torch.float32), random(width, rank, dtype=torch.float32)
    return LoraPair(a, b, 0.5)


def decode_step(lengths: Sequence[int], groups: LoraGroups) -> tuple[oracle.Sequences, oracle.StepTensors]:
    all_of = oracle.sequences([length - 1 for length in lengths], [1] * len(lengths), 2, 16, torch.float32)
    return all_of, step_of(all_of, 16, BLOCKS, groups)


def cache_of(backend: TritonBackend, all_of: oracle.Sequences, step: oracle.StepTensors) -> TritonCache:
    cache = backend.kv_cache(BLOCKS, 16, 2, 16, torch.float32)
    for i, stored in enumerate(all_of.stored):
        at = slots_of(step, i, range(stored), 16)
        backend.store_kv(all_of.keys[i][:stored], all_of.values[i][:stored], cache, at)
    return cache


def compute(backend: TritonBackend, x: Tensor, bank: LoraBank, cache: TritonCache, step: oracle.StepTensors) -> Tensor:
    """What a layer asks with the numbers of a step: adapters, stored keys, attention."""
    y = torch.zeros(x.shape[0], sum(SEGMENTS))
    if step.groups.slots:
        backend.lora(y, x, bank, step.groups)
    q, k = y[:, :32].view(-1, 2, 16) + x[:, :1, None], x[:, :32].view(-1, 2, 16)
    backend.store_kv(k, k, cache, step.slot_mapping)
    return torch.cat((y, backend.attention(q, cache, step, None).flatten(1)), dim=1)


def test_replays_of_different_mixes(backend: TritonBackend) -> None:
    bank = bank_of(backend, (4, 1, 16, 7))
    fixed = FixedStep(ROWS, BLOCKS, True, torch.get_default_device())
    mixes = [
        ((5, 300, 17), LoraGroups((0, 3), (1, 2, 3))),
        ((1, 2, 3, 4, 5, 6, 7, 8), LoraGroups((0, 1, 2, 3), (0, 2, 4, 6, 8))),
        ((40, 9, 8, 30, 2, 1), LoraGroups((2,), (0, 6))),
    ]
    for lengths, groups in mixes:
        all_of, step = decode_step(lengths, groups)
        count = len(lengths)
        x = random(ROWS, INPUTS, dtype=torch.float32)
        with np.errstate(all="ignore"):
            alone = cache_of(backend, all_of, step)
            expected = compute(backend, x[:count].clone(), bank, alone, step)
            replayed = cache_of(backend, all_of, step)
            fixed.fill(step)
            got = compute(backend, x, bank, replayed, fixed.tensors)
        assert torch.equal(got[:count], expected)
        assert torch.equal(replayed.keys, alone.keys)
        assert torch.equal(replayed.values, alone.values)


def test_a_later_load_is_seen_by_the_same_tables(backend: TritonBackend) -> None:
    bank = bank_of(backend, (4, 8))
    x, groups = random(2, INPUTS, dtype=torch.float32), LoraGroups((1,), (0, 2))
    tables = [each.data_ptr() for each in (bank.pointers, bank.ranks, bank.scales)]
    key = backend.capture_key
    pairs = [_pair(3, width) for width in SEGMENTS]
    bank.load(1, pairs)
    y = torch.zeros(2, sum(SEGMENTS))
    backend.lora(y, x, bank, groups)
    expected = torch.cat([0.5 * (x @ pair.a.T @ pair.b.T) for pair in pairs], dim=1)
    assert torch.allclose(y, expected, atol=1e-4)
    assert [each.data_ptr() for each in (bank.pointers, bank.ranks, bank.scales)] == tables
    assert backend.capture_key == key
    gain = torch.rand(SEGMENTS[0])
    bank.load(1, [None, pairs[1]], [Affine(gain), None])
    y = torch.ones(2, sum(SEGMENTS))
    backend.lora(y, x, bank, groups)
    expected = torch.cat((gain.expand(2, -1), expected[:, SEGMENTS[0] :] + 1), dim=1)
    assert torch.allclose(y, expected, atol=1e-4)
    assert [each.data_ptr() for each in (bank.pointers, bank.ranks, bank.scales)] == tables
    assert backend.capture_key == key
    bank.load(0, [_pair(40, SEGMENTS[0]), None])
    assert backend.capture_key == 64
