"""Prompt logprobs in the making: chunk by chunk, until the first output carries them off."""

from __future__ import annotations

from collections.abc import Sequence

from polygraft_engine.types import TokenLogprob


class PromptScores:
    """What has been scored of each prompt. Entry i belongs to the prompt's token i + 1."""

    def __init__(self) -> None:
        self._entries: dict[str, list[TokenLogprob]] = {}

    def add(self, id: str, start: int, entries: Sequence[TokenLogprob]) -> None:
        """Append the entries of a chunk that began at position `start`; a recomputed prompt replaces its old ones."""
        held = self._entries.setdefault(id, [])
        assert start <= len(held), f"{id} is scored from {start} with only {len(held)} entries before"
        held[start:] = entries

    def pop(self, id: str) -> tuple[TokenLogprob, ...] | None:
        """All entries, once; None for a sequence that did not ask."""
        entries = self._entries.pop(id, None)
        return None if entries is None else tuple(entries)

    def drop(self, id: str) -> None:
        """Forget a sequence that ended early."""
        self._entries.pop(id, None)

    def check_empty(self) -> None:
        """Assert that nothing is kept for sequences that are gone."""
        assert not self._entries, f"scores of {sorted(self._entries)} were never taken"
