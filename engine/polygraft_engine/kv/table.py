"""Which blocks hold one sequence's keys and values, and what prefix each full block stands for."""

from __future__ import annotations

from collections.abc import Iterable

from polygraft_engine.kv.hashing import block_key
from polygraft_engine.kv.pool import BlockPool


class BlockTable:
    """The blocks of one sequence in the order of its tokens.

    `tokens` is the sequence's own list and grows under the table's eyes. `root` is the prefix identity before the first
    token (`hashing.root_key`); None keeps every block private.
    """

    __slots__ = ("_blocks", "_keys", "_pool", "_published", "_root", "_tokens", "_view", "capacity")

    def __init__(self, pool: BlockPool, tokens: list[int], root: bytes | None) -> None:
        self._pool = pool
        self._tokens = tokens
        self._root = root
        self._blocks: list[int] = []
        self.capacity = 0
        """Tokens that the blocks held can store."""
        self._view: tuple[int, ...] | None = ()
        self._keys: list[bytes] = []
        self._published = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def missing(self, tokens: int) -> int:
        """Blocks still to allocate before `tokens` tokens can be stored."""
        return max(0, -(-tokens // self._pool.block_size) - len(self._blocks))

    def covering(self, tokens: int) -> tuple[int, ...]:
        """Exactly the blocks that hold the first `tokens` tokens."""
        if self._view is None:
            self._view = tuple(self._blocks)
        count = -(-tokens // self._pool.block_size)
        assert count <= len(self._view), "the table does not cover these tokens"
        return self._view if count == len(self._view) else self._view[:count]

    def grow(self, tokens: int) -> None:
        """Allocate until `tokens` tokens can be stored; the pool must have the blocks available."""
        if tokens > self.capacity:
            self._blocks.extend(self._pool.allocate() for _ in range(self.missing(tokens)))
            self._resized()

    def match(self) -> list[int]:
        """The blocks of the longest prefix in the pool, which leaves at least the last token to compute.

        Takes no references: `adopt` does.
        """
        found: list[int] = []
        for index in range(self._shareable(len(self._tokens) - 1)):
            block = self._pool.lookup(self._key(index))
            if block is None:
                break
            found.append(block)
        return found

    def adopt(self, blocks: Iterable[int]) -> None:
        """Start an empty table with blocks that `match` found."""
        assert not self._blocks, "only an empty table adopts a prefix"
        for block in blocks:
            self._pool.acquire(block)
            self._blocks.append(block)
        self._published = len(self._blocks)
        self._resized()

    def publish(self, computed: int) -> None:
        """Share the blocks that the first `computed` tokens fill."""
        for index in range(self._published, self._shareable(computed)):
            self._pool.publish(self._blocks[index], self._key(index))
            self._published = index + 1

    def next_key(self, matched: int) -> bytes | None:
        """The key of the block after `matched` shared ones, if a full one that could be shared follows."""
        return self._key(matched) if matched < self._shareable(len(self._tokens) - 1) else None

    def will_publish(self, index: int, key: bytes) -> bool:
        """Whether the tokens known so far fill block `index`, not yet computed, with the prefix `key`."""
        return self._published <= index < self._shareable(len(self._tokens)) and self._key(index) == key

    def release(self) -> None:
        """Give all blocks back, the last one first, so that a cached chain is evicted from its end."""
        for block in reversed(self._blocks):
            self._pool.release(block)
        self._blocks.clear()
        self._published = 0
        self._resized()

    def _resized(self) -> None:
        self.capacity = len(self._blocks) * self._pool.block_size
        self._view = None

    def _shareable(self, tokens: int) -> int:
        return 0 if self._root is None else tokens // self._pool.block_size

    def _key(self, index: int) -> bytes:
        size = self._pool.block_size
        while len(self._keys) <= index:
            start = len(self._keys) * size
            parent = self._keys[-1] if self._keys else self._root
            assert parent is not None, "a private table has no keys"
            self._keys.append(block_key(parent, self._tokens[start : start + size]))
        return self._keys[index]
