"""Blocks: free, used or cached, and never two of these."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polygraft_engine.kv.pool import BlockPool


def counts(pool: BlockPool) -> tuple[int, int, int]:
    return pool.free, pool.used, pool.cached


def test_blocks_without_a_prefix_are_free_again_at_once() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    blocks = [pool.allocate(), pool.allocate()]
    assert counts(pool) == (1, 2, 0)
    for block in blocks:
        pool.release(block)
    assert counts(pool) == (3, 0, 0)


def test_a_published_block_outlives_its_owner_and_is_revived() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    block = pool.allocate()
    pool.publish(block, b"prefix")
    pool.release(block)
    assert counts(pool) == (1, 0, 1)
    assert pool.lookup(b"prefix") == block
    pool.acquire(block)
    pool.acquire(block)
    assert counts(pool) == (1, 1, 0)
    pool.check({block: 2})


def test_cached_blocks_are_evicted_oldest_first_and_only_when_nothing_is_free() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    blocks = [pool.allocate() for _ in range(3)]
    for block, key in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, key)
    for index in (1, 0, 2):
        pool.release(blocks[index])
    pool.acquire(blocks[1])
    pool.release(blocks[1])
    assert [pool.allocate() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]
    assert pool.evictions == 3
    assert [pool.lookup(key) for key in (b"a", b"b", b"c")] == [None, None, None]


def test_of_two_blocks_with_one_prefix_the_first_is_shared_and_the_second_private() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    first, second = pool.allocate(), pool.allocate()
    pool.publish(first, b"same")
    pool.publish(second, b"same")
    assert pool.lookup(b"same") == first
    pool.release(second)
    pool.release(first)
    assert counts(pool) == (1, 0, 1)
    pool.check({})


def test_flush_frees_cached_blocks_and_forgets_those_in_use() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    idle, busy = pool.allocate(), pool.allocate()
    pool.publish(idle, b"idle")
    pool.publish(busy, b"busy")
    pool.release(idle)
    pool.flush()
    assert counts(pool) == (2, 1, 0)
    assert pool.lookup(b"busy") is None
    pool.check({busy: 1})
    pool.release(busy)
    assert counts(pool) == (3, 0, 0)


def test_misuse_is_caught() -> None:
    pool = BlockPool(num_blocks=1, block_size=4)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="available"):
        pool.allocate()
    with pytest.raises(AssertionError, match="no prefix"):
        pool.acquire(block)
    pool.release(block)
    with pytest.raises(AssertionError, match="without an owner"):
        pool.release(block)
    with pytest.raises(AssertionError, match="no owner"):
        pool.publish(block, b"late")


def test_check_notices_an_owner_that_the_pool_does_not_know() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    block = pool.allocate()
    with pytest.raises(AssertionError, match="references"):
        pool.check({})
    with pytest.raises(AssertionError, match="references"):
        pool.check({block: 2})


class PoolMachine(RuleBasedStateMachine):
    """Owners come and go; a mirror of who holds what must always agree with the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=6, block_size=4)
        self.held: list[int] = []

    @precondition(lambda self: self.pool.available > 0)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block not in self.held
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        self.pool.publish(data.draw(st.sampled_from(self.held)), key)

    @rule(key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def revive(self, key: bytes) -> None:
        block = self.pool.lookup(key)
        if block is not None:
            self.pool.acquire(block)
            self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release(block)

    @rule()
    def flush(self) -> None:
        self.pool.flush()

    @invariant()
    def agrees(self) -> None:
        self.pool.check(Counter(self.held))
        assert self.pool.used == len(set(self.held))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
