"""The gateway's ear: what workers publish to it, and what gateways announce to one another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from polygraft.queue import keys
from polygraft.queue.codec import decode_change, decode_step
from polygraft.queue.messages import AccessChange, StepMessage

log = structlog.get_logger(__name__)

Heard = Callable[[AccessChange], None]


class Listener:
    """Hands on what it hears: a step's news to `news`, announcements to `heard`. `subscribed` is called after each
    subscription, as something may have been missed before it.
    """

    def __init__(
        self,
        redis: Redis,
        gateway_id: str,
        *,
        news: Callable[[StepMessage], None],
        heard: Heard,
        subscribed: Callable[[], None],
    ) -> None:
        self._redis = redis
        self._channel = keys.CHANNEL + gateway_id
        self._news = news
        self._heard = heard
        self._subscribed = subscribed
        self._closed = False

    def close(self) -> None:
        """Have `listen` return within a second, for a cancellation that meets a timeout inside the client is swallowed
        there.
        """
        self._closed = True

    async def listen(self) -> None:
        """Listen until closed, over broken connections too."""
        pubsub = self._redis.pubsub()
        while not self._closed:
            try:
                if not pubsub.subscribed:
                    await pubsub.subscribe(self._channel, keys.REVOKED)
                message = await pubsub.get_message(timeout=1.0)
            except (RedisError, OSError) as error:
                log.warning("queue_connection_lost", error=repr(error))
                await asyncio.sleep(0.1)
                continue
            if message is None:
                continue
            if message["type"] == "subscribe":
                self._subscribed()
            elif message["type"] == "message" and message["channel"] == keys.REVOKED.encode():
                self._hear(message["data"])
            elif message["type"] == "message":
                self._news(decode_step(message["data"]))
                # The streams write first: asking for the next message takes redis-py as long as several of them.
                await asyncio.sleep(0)

    def _hear(self, data: bytes) -> None:
        try:
            change = decode_change(data)
        except msgspec.DecodeError as error:
            # A newer gateway may announce what this one does not know; it must not take the news of jobs down with it.
            log.warning("announcement_not_understood", error=repr(error))
            return
        self._heard(change)
