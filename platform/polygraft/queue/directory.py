"""Which models and workers there are."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, cast

import msgspec
from redis.asyncio import Redis

from polygraft.card import ModelCard
from polygraft.queue import keys
from polygraft.queue.codec import decode_card, decode_status
from polygraft.queue.messages import WorkerStatus


class Directory:
    """Reads what the workers registered. Raises redis errors as they come."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def cards(self) -> dict[str, ModelCard]:
        """Cards by model name, of every model that has or lately had a live worker."""
        cards: dict[str, ModelCard] = {}
        for name in await self._names(keys.CARDS):
            fields = cast("Awaitable[list[bytes | None]]", self._redis.hmget(keys.CARD + name, ["card", "created"]))
            card, created = await fields
            if card is not None and created is not None:
                cards[name] = msgspec.structs.replace(decode_card(card), created=int(created))
        return cards

    async def workers(self) -> list[WorkerStatus]:
        """The latest heartbeat of every live worker."""
        names = await self._names(keys.WORKERS)
        if not names:
            return []
        found: list[Any] = await self._redis.mget([keys.WORKER + name for name in names])
        return [decode_status(status) for status in found if status is not None]

    async def depth(self) -> int:
        """How many jobs are queued."""
        return int(await self._redis.zcard(keys.QUEUED))

    async def _names(self, key: str) -> list[str]:
        members = await cast("Awaitable[set[bytes]]", self._redis.smembers(key))
        return sorted(member.decode() for member in members)
