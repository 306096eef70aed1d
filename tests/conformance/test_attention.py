"""Paged attention and the cache it reads: random block tables, prefill chunks beside decode rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance import oracle
from tests.conformance.oracle import Sequences, assert_close, random, slots_of, step_of

from polygraft_kernels.api import Backend, KVCache, StepTensors

BLOCKS = 64


def filled(
    backend: Backend,
    all_of: Sequences,
    step: StepTensors,
    block_size: int,
    dtype: torch.dtype,
    blocks: int = BLOCKS,
) -> KVCache:
    """A cache that holds every sequence's keys and values, first the old ones, then those of the step."""
    _, kv_heads, head_dim = all_of.keys[0].shape
    cache = backend.kv_cache(blocks, block_size, kv_heads, head_dim, dtype)
    for i, stored in enumerate(all_of.stored):
        at = slots_of(step, i, range(stored), block_size)
        backend.store_kv(all_of.keys[i][:stored], all_of.values[i][:stored], cache, at)
    new = [
        torch.cat([each[s:] for each, s in zip(kind, all_of.stored, strict=True)])
        for kind in (all_of.keys, all_of.values)
    ]
    backend.store_kv(new[0], new[1], cache, step.slot_mapping)
    return cache


def check(
    backend: Backend,
    dtype: torch.dtype,
    all_of: Sequences,
    heads: int,
    block_size: int = 16,
    window: int | None = None,
    blocks: int = BLOCKS,
) -> None:
    step = step_of(all_of, block_size, blocks)
    cache = filled(backend, all_of, step, block_size, dtype, blocks)
    q = random(all_of.rows, heads, all_of.keys[0].shape[2], dtype=dtype)
    got = backend.attention(q, cache, step, window)
    assert got.is_contiguous()
    assert_close(got, oracle.attention(q, all_of, window), steps=1)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_head_and_block_sizes(backend: Backend, dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    check(backend, dtype, oracle.sequences([30, 0, 15], [1, 18, 2], 2, head_dim, dtype), 4, block_size)


@pytest.mark.parametrize("share", range(1, 9))
def test_query_heads_share_keys(backend: Backend, dtype: torch.dtype, share: int) -> None:
    check(backend, dtype, oracle.sequences([20, 5], [1, 9], 2, 16, dtype), 2 * share)


def test_one_key_head_for_very_many_query_heads(backend: Backend, dtype: torch.dtype) -> None:
    check(backend, dtype, oracle.sequences([70, 0], [1, 3], 1, 16, dtype), 40)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 100, 1000])
def test_sliding_window(backend: Backend, dtype: torch.dtype, window: int) -> None:
    check(backend, dtype, oracle.sequences([140, 3, 0], [1, 5, 70], 1, 16, dtype), 3, window=window)


@pytest.mark.parametrize("window", [None, 700, 1500])
def test_contexts_that_are_cut_into_splits(backend: Backend, dtype: torch.dtype, window: int | None) -> None:
    all_of = oracle.sequences([2100, 5, 1015], [1, 2, 20], 1, 16, dtype)
    check(backend, dtype, all_of, 3, window=window, blocks=220)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 4),
    window=st.none() | st.integers(1, 80),
)
def test_any_mix_of_chunks_and_decode_rows(
    backend: Backend,
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    kv_heads: int,
    share: int,
    window: int | None,
) -> None:
    stored, new = zip(*lengths, strict=True)
    check(backend, dtype, oracle.sequences(stored, new, kv_heads, 16, dtype), kv_heads * share, window=window)


def test_large_scores_do_not_overflow(backend: Backend, dtype: torch.dtype) -> None:
    all_of = oracle.sequences([40], [4], 1, 16, dtype)
    large = Sequences(all_of.stored, all_of.new, (all_of.keys[0] * 64,), all_of.values)
    check(backend, dtype, large, 2)


def test_queries_may_be_a_view_of_the_fused_projection(backend: Backend, dtype: torch.dtype) -> None:
    all_of = oracle.sequences([3, 7], [4, 1], 2, 16, dtype)
    step = step_of(all_of, 16, BLOCKS)
    qkv = random(5, (4 + 2 + 2) * 16, dtype=dtype)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in qkv.split([64, 32, 32], dim=1))
    cache = filled(backend, all_of, step, 16, dtype)
    backend.store_kv(k, v, cache, step.slot_mapping)
    keys = (torch.cat((all_of.keys[0][:3], k[:4])), torch.cat((all_of.keys[1][:7], k[4:])))
    values = (torch.cat((all_of.values[0][:3], v[:4])), torch.cat((all_of.values[1][:7], v[4:])))
    expected = oracle.attention(q, Sequences(all_of.stored, all_of.new, keys, values), None)
    assert_close(backend.attention(q, cache, step, None), expected)


def test_what_lies_beyond_the_context_is_never_read(backend: Backend, dtype: torch.dtype) -> None:
    all_of = oracle.sequences([4, 17], [1, 2], 2, 16, dtype)
    step = step_of(all_of, 16, BLOCKS)
    poison = torch.full((BLOCKS * 16, 2, 16), float("nan"), dtype=dtype)
    cache = backend.kv_cache(BLOCKS, 16, 2, 16, dtype)
    backend.store_kv(poison, poison, cache, torch.arange(BLOCKS * 16))
    for i, total in enumerate((5, 19)):
        backend.store_kv(all_of.keys[i], all_of.values[i], cache, slots_of(step, i, range(total), 16))
    q = random(3, 4, 16, dtype=dtype)
    assert_close(backend.attention(q, cache, step, None), oracle.attention(q, all_of, None))


def test_no_rows(backend: Backend, dtype: torch.dtype) -> None:
    cache = backend.kv_cache(2, 16, 1, 16, dtype)
    none = torch.zeros(0, dtype=torch.int64)
    starts, tables = torch.zeros(1, dtype=torch.int32), torch.zeros(0, 1, dtype=torch.int32)
    step = StepTensors(none, none, starts, none.int(), tables, oracle.LoraGroups())
    backend.store_kv(random(0, 1, 16, dtype=dtype), random(0, 1, 16, dtype=dtype), cache, none)
    assert backend.attention(random(0, 3, 16, dtype=dtype), cache, step, None).shape == (0, 3, 16)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_the_cache_gives_back_what_was_stored(backend: Backend, dtype: torch.dtype, block_size: int) -> None:
    cache = backend.kv_cache(6, block_size, 3, 80, dtype)
    k, v = random(block_size + 5, 3, 80, dtype=dtype), random(block_size + 5, 3, 80, dtype=dtype)
    at = torch.randperm(6 * block_size)[: block_size + 5]
    backend.store_kv(k, v, cache, at)
    keys, values = cache.read(range(6))
    assert torch.equal(keys[at], k)
    assert torch.equal(values[at], v)
    others = torch.ones(6 * block_size, dtype=torch.bool)
    others[at] = False
    assert not keys[others].any()
    assert not values[others].any()
