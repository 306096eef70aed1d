"""Which adapter is in which slot. A slot in use is never given away; the base model takes none."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping

from polygraft_engine.plan import SlotLoad

BASE_SLOT = -1


class SlotTable:
    """`max_loras` slots for adapters, by digest. The least recently used adapter that nobody pins leaves first."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        self.loads = 0
        self.evictions = 0
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._pins: dict[str, int] = {}
        self._free = list(reversed(range(max_loras)))
        self._unwritten: set[str] = set()

    @property
    def resident(self) -> tuple[str, ...]:
        """Digests that have a slot, least recently used first."""
        return tuple(self._slots)

    def admits(self, digest: str | None) -> bool:
        """Whether `pin` can succeed now."""
        return digest is None or digest in self._slots or len(self._pins) < self.max_loras

    def pin(self, digest: str | None) -> int:
        """The adapter's slot, kept for it until `unpin` was called as often; `admits` must have said yes."""
        if digest is None:
            return BASE_SLOT
        if digest not in self._slots:
            self._slots[digest] = self._free.pop() if self._free else self._evict()
            self._unwritten.add(digest)
        self._pins[digest] = self._pins.get(digest, 0) + 1
        return self._slots[digest]

    def unpin(self, digest: str | None) -> None:
        if digest is None:
            return
        self._pins[digest] -= 1
        if self._pins[digest] == 0:
            del self._pins[digest]
            self._slots.move_to_end(digest)

    def loads_for(self, slots: Collection[int]) -> tuple[SlotLoad, ...]:
        """What has to be written before these slots may be used; asked again until `written` confirms it."""
        if not self._unwritten:
            return ()
        return tuple(
            SlotLoad(slot, digest)
            for digest, slot in self._slots.items()
            if digest in self._unwritten and slot in slots
        )

    def written(self, load: SlotLoad) -> None:
        """The adapter's weights are in its slot. An adapter that lost the slot meanwhile is ignored."""
        if self._slots.get(load.digest) == load.slot and load.digest in self._unwritten:
            self._unwritten.remove(load.digest)
            self.loads += 1

    def drop(self, digest: str) -> bool:
        """Forget an adapter that nobody pins; False when it is not resident or in use."""
        if digest not in self._slots or digest in self._pins:
            return False
        self._free.append(self._slots.pop(digest))
        self._unwritten.discard(digest)
        return True

    def check(self, users: Mapping[str, int]) -> None:
        """Assert the invariants; `users` counts the running sequences of each adapter."""
        assert self._pins == dict(users), f"pins {self._pins}, users {dict(users)}"
        assert self._pins.keys() <= self._slots.keys(), "a pinned adapter has no slot"
        assert self._unwritten <= self._slots.keys(), "an adapter without a slot waits to be written"
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.max_loras)), (
            "a slot is lost or taken twice"
        )

    def _evict(self) -> int:
        victim = next(digest for digest in self._slots if digest not in self._pins)
        self._unwritten.discard(victim)
        self.evictions += 1
        return self._slots.pop(victim)
