"""What an engine tells about itself. Free of torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

from polygraft_engine.plan import SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPhases:
    """Seconds that each part of one step took."""

    schedule: float = 0.0
    load: float = 0.0
    """Writing adapters into slots."""
    batch: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    """Head, sampling and logprobs."""
    commit: float = 0.0

    @property
    def total(self) -> float:
        return self.schedule + self.load + self.batch + self.forward + self.sample + self.commit

    def __add__(self, other: StepPhases) -> StepPhases:
        return StepPhases(
            schedule=self.schedule + other.schedule,
            load=self.load + other.load,
            batch=self.batch + other.batch,
            forward=self.forward + other.forward,
            sample=self.sample + other.sample,
            commit=self.commit + other.commit,
        )


class Stopwatch:
    """Times the phases of one step, each from the end of the one before."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """The phase of this name ends now."""
        now = time.perf_counter()
        self._laps[phase] = now - self._last
        self._last = now

    def phases(self) -> StepPhases:
        """What has been timed; phases that did not happen took no time."""
        return StepPhases(**self._laps)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges (now) and counters (since the start)."""

    scheduler: SchedulerStats
    forward_passes: int
    computed_tokens: int
    """Token rows that went through the decoder."""
    sampled_tokens: int
    failed_steps: int
    """Forward passes that raised."""
    all_steps: StepPhases
    """Summed over all steps."""
    last_step: StepPhases
