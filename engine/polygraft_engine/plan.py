"""What one step computes, as the scheduler tells the runner, and what the runner tells back."""

from __future__ import annotations

from dataclasses import dataclass

from polygraft_engine.request import Sequence
from polygraft_engine.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of one sequence to compute in this step."""

    id: str
    start: int
    """First position computed."""
    token_ids: tuple[int, ...]
    """The tokens at start .. start + count - 1."""
    blocks: tuple[int, ...]
    """The block table of positions 0 .. start + count - 1, exactly."""
    slot: int
    """Adapter slot; -1 is the base model."""
    samples: bool
    """Whether the logits of the last row yield the next token."""
    sequence: Sequence
    """For the sampler to read: prompt length, tokens so far, parameters."""

    @property
    def count(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """An adapter to write into a slot before the forward pass."""

    slot: int
    digest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Without chunks there is nothing to run."""

    chunks: tuple[Chunk, ...]
    """Ordered by slot, the base model first; within a slot decodes first, then by age."""
    loads: tuple[SlotLoad, ...]
    """What these chunks need and is not in its slot yet."""
    preempted: tuple[str, ...]
    """Sequences that lost their blocks and wait again; what was computed of them is recomputed later."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token drawn from one chunk's last row."""

    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Gauges (now) and counters (since the start)."""

    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_cached: int
    preemptions: int
    prefix_query_tokens: int
    """Prompt tokens of sequences that asked the prefix cache at their first admission."""
    prefix_hit_tokens: int
    slot_loads: int
    slot_evictions: int
    resident_adapters: tuple[str, ...]
