"""Which base models there are and who serves them, as the queue's directory tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from polygraft.card import ModelCard
from polygraft.errors import ApiError
from polygraft.queue.messages import WorkerStatus

log = structlog.get_logger(__name__)

REFRESH_SECONDS = 0.5
STALLED_SECONDS = 30.0
"""A worker whose present step has run this long with work waiting is stuck: longer than the longest honest step."""


class DirectorySource(Protocol):
    """The part of the queue that is read here."""

    async def cards(self) -> dict[str, ModelCard]:
        """Cards by model name."""

    async def workers(self) -> list[WorkerStatus]:
        """The live workers."""

    async def depth(self) -> int:
        """Jobs that wait."""

    async def ping(self) -> bool:
        """Whether Redis answers and its news arrive."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was known at one moment. `reachable` is False when the queue did not answer; the rest is then old."""

    reachable: bool
    cards: dict[str, ModelCard]
    workers: Sequence[WorkerStatus]
    queued: int

    def serving(self, model: str) -> bool:
        """Whether some worker can produce tokens of `model` now."""
        return any(
            worker.model == model and worker.state == "ready" and worker.stalled_seconds < STALLED_SECONDS
            for worker in self.workers
        )

    def ready_models(self) -> list[str]:
        """The models that can produce tokens now."""
        return [model for model in self.cards if self.serving(model)]


class LiveModels:
    """Keeps a snapshot fresh, so that a request waits for no directory."""

    def __init__(self, source: DirectorySource) -> None:
        self._source = source
        self.now = Snapshot(reachable=False, cards={}, workers=(), queued=0)
        self._changed = asyncio.Condition()

    async def refresh(self) -> Snapshot:
        """Read the directory. Never raises for a queue that is away: the snapshot says so."""
        try:
            cards, workers, queued = await asyncio.gather(
                self._source.cards(), self._source.workers(), self._source.depth()
            )
            reachable = await self._source.ping()
        except ApiError as error:
            if self.now.reachable:
                log.warning("queue_unreachable", error=error.message)
            self.now = Snapshot(reachable=False, cards=self.now.cards, workers=(), queued=self.now.queued)
        else:
            self.now = Snapshot(reachable=reachable, cards=cards, workers=workers, queued=queued)
        async with self._changed:
            self._changed.notify_all()
        return self.now

    async def card(self, model: str) -> ModelCard:
        """The model's card, as soon as a worker has registered it."""
        async with self._changed:
            await self._changed.wait_for(lambda: model in self.now.cards)
        return self.now.cards[model]

    async def keep_fresh(self) -> None:
        """Refresh for ever."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_SECONDS)
