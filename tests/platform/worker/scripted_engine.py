"""An engine that does what it is told, for the worker's loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from polygraft_engine.plan import SchedulerStats
from polygraft_engine.stats import EngineStats, StepPhases
from polygraft_engine.types import Generation, InvalidRequest, StepOutput

A = 3
"""The token of the letter a."""


@dataclass
class ScriptedEngine:
    """Every sequence gets one more `a` a step, until it has max_tokens. `fault` is raised by the next step."""

    live: dict[str, Generation] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    fault: Exception | None = None
    failing: set[str | None] = field(default_factory=set)
    """Adapters (None: the base) whose sequences end with `failure`."""
    failure: str = "secret detail"
    not_finite: bool = False

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add(self, generation: Generation) -> None:
        if min(generation.prompt) < 0:
            raise InvalidRequest("negative", param="prompt", code="why")
        self.live[generation.id] = generation

    def cancel(self, id: str) -> bool:
        return self.live.pop(id, None) is not None

    def step(self) -> list[StepOutput]:
        self.steps += 1
        if self.fault is not None:
            raise self.fault
        outputs = []
        for id, generation in list(self.live.items()):
            if generation.adapter in self.failing and self.done[id] > 0:
                del self.live[id]
                outputs.append(StepOutput(id=id, finish_reason="error", error=self.failure, not_finite=self.not_finite))
                continue
            self.done[id] += 1
            ended = self.done[id] == generation.params.max_tokens
            if ended:
                del self.live[id]
            outputs.append(
                StepOutput(id=id, token_ids=(A,), cached_tokens=2, finish_reason="length" if ended else None)
            )
        return outputs

    def stats(self) -> EngineStats:
        scheduler = SchedulerStats(
            running=len(self.live),
            waiting=0,
            blocks_total=10,
            blocks_free=10,
            blocks_used=0,
            blocks_cached=0,
            preemptions=0,
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
            slot_loads=0,
            slot_evictions=0,
            resident_adapters=(),
        )
        return EngineStats(
            scheduler=scheduler,
            forward_passes=self.steps,
            computed_tokens=0,
            sampled_tokens=0,
            failed_steps=0,
            all_steps=StepPhases(forward=0.5),
            last_step=StepPhases(),
        )

    def check(self) -> None:
        """Nothing to check."""
