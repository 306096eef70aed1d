"""The gateway's side of the queue: submits jobs, hands out their news, and cleans up after the dead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import OutOfMemoryError, RedisError

from polygraft.card import ModelCard
from polygraft.errors import ApiError, unavailable
from polygraft.queue import keys, scripts
from polygraft.queue.codec import decode_event, encode
from polygraft.queue.directory import Directory
from polygraft.queue.limits import QueueLimits, milliseconds
from polygraft.queue.listener import Heard, Listener
from polygraft.queue.messages import AccessChange, Job, JobError, StepMessage, Usage, WorkerStatus
from polygraft.queue.stream import Arrived, JobStream
from polygraft.queue.tasks import BackgroundTasks
from polygraft.queue.upkeep import Upkeep

__all__ = ["Arrived", "GatewayQueue", "JobStream"]

log = structlog.get_logger(__name__)

T = TypeVar("T")

_LOST = JobError(
    status=503,
    type="service_unavailable_error",
    code="dependency_unavailable",
    message="The queue lost track of this request; try again.",
)


_STOPPING = JobError(
    status=503,
    type="service_unavailable_error",
    code="overloaded",
    message="The server is shutting down and this request was not done in time; try again.",
)


class GatewayQueue:
    """One per gateway process. `connect` makes one, `close` ends it.

    Two tasks run behind it: the Listener's, whose news are delivered to the streams; and one that beats the heart,
    reaps, and sees to the streams that heard nothing for a while, so that none waits for ever.
    """

    def __init__(self, redis: Redis, gateway_id: str, limits: QueueLimits, heard: Heard) -> None:
        self.gateway_id = gateway_id
        self._redis = redis
        self._limits = limits
        self._directory = Directory(redis)
        self._upkeep = Upkeep(redis, gateway_id)
        self._streams: dict[str, JobStream] = {}
        self._to_cancel: set[str] = set()
        """Jobs to cancel of which Redis has not been told yet."""
        self._tasks = BackgroundTasks()
        self._closed = False
        self._subscribed = asyncio.Event()
        self._listener = Listener(redis, gateway_id, news=self._deliver, heard=heard, subscribed=self._on_subscribed)
        self._submit = redis.register_script(scripts.source("submit"))
        self._cancel = redis.register_script(scripts.source("cancel"))
        self._reap = redis.register_script(scripts.source("reap"))

    @classmethod
    async def connect(
        cls, url: str, gateway_id: str, limits: QueueLimits | None = None, *, heard: Heard = lambda _: None
    ) -> GatewayQueue:
        """Connect, subscribe and beat once; `heard` is called with every AccessChange that a gateway announces.

        Raises ApiError 503 if Redis cannot be reached.
        """
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=32,
            timeout=5.0,
            socket_timeout=5.0,
            socket_connect_timeout=2.0,
            health_check_interval=10,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.02), 3),
            protocol=2,
        )
        queue = cls(Redis.from_pool(pool), gateway_id, limits if limits is not None else QueueLimits(), heard)
        try:
            await queue._beat()
            queue._tasks.spawn(queue._listener.listen())
            async with asyncio.timeout(10.0):
                await queue._subscribed.wait()
        except (RedisError, OSError) as error:
            await queue.close()
            raise _unreachable() from error
        queue._tasks.spawn(queue._maintain())
        return queue

    async def close(self) -> None:
        """Cancel what still runs for this gateway, and leave. Open streams end with an error."""
        # The loops look at this too: a cancellation that meets a timeout inside the client is swallowed there.
        self._closed = True
        self._listener.close()
        for stream in list(self._streams.values()):
            self._give_up(stream, _STOPPING)
        await self._send_cancels()
        await self._tasks.end()
        await self._redis.aclose()

    async def open(self, job: Job, *, used: Callable[[Usage], None] = lambda _: None) -> JobStream:
        """Queue the job. `used` is called once when it has ended, even if nobody reads its stream any more; never if it
        failed. Raises ApiError 503: `overloaded` if too many wait, `dependency_unavailable` without Redis.
        """
        stream = JobStream(job, self._cancel_stream, used)
        self._streams[job.id] = stream
        answer = b"unknown"
        try:
            answer = await self._reached(
                self._submit(
                    args=[
                        job.id,
                        encode(job),
                        job.model,
                        job.tenant,
                        job.gateway,
                        len(job.prompts) * job.params.n,
                        milliseconds(job.deadline) if job.deadline is not None else 0,
                        self._limits.max_queued,
                        milliseconds(self._limits.max_wait),
                    ]
                )
            )
        finally:
            if answer in (b"unknown", b"full"):
                del self._streams[job.id]
            if answer == b"unknown":
                # It may have been queued before the connection broke or this call was cancelled.
                self._to_cancel.add(job.id)
        if answer == b"full":
            raise unavailable(f"{self._limits.max_queued} requests are waiting already.", retry_after=2)
        stream.submitted = True
        return stream

    def end(self, stream: JobStream, error: JobError) -> None:
        """End a stream with `error` for its reader and cancel its job; nothing for one that has ended."""
        if not stream.ended:
            stream.interrupt(error)
            self._to_cancel.add(stream.job.id)
            self._tasks.spawn(self._send_cancels())

    async def announce(self, change: AccessChange) -> None:
        """Tell every gateway. Raises ApiError 503 without Redis."""
        await self._reached(self._redis.publish(keys.REVOKED, encode(change)))

    async def cards(self) -> dict[str, ModelCard]:
        """Every model known, by name: those with a live worker, ready or not, or that had one within a minute."""
        return await self._reached(self._directory.cards())

    async def workers(self) -> list[WorkerStatus]:
        """The live workers."""
        return await self._reached(self._directory.workers())

    async def depth(self) -> int:
        """How many jobs wait, of all models and tenants."""
        return await self._reached(self._directory.depth())

    async def lease(self, task: str, seconds: float) -> bool:
        """Have a background task, or go on having it, for so long; False while another gateway has it."""
        return await self._reached(self._upkeep.lease(task, seconds))

    async def adapters_in_jobs(self) -> set[str]:
        """The digests of the adapters that queued and running jobs compute with."""
        return await self._reached(self._upkeep.adapters_in_jobs())

    async def ping(self) -> bool:
        """Whether Redis answers and this gateway hears its news."""
        try:
            return bool(await self._redis.ping()) and self._tasks.whole
        except (RedisError, OSError):
            return False

    async def broken(self) -> None:
        """Wait until a task behind this dies, and raise what it died of. Only a new process is of use then."""
        await self._tasks.broken()

    async def _reached(self, call: Awaitable[T]) -> T:
        """The call's answer, or ApiError 503."""
        try:
            return await call
        except OutOfMemoryError as error:
            raise unavailable("The queue is out of memory.", retry_after=5) from error
        except (RedisError, OSError) as error:
            log.warning("queue_call_failed", error=repr(error))
            raise _unreachable() from error

    # Behind it

    def _on_subscribed(self) -> None:
        self._subscribed.set()
        for stream in self._streams.values():
            self._catch_up(stream)

    def _deliver(self, step: StepMessage) -> None:
        for event in step.events:
            if (found := self._streams.get(event.job)) is not None:
                found.deliver((event,), step.step_ended)
                self._after_delivery(found)

    def _after_delivery(self, stream: JobStream) -> None:
        if stream.ended:
            self._streams.pop(stream.job.id, None)
            self._to_cancel.discard(stream.job.id)
        elif stream.behind:
            self._catch_up(stream)

    def _catch_up(self, stream: JobStream) -> None:
        if stream.submitted and not stream.reading:
            stream.reading = True
            self._tasks.spawn(self._read_record(stream))

    async def _read_record(self, stream: JobStream) -> None:
        """Deliver what the record has beyond what the stream has, until nothing is missing."""
        job = stream.job.id
        try:
            while not stream.ended:
                stream.behind = False
                async with self._redis.pipeline(transaction=True) as pipe:
                    pipe.hget(keys.JOB + job, "state")
                    pipe.lrange(keys.EVENTS + job, stream.next_seq, -1)
                    state, events = await pipe.execute()
                stream.deliver([decode_event(event) for event in events], None)
                if not stream.ended and state in (None, b"done"):
                    log.warning("job_lost", job=job, state=state)
                    self._give_up(stream)
                if not stream.behind:
                    break
        except (RedisError, OSError) as error:
            stream.behind = True
            log.warning("record_unread", job=job, error=repr(error))
        finally:
            stream.reading = False
        if stream.ended:
            self._after_delivery(stream)

    def _give_up(self, stream: JobStream, error: JobError = _LOST) -> None:
        """End a stream whose job cannot be followed any more."""
        stream.fail(error)
        self._after_delivery(stream)
        self._to_cancel.add(stream.job.id)

    async def _maintain(self) -> None:
        reached = time.monotonic()
        while not self._closed:
            await asyncio.sleep(self._limits.beat)
            try:
                await self._beat()
            except (RedisError, OSError) as error:
                log.warning("no_heartbeat", error=repr(error))
                if time.monotonic() - reached > self._limits.outage:
                    for stream in list(self._streams.values()):
                        self._give_up(stream)
                continue
            reached = time.monotonic()
            await self._send_cancels()
            for stream in list(self._streams.values()):
                if stream.behind or reached - stream.heard > self._limits.quiet:
                    self._catch_up(stream)

    async def _beat(self) -> None:
        limits = self._limits
        await self._reap(
            args=[
                self.gateway_id,
                milliseconds(limits.gateway_ttl),
                milliseconds(limits.worker_ttl),
                limits.max_losses,
                milliseconds(limits.max_wait),
                milliseconds(limits.record_ttl),
            ]
        )

    async def _cancel_stream(self, stream: JobStream) -> None:
        self._to_cancel.add(stream.job.id)
        # A task of its own: the caller is often being cancelled itself.
        await asyncio.shield(self._tasks.spawn(self._send_cancels()))

    async def _send_cancels(self) -> None:
        """Tell Redis what to cancel; what could not be told is tried again with the next heartbeat."""
        while self._to_cancel:
            job = self._to_cancel.pop()
            try:
                await self._cancel(args=[job, milliseconds(self._limits.record_ttl)])
            except (RedisError, OSError) as error:
                self._to_cancel.add(job)
                log.warning("cancel_not_sent", job=job, error=repr(error))
                return


def _unreachable() -> ApiError:
    return unavailable("The queue cannot be reached.", code="dependency_unavailable", retry_after=2)
