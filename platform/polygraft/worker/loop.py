"""The worker's loop: claim, add, step, publish. One thread; Redis is spoken to between steps."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any, Protocol

import structlog
from tokenizers import Tokenizer

from polygraft.queue.messages import JobError
from polygraft.queue.worker import ClaimedJob, Emission, Verdicts
from polygraft.worker.adapters import HostAdapters
from polygraft.worker.jobs import FAILED, STOPPED, RunningJob, broken_adapter, overflow, refusal, unprepared
from polygraft.worker.vitals import Vitals
from polygraft_engine.stats import EngineStats
from polygraft_engine.types import Generation, InvalidRequest, StepOutput

log = structlog.get_logger(__name__)

_AHEAD = 4
"""Jobs claimed beyond what the engine runs at once, so that their adapters are here when their turn comes."""
_RENEW_SECONDS = 1.0


class EngineLike(Protocol):
    """What the loop needs of an engine."""

    @property
    def has_work(self) -> bool: ...
    def add(self, generation: Generation) -> None: ...
    def cancel(self, id: str) -> bool: ...
    def step(self) -> list[StepOutput]: ...
    def stats(self) -> EngineStats: ...
    def check(self) -> None: ...


class Queue(Protocol):
    """The queue's side that the loop uses; see queue.worker.WorkerQueue."""

    def claim(self, count: int, nonce: str) -> list[ClaimedJob]: ...
    def publish(self, step_ended: float, emissions: Iterable[Emission]) -> Verdicts: ...
    def wait(self, timeout: float, *, work: bool = True) -> None: ...
    def release(self, jobs: list[ClaimedJob]) -> None: ...


class WorkerLoop:
    """Owns the jobs this worker holds. `turn` does one round; `drain` ends what runs."""

    def __init__(
        self,
        queue: Queue,
        engine: EngineLike,
        adapters: HostAdapters[Any],
        tokenizer: Tokenizer,
        vitals: Vitals,
        max_num_seqs: int,
        idle_seconds: float = 1.0,
    ) -> None:
        self._queue = queue
        self._engine = engine
        self._adapters = adapters
        self._tokenizer = tokenizer
        self._vitals = vitals
        self._idle_seconds = idle_seconds
        self._room_for = max_num_seqs + _AHEAD
        self._jobs: dict[str, RunningJob] = {}
        """Jobs held, oldest first."""
        self._by_generation: dict[str, RunningJob] = {}
        """Those in the engine."""
        self._pinned: set[str] = set()
        """Jobs that have acquired their adapter."""
        self._outbox: list[Emission] = []
        self._work_queued = True
        self._renewed = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether any job is held or any event is still to be published."""
        return bool(self._jobs or self._outbox)

    @property
    def _renewal_due(self) -> bool:
        return time.monotonic() - self._renewed > _RENEW_SECONDS

    def turn(self) -> None:
        """One round: take jobs if there is room, step if there is something to compute, else wait for either.

        Raises QueueUnavailable when Redis stays away, and what the engine's own faults raise; all jobs have been
        failed by then.
        """
        self._claim()
        self._start()
        stepping = self._engine.has_work
        step_ended = self._step()
        # After every step, said anything or not: this is also how the worker hears of cancels and of new work.
        if stepping or self._outbox or self._renewal_due:
            self._publish(step_ended)
        if not self._engine.has_work and not self._outbox:
            self._rest()

    def drain(self, deadline: float) -> None:
        """Claim nothing more, give back what was not begun, run the rest until `deadline` (monotonic), fail what is
        left.
        """
        unbegun = [job for job in self._jobs.values() if not job.started]
        self._queue.release([job.claimed for job in unbegun])
        for job in unbegun:
            self._forget(job)
        while self._jobs and time.monotonic() < deadline:
            step_ended = self._step()
            self._publish(step_ended)
        self.fail_all(STOPPED)

    def fail_all(self, error: JobError) -> None:
        """End every job held with this error."""
        for job in list(self._jobs.values()):
            self._send(job, job.fail(error))
        if self._outbox:
            self._publish(time.time())

    # one round

    def _claim(self) -> None:
        room = self._room_for - sum(len(job.choices) for job in self._jobs.values())
        if room <= 0 or not self._work_queued:
            return
        claimed = self._queue.claim(room, uuid.uuid4().hex)
        self._work_queued = bool(claimed)
        for each in claimed:
            self._vitals.claimed(max(0.0, time.time() - each.job.submitted_at))
            try:
                self._jobs[each.job.id] = RunningJob.prepare(each, self._tokenizer)
            except Exception:
                # Whatever is wrong with one job is not to end the others, nor the next worker that would claim it.
                log.exception("job_not_prepared", job=each.job.id)
                self._outbox.append(unprepared(each))

    def _start(self) -> None:
        """Hand to the engine every job whose adapter is in host memory."""
        for job in [job for job in self._jobs.values() if not job.started]:
            if self._adapter_ready(job):
                self._add(job)

    def _adapter_ready(self, job: RunningJob) -> bool:
        digest = job.claimed.job.adapter
        if digest is None:
            return True
        if job.id not in self._pinned:
            if not self._adapters.acquire(digest):
                return False
            self._pinned.add(job.id)
        return self._adapters.loaded(digest)

    def _add(self, job: RunningJob) -> None:
        digest = job.claimed.job.adapter
        if digest is not None and (failure := self._adapters.failure(digest)) is not None:
            log.error("adapter_not_loaded", job=job.id, adapter=digest, error=str(failure))
            self._send(job, job.fail(broken_adapter(job.claimed.job.adapter_name, failure)))
            return
        try:
            for generation in job.generations:
                self._engine.add(generation)
                self._by_generation[generation.id] = job
        except InvalidRequest as error:
            log.info("job_refused", job=job.id, param=error.param, code=error.code)
            self._send(job, job.fail(refusal(error)))
        except Exception:
            log.exception("job_not_added", job=job.id)
            self._send(job, job.fail(FAILED))
        else:
            job.started = True

    def _step(self) -> float:
        """Compute one step if there is work; when it ended (Unix seconds)."""
        if not self._engine.has_work:
            return time.time()
        self._vitals.step_begins()
        try:
            outputs = self._engine.step()
        except Exception:
            self.fail_all(FAILED)
            raise
        finally:
            self._vitals.step_ends(self._engine)
        step_ended = time.time()
        touched: dict[str, RunningJob] = {}
        for output in outputs:
            job = self._by_generation.get(output.id)
            if job is None:
                continue
            if output.error is not None:
                log.error("job_failed", job=job.id, error=output.error)
                self._send(job, job.fail(self._blame(job, output)))
            elif self._push(job, output):
                touched[job.id] = job
        for job in touched.values():
            if job.id in self._jobs and (emission := job.take()) is not None:
                self._send(job, emission)
        return step_ended

    def _blame(self, job: RunningJob, output: StepOutput) -> JobError:
        return overflow(job.claimed.job.adapter_name) if output.not_finite else FAILED

    def _push(self, job: RunningJob, output: StepOutput) -> bool:
        """Turn tokens into text; False if that failed, and the job with it."""
        try:
            ended_by_text = job.push(output)
        except Exception:
            log.exception("job_output_failed", job=job.id)
            self._send(job, job.fail(FAILED))
            return False
        if ended_by_text:
            self._engine.cancel(output.id)
        return True

    def _publish(self, step_ended: float) -> None:
        """Send what has gathered; act on what is to be cancelled, with the next publish right behind."""
        while True:
            emissions, self._outbox = self._outbox, []
            if self._renewal_due:
                self._renewed = time.monotonic()
                emissions += [job.keep() for job in self._jobs.values()]
            verdicts = self._queue.publish(step_ended, emissions)
            self._work_queued = verdicts.work
            for id in verdicts.stale:
                if (stale := self._jobs.get(id)) is not None:
                    log.warning("job_was_taken_away", job=id)
                    self._forget(stale)
            for id in verdicts.cancelled:
                if (cancelled := self._jobs.get(id)) is not None:
                    self._send(cancelled, cancelled.abort())
            if not self._outbox:
                return

    def _rest(self) -> None:
        """Nothing to compute: wait for an adapter, or for a job or a cancel."""
        self._vitals.rests(self._engine)
        loading = {
            digest
            for job in self._jobs.values()
            if job.id in self._pinned and not job.started and (digest := job.claimed.job.adapter) is not None
        }
        if loading:
            self._adapters.wait(loading, 0.1)
        elif not self._work_queued:
            self._queue.wait(self._idle_seconds)
        self._work_queued = True

    # what becomes of a job

    def _send(self, job: RunningJob, emission: Emission) -> None:
        self._outbox.append(emission)
        if job.ended:
            self._forget(job)

    def _forget(self, job: RunningJob) -> None:
        """Free what the job holds in the engine and in host memory."""
        for generation in job.generations:
            if self._by_generation.pop(generation.id, None) is not None:
                self._engine.cancel(generation.id)
        del self._jobs[job.id]
        if job.id in self._pinned:
            self._pinned.remove(job.id)
            assert job.claimed.job.adapter is not None
            self._adapters.release(job.claimed.job.adapter)

    def check(self) -> None:
        """Assert that nothing is held for a job that is not here, and the parts' own invariants."""
        assert self._pinned <= set(self._jobs)
        assert {job.id for job in self._by_generation.values()} <= set(self._jobs)
        self._adapters.check()
        self._engine.check()
