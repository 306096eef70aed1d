"""What both sides of a comparison are asked to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polygraft.bench.load import Popularity

from .errors import PeerError

PROMPT_TOKENS = 126
OUTPUT_TOKENS = 64
RANKS = (8, 12, 16, 24, 32)


@dataclass(frozen=True, slots=True)
class Load:
    """So many streams at a time, over so many adapters; 0 adapters is the base model."""

    name: str
    streams: int
    adapters: int = 0
    popularity: Popularity = "uniform"

    def requests(self, per_stream: int) -> int:
        """How many in all; a single stream gets at least four, so that its median means something."""
        return max(4, self.streams * per_stream)

    def models(self, base: str, adapters: Sequence[str]) -> tuple[str, ...]:
        """The model names it asks for. Raises PeerError where there are too few adapters."""
        if self.adapters > len(adapters):
            raise PeerError(f"{self.name} wants {self.adapters} adapters, there are {len(adapters)}")
        return tuple(adapters[: self.adapters]) if self.adapters else (base,)


def select(loads: Sequence[Load], names: str | None) -> tuple[Load, ...]:
    """Those named, in the given order of `loads`; None is all. Raises PeerError for an unknown name."""
    if names is None:
        return tuple(loads)
    wanted = {name.strip() for name in names.split(",") if name.strip()}
    known = {load.name for load in loads}
    if not wanted or wanted - known:
        unknown = ", ".join(sorted(wanted - known))
        raise PeerError(
            f"unknown load: {unknown or '(none named)'}; there are {', '.join(load.name for load in loads)}"
        )
    return tuple(load for load in loads if load.name in wanted)
