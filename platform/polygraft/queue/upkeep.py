"""What background work asks of the queue."""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from polygraft.queue import keys, scripts
from polygraft.queue.limits import milliseconds

_AT_ONCE = 32
"""Payloads read in one call: a long prompt makes a large one."""


class _Named(msgspec.Struct):
    """The part of a Job that tells its adapter."""

    adapter: str | None


_decode = msgspec.msgpack.Decoder(_Named).decode


class Upkeep:
    """Whose turn a task is, and which adapters jobs name. Raises redis errors as they come."""

    def __init__(self, redis: Redis, gateway_id: str) -> None:
        self._redis = redis
        self._gateway_id = gateway_id
        self._lease = redis.register_script(scripts.source("lease"))

    async def lease(self, task: str, seconds: float) -> bool:
        """Have the task, or go on having it, for so long; False while another gateway has it."""
        return bool(await self._lease(args=[task, self._gateway_id, milliseconds(seconds)]))

    async def adapters_in_jobs(self) -> set[str]:
        """The digests of the adapters that queued and running jobs compute with."""
        # In one transaction, so that a job that is claimed meanwhile is in one of them.
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrange(keys.QUEUED, 0, -1)
            pipe.zrange(keys.RUNNING, 0, -1)
            queued, running = await pipe.execute()
        ids = [*queued, *running]
        found: set[str] = set()
        for start in range(0, len(ids), _AT_ONCE):
            async with self._redis.pipeline(transaction=False) as pipe:
                for id in ids[start : start + _AT_ONCE]:
                    pipe.hget(keys.JOB + id.decode(), "payload")
                payloads = await pipe.execute()
            named = [_decode(payload).adapter for payload in payloads if payload is not None]
            found.update(digest for digest in named if digest is not None)
        return found
