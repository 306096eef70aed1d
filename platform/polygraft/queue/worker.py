"""The worker's side of the queue. Synchronous: one thread steps the engine, makes one call here, and steps again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from polygraft.card import ModelCard
from polygraft.errors import ConfigError, PolygraftError
from polygraft.queue import keys, scripts
from polygraft.queue.codec import decode_job, encode
from polygraft.queue.limits import QueueLimits, milliseconds
from polygraft.queue.messages import Job, JobEvent, WorkerStatus

_LONGEST_PAUSE = 1.0
"""Seconds between two tries to reach Redis."""


class QueueUnavailable(PolygraftError):
    """Redis could not be reached for longer than an outage may last."""


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job leased to this worker. Its events count as long as the record names this worker and `attempt`."""

    job: Job
    attempt: int


@dataclass(frozen=True, slots=True)
class Emission:
    """One job's part in a publish: its event, or None to renew the lease only."""

    job: str
    attempt: int
    event: JobEvent | None = None


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What a worker learns when it publishes, as job ids."""

    cancelled: frozenset[str]
    """End these with a final event."""
    stale: frozenset[str]
    """Drop these without a word: they ended, or are another worker's."""
    work: bool
    """Jobs of this worker's model are queued."""


class WorkerQueue:
    """Not thread-safe: a heartbeat thread makes its own. Every method waits out a restart of Redis and raises
    QueueUnavailable when it stays away.
    """

    def __init__(self, url: str, worker_id: str, model: str, limits: QueueLimits | None = None) -> None:
        self.worker_id = worker_id
        self.model = model
        self._limits = limits if limits is not None else QueueLimits()
        tries = max(1, round(self._limits.outage / _LONGEST_PAUSE))
        self._redis = Redis.from_url(
            url,
            socket_timeout=5.0,
            socket_connect_timeout=2.0,
            retry=Retry(ExponentialBackoff(cap=_LONGEST_PAUSE, base=0.02), tries),
            protocol=2,
        )
        self._register = self._redis.register_script(scripts.source("register"))
        self._claim = self._redis.register_script(scripts.source("claim"))
        self._publish = self._redis.register_script(scripts.source("publish"))
        self._release = self._redis.register_script(scripts.source("release"))

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def register(self, card: ModelCard, status: WorkerStatus) -> None:
        """Announce the worker and its model. Raises ConfigError if a live worker serves another model by that name."""
        limits = self._limits
        timeless = msgspec.json.encode(msgspec.structs.replace(card, created=0))
        agreed = self._reached(
            self._register,
            [
                self.worker_id,
                self.model,
                timeless,
                card.created,
                encode(status),
                milliseconds(limits.worker_ttl),
                milliseconds(limits.card_ttl),
            ],
        )
        if not agreed:
            raise ConfigError(
                f"another live worker serves a different model as {self.model!r}; give this one another "
                "--served-model-name, or the same model, dtype and limits"
            )

    def heartbeat(self, status: WorkerStatus) -> None:
        """Stay among the live workers for another `worker_ttl` seconds."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.set(keys.WORKER + self.worker_id, encode(status), px=milliseconds(self._limits.worker_ttl))
        pipe.sadd(keys.WORKERS, self.worker_id)
        pipe.pexpire(keys.CARD + self.model, milliseconds(self._limits.card_ttl))
        try:
            pipe.execute()
        except (RedisError, OSError) as error:
            raise QueueUnavailable(f"the queue cannot be reached: {error}") from error

    def claim(self, count: int, nonce: str) -> list[ClaimedJob]:
        """Lease up to `count` jobs, tenants in turn. The same nonce again gives the same jobs."""
        limits = self._limits
        lease, record_ttl = milliseconds(limits.lease), milliseconds(limits.record_ttl)
        answer = self._reached(self._claim, [self.worker_id, self.model, nonce, count, lease, record_ttl])
        return [
            ClaimedJob(decode_job(payload), int(attempt))
            for attempt, payload in zip(answer[1::3], answer[2::3], strict=True)
        ]

    def publish(self, step_ended: float, emissions: Iterable[Emission]) -> Verdicts:
        """Append the events to their records and announce them: one call a step. Emissions without an event renew
        their job's lease.

        `step_ended` is in Unix seconds. An event with usage or error ends its job.
        """
        limits = self._limits
        told = list(emissions)
        arguments = [
            self.worker_id,
            self.model,
            step_ended,
            milliseconds(limits.lease),
            milliseconds(limits.record_ttl),
            encode([_row(emission) for emission in told]),
            *(b"" if emission.event is None else encode(emission.event) for emission in told),
        ]
        cancelled, stale, work = self._reached(self._publish, arguments)
        return Verdicts(
            frozenset(job.decode() for job in cancelled), frozenset(job.decode() for job in stale), bool(work)
        )

    def wait(self, timeout: float, *, work: bool = True) -> None:
        """Sleep until a job is queued (unless `work` is false), one of this worker's is cancelled, or `timeout`
        seconds (at most 2) have passed.
        """
        names = [keys.NUDGE + self.worker_id]
        if work:
            names.append(keys.WAKE + self.model)
        try:
            self._redis.blpop(names, timeout=min(timeout, 2.0))
        except (RedisError, OSError) as error:
            raise QueueUnavailable(f"the queue cannot be reached: {error}") from error

    def release(self, jobs: Sequence[ClaimedJob]) -> None:
        """Give back jobs of which nothing was published yet."""
        limits = self._limits
        arguments: list[Any] = [self.worker_id, milliseconds(limits.max_wait), milliseconds(limits.record_ttl)]
        for claimed in jobs:
            arguments += (claimed.job.id, claimed.attempt)
        if jobs:
            self._reached(self._release, arguments)

    def deregister(self) -> None:
        """Leave the live workers."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.delete(keys.WORKER + self.worker_id, keys.CLAIM + self.worker_id, keys.NUDGE + self.worker_id)
        pipe.srem(keys.WORKERS, self.worker_id)
        try:
            pipe.execute()
        except (RedisError, OSError) as error:
            raise QueueUnavailable(f"the queue cannot be reached: {error}") from error

    def _reached(self, script: Any, arguments: list[Any]) -> Any:
        try:
            return script(args=arguments)
        except (RedisError, OSError) as error:
            raise QueueUnavailable(f"the queue cannot be reached: {error}") from error


def _row(emission: Emission) -> tuple[object, ...]:
    event = emission.event
    if event is None:
        return (emission.job, emission.attempt, False, False)
    return (emission.job, emission.attempt, event.seq, event.final)
