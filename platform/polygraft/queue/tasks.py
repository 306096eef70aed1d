"""What runs behind the gateway's queue."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)


class BackgroundTasks:
    """Keeps tasks referenced until they end, and remembers the first error that one dies of."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def whole(self) -> bool:
        """Whether none has died."""
        return not self._broken.done()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start one."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    async def end(self) -> None:
        """Cancel all of them and wait until they are gone."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def broken(self) -> None:
        """Wait until one dies, and raise what it died of."""
        await asyncio.shield(self._broken)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("queue_task_died", exc_info=error)
            if not self._broken.done():
                self._broken.set_exception(error)
