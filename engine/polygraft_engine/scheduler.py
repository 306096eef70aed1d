"""Decides what each step computes: `schedule() -> Plan`, then `commit(plan, sampled) -> outputs`.

A sequence only ever catches up its computed tokens with its known ones, so prefill, chunked prefill, decode and
recompute after preemption are one thing. Running sequences hold blocks and a pinned adapter slot; waiting ones hold
nothing. Age (order of arrival) settles every conflict: the oldest running sequence can take any younger one's blocks,
and the oldest waiting one is passed over for a bounded time only, so everything ends.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from polygraft_engine.kv.hashing import root_key
from polygraft_engine.kv.pool import BlockPool
from polygraft_engine.kv.table import BlockTable
from polygraft_engine.plan import Chunk, Plan, Sampled, SchedulerStats, SlotLoad
from polygraft_engine.request import Line, Sequence, State, check_limits, validate
from polygraft_engine.slots import SlotTable
from polygraft_engine.types import EngineLimits, Generation, StepOutput

ADMISSION_WINDOW = 64
"""Waiting sequences looked at in one step, so that a long line does not make steps slow."""


@dataclass(slots=True)
class _Step:
    """A plan in the making: tokens granted to each sequence, and the token budget left."""

    budget: int
    counts: dict[Sequence, int] = field(default_factory=dict)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owns every sequence's state and progress.

    Not thread-safe; one plan is in flight at a time. `age_limit` is how many seconds (of `clock`) a sequence may be
    passed over by younger ones that fit better.
    """

    def __init__(
        self,
        limits: EngineLimits,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
        *,
        age_limit: float = 2.0,
    ) -> None:
        """Raises EngineError for limits under which nothing could run."""
        check_limits(limits)
        self._limits = limits
        self._eos = eos_token_ids
        self._clock = clock
        self._age_limit = age_limit
        self._max_context = limits.max_context
        self._pool = BlockPool(limits.num_blocks, limits.block_size)
        self._slots = SlotTable(limits.max_loras)
        self._sequences: dict[str, Sequence] = {}
        self._running = Line()
        self._waiting = Line()
        self._arrivals = 0
        self._preemptions = 0
        self._prefix_query_tokens = 0
        self._prefix_hit_tokens = 0
        self._in_flight: Plan | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(self, generation: Generation) -> None:
        """Queue a sequence. Raises InvalidRequest when it could never run."""
        assert generation.id not in self._sequences, f"id {generation.id} is already live"
        validate(generation, self._limits)
        tokens = list(generation.prompt)
        root = root_key(generation.cache_namespace, generation.adapter) if self._limits.prefix_caching else None
        table = BlockTable(self._pool, tokens, root)
        sequence = Sequence(generation, tokens, table, self._arrivals, self._clock())
        self._arrivals += 1
        self._sequences[generation.id] = sequence
        self._waiting.add(sequence)

    def cancel(self, id: str) -> bool:
        """End a sequence and free what it holds at once; False when it is not live (any more)."""
        sequence = self._sequences.get(id)
        if sequence is None:
            return False
        self._finish(sequence)
        return True

    def fail(self, ids: Iterable[str], message: str) -> list[StepOutput]:
        """End sequences with an error, for instance those of a step that raised; ids not live are skipped."""
        outputs = []
        for id in ids:
            sequence = self._sequences.get(id)
            if sequence is not None:
                self._finish(sequence)
                outputs.append(StepOutput(id=id, cached_tokens=_cached(sequence), finish_reason="error", error=message))
        return outputs

    def schedule(self) -> Plan:
        """What to compute next; there are chunks whenever there is work.

        Until `commit`, asking again plans the same tokens again.
        """
        step = _Step(self._limits.max_num_batched_tokens)
        decodes = [sequence for sequence in self._running if sequence.remaining == 1]
        prefills = [sequence for sequence in self._running if sequence.remaining > 1]
        for sequence in [*decodes, *prefills]:
            if sequence.state is State.RUNNING:  # not preempted for the sake of one before it
                self._continue(sequence, step)
        # What a preemption frees is for those that run already, some of which may lack a block.
        if not step.preempted:
            self._admit(step, prefills)
        self._in_flight = self._build(step)
        return self._in_flight

    def written(self, load: SlotLoad) -> None:
        """The adapter's weights are in its slot; until it hears so, every plan that needs them asks for them."""
        self._slots.written(load)

    def commit(self, plan: Plan, sampled: Collection[Sampled]) -> list[StepOutput]:
        """Take over what the plan's forward pass computed; `sampled` is aligned with the chunks that sample.

        Sequences that were cancelled or failed since are skipped.
        """
        assert plan is self._in_flight, "only the last plan can be committed, and once"
        assert len(sampled) == sum(chunk.samples for chunk in plan.chunks), "one sampled token per chunk that samples"
        self._in_flight = None
        tokens = iter(sampled)
        outputs = []
        for chunk in plan.chunks:
            token = next(tokens) if chunk.samples else None
            if self._sequences.get(chunk.id) is chunk.sequence:
                output = self._advance(chunk, token)
                if output is not None:
                    outputs.append(output)
        return outputs

    def flush_prefix_cache(self) -> None:
        """Forget all cached prefixes; running sequences keep their blocks."""
        self._pool.flush()

    def drop_adapter(self, digest: str) -> bool:
        """Forget an adapter that no running sequence uses; False when it is not resident or in use."""
        return self._slots.drop(digest)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._waiting),
            blocks_total=self._pool.total,
            blocks_free=self._pool.free,
            blocks_used=self._pool.used,
            blocks_cached=self._pool.cached,
            preemptions=self._preemptions,
            prefix_query_tokens=self._prefix_query_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            slot_loads=self._slots.loads,
            slot_evictions=self._slots.evictions,
            resident_adapters=self._slots.resident,
        )

    def check(self) -> None:
        """Assert every invariant of the scheduler, the pool and the slots. Linear in blocks and sequences."""
        running, waiting = list(self._running), list(self._waiting)
        assert all(sequence.state is State.RUNNING for sequence in running)
        assert all(sequence.state is State.WAITING for sequence in waiting)
        for line in (running, waiting):
            assert [s.arrival for s in line] == sorted({s.arrival for s in line}), "a line is out of order"
        assert {s.id: s for s in [*running, *waiting]} == self._sequences, "a sequence is lost"
        assert len(running) + len(waiting) == len(self._sequences), "a sequence is in both lines"
        # Whoever is admitted finds budget left over, so decodes can never keep an older prefill from progressing.
        assert len(running) <= min(self._limits.max_num_seqs, self._limits.max_num_batched_tokens)
        for sequence in waiting:
            assert len(sequence.table) == 0, f"{sequence.id} waits and holds blocks"
            assert sequence.computed == 0, f"{sequence.id} waits with computed tokens"
            assert sequence.slot == -1, f"{sequence.id} waits and holds a slot"
        for sequence in running:
            assert sequence.computed <= sequence.table.capacity, f"{sequence.id} has computed tokens without a block"
            assert sequence.remaining > 0, f"{sequence.id} runs with nothing to compute"
        self._pool.check(Counter(block for s in running for block in s.table.covering(s.table.capacity)))
        self._slots.check(Counter(s.adapter for s in running if s.adapter is not None))

    def _continue(self, sequence: Sequence, step: _Step) -> None:
        """Grant a running sequence as many of its remaining tokens as budget and blocks allow."""
        count = min(sequence.remaining, step.budget)
        if sequence.computed + count > sequence.table.capacity:
            count = min(count, self._room(sequence, step))
            sequence.table.grow(sequence.computed + count)
        if count > 0:
            step.counts[sequence] = count
            step.budget -= count

    def _room(self, sequence: Sequence, step: _Step) -> int:
        """Tokens the sequence can store now. Younger sequences are preempted, youngest first, while that is none."""
        while True:
            blocks = len(sequence.table) + self._pool.available
            room = blocks * self._pool.block_size - sequence.computed
            youngest = self._running.youngest()
            if room > 0 or youngest is sequence:
                return room
            self._preempt(youngest, step)

    def _preempt(self, sequence: Sequence, step: _Step) -> None:
        step.budget += step.counts.pop(sequence, 0)
        step.preempted.append(sequence)
        self._preemptions += 1
        self._vacate(sequence)
        sequence.state = State.WAITING
        sequence.computed = 0
        self._waiting.add(sequence)

    def _admit(self, step: _Step, prefills: list[Sequence]) -> None:
        """Start waiting sequences, oldest first, each with room for all its tokens.

        One that has to wait is passed over until it is overdue. From then on nothing younger takes the blocks or, if a
        slot is what it lacks, no younger sequence of any adapter starts, so that one drains.
        """
        if not self._waiting:
            return
        now = self._clock()
        draining = False
        for sequence in self._waiting.oldest(ADMISSION_WINDOW):
            # With budget left, everybody who runs has got all the blocks it needs for its tokens.
            if step.budget == 0 or len(self._running) == self._limits.max_num_seqs:
                return
            overdue = now - sequence.arrived_at >= self._age_limit
            if not self._slots.admits(sequence.adapter) or (draining and sequence.adapter is not None):
                draining = draining or overdue
                continue
            blocks = sequence.table.match() if sequence.takes_prefix_hits else []
            if self._in_the_making(sequence, len(blocks), prefills):
                continue
            cost = sequence.table.missing(len(sequence.tokens)) - sum(map(self._pool.in_use, blocks))
            # One block of headroom for each running sequence, or the next few decodes would preempt the newcomer.
            if cost + len(self._running) > self._pool.available:
                if overdue:
                    return
                continue
            self._start(sequence, blocks)
            self._continue(sequence, step)
            prefills.append(sequence)

    def _in_the_making(self, sequence: Sequence, matched: int, prefills: list[Sequence]) -> bool:
        """Whether a running sequence is computing the very block this one needs next: waiting gets it for nothing.

        It waits hardly longer than it would anyway: while that prefill is incomplete it takes the whole budget.
        """
        key = sequence.table.next_key(matched) if sequence.takes_prefix_hits else None
        return key is not None and any(other.table.will_publish(matched, key) for other in prefills)

    def _start(self, sequence: Sequence, blocks: list[int]) -> None:
        self._waiting.remove(sequence)
        self._running.add(sequence)
        sequence.state = State.RUNNING
        sequence.slot = self._slots.pin(sequence.adapter)
        sequence.table.adopt(blocks)
        sequence.computed = len(blocks) * self._pool.block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            if self._limits.prefix_caching and sequence.takes_prefix_hits:
                self._prefix_query_tokens += sequence.prompt_length
                self._prefix_hit_tokens += sequence.computed

    def _build(self, step: _Step) -> Plan:
        chunks = []
        for sequence, count in step.counts.items():
            start, end = sequence.computed, sequence.computed + count
            samples = end == len(sequence.tokens) and sequence.output_length < sequence.generation.params.max_tokens
            token_ids, blocks = tuple(sequence.tokens[start:end]), sequence.table.covering(end)
            chunks.append(Chunk(sequence.id, start, token_ids, blocks, sequence.slot, samples, sequence))
        chunks.sort(key=_slot)
        loads = self._slots.loads_for({chunk.slot for chunk in chunks})
        return Plan(tuple(chunks), loads, tuple(sequence.id for sequence in step.preempted))

    def _advance(self, chunk: Chunk, sampled: Sampled | None) -> StepOutput | None:
        sequence = chunk.sequence
        sequence.computed = chunk.start + len(chunk.token_ids)
        sequence.table.publish(sequence.computed)
        if sampled is not None:
            sequence.tokens.append(sampled.token_id)
        elif sequence.remaining > 0:
            return None
        reason, stop_token = sequence.ending(self._eos, self._max_context)
        if reason is not None:
            self._finish(sequence)
        return StepOutput(
            id=sequence.id,
            token_ids=() if sampled is None else (sampled.token_id,),
            logprobs=() if sampled is None or sampled.logprob is None else (sampled.logprob,),
            cached_tokens=_cached(sequence),
            finish_reason=reason,
            stop_token=stop_token,
        )

    def _finish(self, sequence: Sequence) -> None:
        if sequence.state is State.RUNNING:
            self._vacate(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.state = State.FINISHED
        del self._sequences[sequence.id]

    def _vacate(self, sequence: Sequence) -> None:
        """Take a sequence out of the running ones, with its blocks and its slot."""
        self._running.remove(sequence)
        sequence.table.release()
        self._slots.unpin(sequence.adapter)
        sequence.slot = -1


def _slot(chunk: Chunk) -> int:
    return chunk.slot


def _cached(sequence: Sequence) -> int:
    return 0 if sequence.cached_tokens is None else sequence.cached_tokens
