"""What the heartbeat tells: written by the loop's thread, read by the heartbeat's."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Protocol

import structlog

from polygraft.queue.messages import LoadTimes, WorkerState, WorkerStatus
from polygraft.queue.worker import QueueUnavailable
from polygraft_engine.stats import EngineStats

log = structlog.get_logger(__name__)

_REFRESH_SECONDS = 0.25


class _HasStats(Protocol):
    def stats(self) -> EngineStats: ...


class Vitals:
    """The latest numbers; each field is replaced whole, so no lock is needed."""

    def __init__(self, worker_id: str, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.state: WorkerState = "loading"
        self._id = worker_id
        self._model = model
        self._clock = clock
        self._stats: EngineStats | None = None
        self._refreshed = clock()
        self._step_began: float | None = None
        self._steps = 0
        self._claimed = 0
        self._waited = 0.0
        self._loads = LoadTimes()

    def claimed(self, waited: float) -> None:
        """A job was taken that had waited this many seconds in the queue."""
        self._claimed += 1
        self._waited += waited

    def adapter_loaded(self, seconds: float) -> None:
        """An adapter was read into host memory, on the thread that does so."""
        self._loads += LoadTimes.of(seconds)

    def step_begins(self) -> None:
        """The engine starts to compute."""
        self._step_began = self._clock()

    def step_ends(self, engine: _HasStats) -> None:
        """The engine has computed a step."""
        self._step_began = None
        self._steps += 1
        if self._clock() - self._refreshed > _REFRESH_SECONDS:
            self.rests(engine)

    def rests(self, engine: _HasStats) -> None:
        """Read the engine's numbers anew."""
        self._stats = engine.stats()
        self._refreshed = self._clock()

    def status(self) -> WorkerStatus:
        """The heartbeat's content."""
        began, stats = self._step_began, self._stats
        scheduler = stats.scheduler if stats is not None else None
        return WorkerStatus(
            id=self._id,
            pid=os.getpid(),
            host=socket.gethostname(),
            model=self._model,
            state=self.state,
            running=scheduler.running if scheduler is not None else 0,
            waiting=scheduler.waiting if scheduler is not None else 0,
            kv_blocks_total=scheduler.blocks_total if scheduler is not None else 0,
            kv_blocks_free=scheduler.blocks_total - scheduler.blocks_used if scheduler is not None else 0,
            resident_adapters=scheduler.resident_adapters if scheduler is not None else (),
            last_seen=time.time(),
            stalled_seconds=0.0 if began is None else self._clock() - began,
            step_seconds=asdict(stats.all_steps) if stats is not None else {},
            steps=self._steps,
            adapter_loads=self._loads,
            metrics={**self._waits(), **(_metrics(stats) if stats is not None else {})},
        )

    def _waits(self) -> dict[str, float]:
        return {"jobs_claimed_total": self._claimed, "queue_wait_seconds_total": self._waited}


def _metrics(stats: EngineStats) -> dict[str, float]:
    scheduler = stats.scheduler
    return {
        "kv_blocks_cached": scheduler.blocks_cached,
        "preemptions_total": scheduler.preemptions,
        "prefix_cache_query_tokens_total": scheduler.prefix_query_tokens,
        "prefix_cache_hit_tokens_total": scheduler.prefix_hit_tokens,
        "adapter_loads_total": scheduler.slot_loads,
        "adapter_evictions_total": scheduler.slot_evictions,
        "computed_tokens_total": stats.computed_tokens,
        "sampled_tokens_total": stats.sampled_tokens,
        "failed_steps_total": stats.failed_steps,
    }


class Heartbeat:
    """A thread that calls `beat` with the status, again and again, until `stop`."""

    def __init__(self, vitals: Vitals, beat: Callable[[WorkerStatus], None], every: float) -> None:
        self._vitals = vitals
        self._beat = beat
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for it a little: it may be waiting for a server that is gone."""
        self._stop.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._beat(self._vitals.status())
            except QueueUnavailable as error:
                log.warning("no_heartbeat", error=str(error))
