"""A bound on how much of one heavy kind of work is done at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from polygraft.errors import unavailable


class Turns:
    """Lets `at_once` in; who has waited `patience` seconds for its turn is told to come back in as many."""

    def __init__(self, at_once: int, patience: float) -> None:
        self._turns = asyncio.Semaphore(at_once)
        self._patience = patience

    @asynccontextmanager
    async def one(self, what: str) -> AsyncIterator[None]:
        """A turn, to do `what`. Raises ApiError 503 overloaded."""
        try:
            async with asyncio.timeout(self._patience):
                await self._turns.acquire()
        except TimeoutError:
            raise unavailable(
                f"Too many others {what}; try again.", retry_after=max(1, round(self._patience))
            ) from None
        try:
            yield
        finally:
            self._turns.release()
