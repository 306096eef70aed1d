"""One sequence's blocks: what they cover, what is shared of them."""

from polygraft_engine.kv.hashing import root_key
from polygraft_engine.kv.pool import BlockPool
from polygraft_engine.kv.table import BlockTable

ROOT = root_key("tenant", None)


def computed_table(pool: BlockPool, tokens: list[int], root: bytes | None = ROOT) -> BlockTable:
    table = BlockTable(pool, tokens, root)
    table.grow(len(tokens))
    table.publish(len(tokens))
    return table


def test_blocks_are_allocated_on_demand() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    table = BlockTable(pool, list(range(9)), ROOT)
    assert table.missing(9) == 3
    table.grow(4)
    assert (len(table), table.capacity, table.missing(9), pool.used) == (1, 4, 2, 1)
    table.grow(5)
    assert (len(table), table.capacity) == (2, 8)


def test_covering_is_exact_and_built_only_when_the_table_grows() -> None:
    table = computed_table(BlockPool(num_blocks=8, block_size=4), list(range(9)))
    whole = table.covering(9)
    assert table.covering(12) is whole
    assert table.covering(8) == whole[:2]
    assert table.covering(0) == ()


def test_only_full_computed_blocks_are_shared() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    tokens = list(range(12))
    table = BlockTable(pool, tokens, ROOT)
    table.grow(12)
    table.publish(7)
    assert BlockTable(pool, tokens, ROOT).match() == list(table.covering(4))


def test_a_match_leaves_the_last_token_to_compute() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    table = computed_table(pool, list(range(8)))
    assert BlockTable(pool, list(range(8)), ROOT).match() == list(table.covering(4))
    assert BlockTable(pool, list(range(9)), ROOT).match() == list(table.covering(8))


def test_a_match_ends_where_the_tokens_part() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    table = computed_table(pool, list(range(12)))
    assert BlockTable(pool, [*range(7), 99, *range(8, 13)], ROOT).match() == list(table.covering(4))


def test_adopted_blocks_are_shared_and_released_once_each() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    first = computed_table(pool, list(range(9)))
    second = BlockTable(pool, list(range(9)), ROOT)
    second.adopt(second.match())
    second.grow(9)
    assert second.covering(8) == first.covering(8)
    assert second.covering(9) != first.covering(9)
    first.release()
    second.release()
    pool.check({})
    assert pool.cached == 2


def test_a_chain_is_evicted_from_its_end() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    tokens = list(range(12))
    table = computed_table(pool, tokens)
    blocks = table.covering(12)
    table.release()
    assert pool.allocate() == blocks[2]
    assert BlockTable(pool, [*tokens, 0], ROOT).match() == list(blocks[:2])


def test_keys_follow_the_tokens_as_they_grow() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    tokens = list(range(3))
    table = computed_table(pool, tokens)
    tokens.extend(range(3, 9))
    table.grow(9)
    table.publish(9)
    assert BlockTable(pool, list(range(9)), ROOT).match() == list(table.covering(8))


def test_a_block_in_the_making_is_known_by_its_key() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    making = BlockTable(pool, list(range(12)), ROOT)
    making.grow(8)
    wanting = BlockTable(pool, [*range(8), 99], ROOT)
    key = wanting.next_key(0)
    assert key is not None
    assert making.will_publish(0, key)
    making.publish(4)
    assert not making.will_publish(0, key)
    key = wanting.next_key(1)
    assert key is not None
    assert making.will_publish(1, key)
    assert wanting.next_key(2) is None, "the block after it is not full"


def test_a_table_without_a_root_shares_nothing() -> None:
    pool = BlockPool(num_blocks=8, block_size=4)
    table = computed_table(pool, list(range(9)), root=None)
    other = BlockTable(pool, list(range(9)), None)
    assert other.match() == []
    assert other.next_key(0) is None
    table.release()
    assert pool.free == 8
