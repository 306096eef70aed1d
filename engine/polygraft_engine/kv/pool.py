"""The only owner of block ids and reference counts: free + used + cached = total."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each.

    A block is *free* (no owner, contents worthless), *used* (at least one owner) or *cached* (no owner, but it holds
    the prefix that its key names until somebody needs the space). The least recently released leaves the cache first.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.evictions = 0
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free = list(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return len(self._references) - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out right now: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self) -> int:
        """A block with one reference and no contents; takes the oldest cached one when none is free."""
        if self._free:
            block = self._free.pop()
        else:
            assert self._cached, "allocated more blocks than were available"
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self.evictions += 1
        self._references[block] = 1
        return block

    def lookup(self, key: bytes) -> int | None:
        """The block that holds the prefix `key`, used or cached; takes no reference."""
        return self._by_key.get(key)

    def in_use(self, block: int) -> bool:
        return self._references[block] > 0

    def acquire(self, block: int) -> None:
        """Take a reference to a block that `lookup` found."""
        assert self._keys[block] is not None, f"block {block} holds no prefix to share"
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def publish(self, block: int, key: bytes) -> None:
        """Say that a used block, fully computed, holds the prefix `key`.

        When another block already does, that one stays the one to share and this one remains private.
        """
        assert self._references[block] > 0, f"block {block} has no owner to publish it"
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def release(self, block: int) -> None:
        """Give a reference back; the last one leaves the block cached when it holds a prefix, free otherwise."""
        assert self._references[block] > 0, f"block {block} released without an owner"
        self._references[block] -= 1
        if self._references[block] > 0:
            return
        if self._keys[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def flush(self) -> None:
        """Forget every prefix; cached blocks become free, used ones stay with their owners."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._by_key.clear()
        self._keys = [None] * self.total

    def check(self, owners: Mapping[int, int]) -> None:
        """Assert the invariants; `owners` counts, for every used block, the tables that hold it."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(self._cached), "a block is both free and cached"
        assert self.free + self.used + self.cached == self.total
        for block, references in enumerate(self._references):
            assert references == owners.get(block, 0), (
                f"block {block}: {references} references, {owners.get(block, 0)} owners"
            )
            assert (references == 0) == (block in free or block in self._cached), f"block {block} is in the wrong place"
        for block in free:
            assert self._keys[block] is None, f"free block {block} still has a key"
        for block in self._cached:
            assert self._keys[block] is not None, f"cached block {block} has no key"
        named = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert named == self._by_key, "keys and blocks disagree"

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None
