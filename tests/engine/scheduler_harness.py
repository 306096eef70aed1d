"""Drives a Scheduler with a model that computes from nothing but the KV cache it was told to use.

The fake model keeps one number per token in the block and offset that the plan names. A token's number depends on the
sum of all numbers before it, read through the block table, and so does the next token. A block that was freed too
early, shared across adapters or tenants, or not recomputed after preemption therefore changes the output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

from polygraft_engine.plan import Chunk, Plan, Sampled, SlotLoad
from polygraft_engine.scheduler import Scheduler
from polygraft_engine.types import EngineLimits, FinishReason, Generation, SamplingParams, StepOutput

EOS = 0
VOCABULARY = 40


def make_limits(**changes: int | bool) -> EngineLimits:
    values = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 4,
        "num_blocks": 256,
        "max_loras": 2,
        "max_lora_rank": 8,
        "prefix_caching": True,
    }
    return EngineLimits(**values | changes)  # type: ignore[arg-type]


def make_generation(
    id: str,
    prompt: int | tuple[int, ...],
    *,
    adapter: str | None = None,
    namespace: str = "",
    choice: int = 0,
    **params: object,
) -> Generation:
    """A prompt given by its tokens, or by its length: then no other id's prompt shares a block with it."""
    tokens = tuple(crc32(f"{id}/{i}".encode()) for i in range(prompt)) if isinstance(prompt, int) else prompt
    values = {"max_tokens": 8, "seed": 0, "ignore_eos": True} | params
    return Generation(
        id=id,
        prompt=tokens,
        params=SamplingParams(**values),  # type: ignore[arg-type]
        adapter=adapter,
        cache_namespace=namespace,
        choice=choice,
    )


def _beginning(namespace: str, adapter: str | None) -> int:
    return crc32(repr((namespace, adapter)).encode())


def _entry(token: int, position: int, context: int) -> int:
    return hash((token, position, context)) & 0xFFFFFFFF


def _next_token(context: int, generation: Generation, position: int) -> int:
    return hash((context, generation.params.seed, generation.choice, position)) % VOCABULARY


def undisturbed(generation: Generation, limits: EngineLimits) -> tuple[list[int], FinishReason]:
    """The output and its end when the sequence is computed alone, in one piece, without a cache."""
    params = generation.params
    context, output = _beginning(generation.cache_namespace, generation.adapter), []
    for position, token in enumerate(generation.prompt):
        context += _entry(token, position, context)
    while len(output) < params.max_tokens:
        length = len(generation.prompt) + len(output)
        output.append(_next_token(context, generation, length))
        context += _entry(output[-1], length, context)
        ends = output[-1] in params.stop_token_ids or (output[-1] == EOS and not params.ignore_eos)
        if ends and len(output) >= params.min_tokens:
            return output, "stop"
        if length + 1 >= limits.max_context:
            break
    return output, "length"


class FakeModel:
    """Slots and paged KV memory, and a forward pass over them."""

    def __init__(self, limits: EngineLimits, written: Callable[[SlotLoad], None]) -> None:
        self._written = written
        self._size = limits.block_size
        self._memory = [[0] * limits.block_size for _ in range(limits.num_blocks)]
        self._slots: dict[int, str | None] = {-1: None}

    def forward(self, plan: Plan) -> list[Sampled]:
        for load in plan.loads:
            self._slots[load.slot] = load.digest
            self._written(load)
        contexts = [self._run(chunk) for chunk in plan.chunks]
        return [
            Sampled(_next_token(context, chunk.sequence.generation, chunk.start + chunk.count), None)
            for chunk, context in zip(plan.chunks, contexts, strict=True)
            if chunk.samples
        ]

    def _run(self, chunk: Chunk) -> int:
        generation = chunk.sequence.generation
        context = _beginning(generation.cache_namespace, self._slots[chunk.slot])
        full, rest = divmod(chunk.start, self._size)
        context += sum(sum(self._memory[block]) for block in chunk.blocks[:full])
        context += sum(self._memory[chunk.blocks[full]][:rest]) if rest else 0
        for position, token in enumerate(chunk.token_ids, chunk.start):
            entry = _entry(token, position, context)
            self._memory[chunk.blocks[position // self._size]][position % self._size] = entry
            context += entry
        return context


@dataclass
class Result:
    output: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None


class Harness:
    """A scheduler, its fake model and a clock that moves by hand; every step is checked."""

    def __init__(self, limits: EngineLimits, *, age_limit: float = 2.0, seconds_per_step: float = 0.0) -> None:
        self.limits = limits
        self.now = 0.0
        self.seconds_per_step = seconds_per_step
        self.scheduler = Scheduler(limits, frozenset({EOS}), lambda: self.now, age_limit=age_limit)
        self.model = FakeModel(limits, self.scheduler.written)
        self.results: dict[str, Result] = {}
        self.generations: dict[str, Generation] = {}
        self.plans: list[Plan] = []

    def add(self, *generations: Generation) -> None:
        for generation in generations:
            self.scheduler.add(generation)
            self.generations[generation.id] = generation
            self.results[generation.id] = Result()
        self.scheduler.check()

    def cancel(self, id: str) -> bool:
        known = self.scheduler.cancel(id)
        if known:
            self.results[id].finish_reason = "abort"
        self.scheduler.check()
        return known

    def step(self) -> Plan:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        self._check_plan(plan)
        self.record(self.scheduler.commit(plan, self.model.forward(plan)))
        self.scheduler.check()
        self.plans.append(plan)
        self.now += self.seconds_per_step
        return plan

    def run(self, max_steps: int = 5000) -> None:
        """Steps until idle; fails when that takes longer than `max_steps`."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps: {self.scheduler.stats()}")

    def record(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            result = self.results[output.id]
            assert result.finish_reason is None, f"{output.id} got an output after its end"
            result.output.extend(output.token_ids)
            result.cached_tokens = output.cached_tokens
            result.finish_reason = output.finish_reason
            result.stop_token = output.stop_token
            result.error = output.error

    def assert_undisturbed(self, *ids: str) -> None:
        """The outputs (of everything, unless told) are those of a run alone; cancelled ones are a beginning of it."""
        for id in ids or tuple(self.results):
            result = self.results[id]
            output, reason = undisturbed(self.generations[id], self.limits)
            if result.finish_reason == "abort":
                assert result.output == output[: len(result.output)], id
            else:
                assert (result.output, result.finish_reason) == (output, reason), id

    def assert_idle(self) -> None:
        """Nothing runs, nothing is held, and a flush leaves all blocks free."""
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        self.scheduler.flush_prefix_cache()
        self.scheduler.check()
        assert self.scheduler.stats().blocks_free == self.limits.num_blocks

    @property
    def partial_chunks(self) -> int:
        """Chunks so far that left some of the prompt for a later step."""
        return sum(
            chunk.start + chunk.count < chunk.sequence.prompt_length for plan in self.plans for chunk in plan.chunks
        )

    def _check_plan(self, plan: Plan) -> None:
        size, chunks = self.limits.block_size, plan.chunks
        assert bool(chunks) == self.scheduler.has_work, "there is work, so something must be planned"
        assert sum(chunk.count for chunk in chunks) <= self.limits.max_num_batched_tokens
        assert len(chunks) <= self.limits.max_num_seqs
        assert [chunk.slot for chunk in chunks] == sorted(chunk.slot for chunk in chunks)
        by_slot = {(chunk.slot, chunk.sequence.adapter) for chunk in chunks}
        assert len(by_slot) == len({slot for slot, _ in by_slot}), "one slot, two adapters"
        assert all((slot == -1) == (adapter is None) and slot < self.limits.max_loras for slot, adapter in by_slot)
        tables = [set(chunk.blocks) for chunk in chunks]
        for chunk in chunks:
            end = chunk.start + chunk.count
            assert chunk.count > 0
            assert chunk.token_ids == tuple(chunk.sequence.tokens[chunk.start : end])
            assert len(chunk.blocks) == -(-end // size), "the table covers the chunk exactly"
            written = set(chunk.blocks[chunk.start // size :])
            assert sum(not written.isdisjoint(table) for table in tables) == 1, "a block is written that others read"
