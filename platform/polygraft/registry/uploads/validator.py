"""Checks that go on in the background, whoever waits for them, and after the gateway that began them has died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from polygraft.audit import SERVER, Actor
from polygraft.db import Database, now
from polygraft.errors import ApiError, PolygraftError
from polygraft.registry.intake import LEASE_SECONDS, Accepted, Intake, Ticket
from polygraft.registry.live import LiveModels
from polygraft.registry.uploads import repository
from polygraft.registry.uploads.staging import Staged, Staging
from polygraft.registry.validation import Check, CheckLimits
from polygraft_adapters.types import AdapterError, Problem

log = structlog.get_logger(__name__)

TAKEOVER_SECONDS = 5.0
SWEEP_SECONDS = 600.0
LONGEST_PAUSE = 120.0
"""Between rounds of which each fails in a way that nobody has foreseen."""
_TOLD = 3
GIVE_UP_AFTER = timedelta(hours=1)
"""Of trying to check a version: what has not worked by then, does not work the next time either."""
_LOST = "The server was stopped before it had all of the adapter; upload or import it again."
_GIVEN_UP = "The server could not check the adapter in all the time since it came; upload or import it again."

Fetch = Callable[[Path], Awaitable[None]]
"""Brings an adapter's files into the (new) folder. Raises AdapterError, and ApiError 503 where there is no room."""


class BlobSink(Protocol):
    """Where contents are kept by digest."""

    def put_adapter(self, folder: Path, digest: str) -> object:
        """Store the folder's files under the digest; no work if they are there. Blocks."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """What a version came to whose contents cannot be served."""

    problems: tuple[Problem, ...]

    @property
    def reason(self) -> str:
        """The first problems in a sentence."""
        told = "; ".join(str(problem) for problem in self.problems[:_TOLD])
        more = len(self.problems) - _TOLD
        return f"{told}; and {more} more" if more > 0 else told


Outcome = Accepted | Rejected


class Validator:
    """Owns every version that this gateway validates."""

    def __init__(
        self,
        database: Database,
        intake: Intake,
        live: LiveModels,
        blobs: BlobSink,
        staging: Staging,
        limits: CheckLimits,
        check: Check,
        *,
        parallel: int = 2,
    ) -> None:
        """`parallel` is how many checks run at once."""
        self._database = database
        self._intake = intake
        self._live = live
        self._blobs = blobs
        self._staging = staging
        self._limits = limits
        self._check = check
        self._checks = asyncio.Semaphore(parallel)
        self._running: dict[str, asyncio.Task[Outcome]] = {}

    def begin(
        self, ticket: Ticket, actor: Actor, staged: Staged, held: AsyncExitStack, fetch: Fetch | None = None
    ) -> asyncio.Task[Outcome]:
        """Validate what is in `staged`, after it was fetched there if it has to be. `held` is closed at the end, and
        goes with the folder. Whoever waits for the task may leave; it raises ApiError or SQLAlchemyError for what is
        not the adapter's fault.
        """
        task = asyncio.create_task(self._run(ticket, actor, staged, held, fetch))
        self._running[ticket.version_id] = task
        task.add_done_callback(lambda done: self._ended(ticket, done))
        return task

    def running(self, version_id: str) -> asyncio.Task[Outcome] | None:
        """What `begin` returned for the version, as long as it runs."""
        return self._running.get(version_id)

    async def keep_going(self) -> None:
        """Take over what dead gateways have left, and delete what nobody will come back for. Runs for ever."""
        swept, pause = -SWEEP_SECONDS, TAKEOVER_SECONDS
        while True:
            try:
                await self.take_over()
                if (moment := asyncio.get_running_loop().time()) >= swept + SWEEP_SECONDS:
                    await self.sweep()
                    swept = moment
                pause = TAKEOVER_SECONDS
            except (SQLAlchemyError, OSError) as error:
                log.warning("uploads_not_tended", error=str(error))
                pause = TAKEOVER_SECONDS
            except Exception:
                # The gateway answers requests without it: no reason to end.
                log.exception("uploads_not_tended")
                pause = min(2 * pause, LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def take_over(self) -> None:
        """Go on with the versions whose gateway has died, or fail them where their files are gone."""
        for ticket in await self._intake.abandoned():
            if ticket.version_id in self._running:
                continue
            staged = await self._staging.take(ticket.version_id)
            if staged is not None:
                log.info("validation_taken_over", name=ticket.name, version=ticket.version)
                held = AsyncExitStack()
                await held.enter_async_context(staged)
                self.begin(ticket, SERVER, staged, held)
            elif not await asyncio.to_thread(self._staging.exists, ticket.version_id):
                await self._intake.failed(ticket, SERVER, _LOST, [])

    async def sweep(self) -> None:
        """Delete expired uploads and the folders of nobody."""
        names = await asyncio.to_thread(self._staging.names)
        async with self._database.transaction() as session:
            await repository.remove_expired(session, now())
            wanted = await repository.wanted(session, names)
        await self._staging.sweep(set(names) - wanted)

    async def close(self) -> None:
        """Stop. What is not done yet is left for the next gateway."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, ticket: Ticket, actor: Actor, staged: Staged, held: AsyncExitStack, fetch: Fetch | None
    ) -> Outcome:
        async with held:
            try:
                async with self._leased(ticket):
                    outcome = await self._outcome(ticket, actor, staged, fetch)
            except Exception as error:
                if isinstance(error, ApiError) and error.status == 404:
                    # Nobody wants it any more.
                    await staged.remove()
                elif now() - ticket.begun > GIVE_UP_AFTER:
                    await self._intake.failed(ticket, SERVER, _GIVEN_UP, [])
                    await staged.remove()
                # Whatever else it is, the next one may have more luck.
                raise
            await staged.remove()
            return outcome

    async def _outcome(self, ticket: Ticket, actor: Actor, staged: Staged, fetch: Fetch | None) -> Outcome:
        try:
            if fetch is not None:
                await _fetched(fetch, staged)
                await staged.name_after(ticket.version_id)
            card = await self._live.card(ticket.base_model)
            archive = staged.archive if await asyncio.to_thread(staged.archive.exists) else None
            async with self._checks:
                info = await self._check(
                    staged.adapter, card, self._limits, archive=archive, converted=staged.converted
                )
        except AdapterError as error:
            rejected = Rejected(error.problems)
            await self._intake.failed(ticket, actor, rejected.reason, rejected.problems)
            return rejected
        checked = staged.converted if await asyncio.to_thread(staged.converted.exists) else staged.adapter
        await asyncio.to_thread(self._blobs.put_adapter, checked, info.digest)
        return await self._intake.ready(ticket, actor, info)

    @asynccontextmanager
    async def _leased(self, ticket: Ticket) -> AsyncIterator[None]:
        renewing = asyncio.create_task(self._renew(ticket))
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _renew(self, ticket: Ticket) -> None:
        while True:
            await asyncio.sleep(LEASE_SECONDS / 3)
            try:
                await self._intake.renew(ticket)
            except (SQLAlchemyError, OSError) as error:
                log.warning("lease_not_renewed", name=ticket.name, version=ticket.version, error=str(error))

    def _ended(self, ticket: Ticket, task: asyncio.Task[Outcome]) -> None:
        del self._running[ticket.version_id]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            expected = isinstance(error, (PolygraftError, SQLAlchemyError))
            log.error(
                "validation_broke_off",
                name=ticket.name,
                version=ticket.version,
                error=str(error),
                exc_info=None if expected else error,
            )


async def _fetched(fetch: Fetch, staged: Staged) -> None:
    """Raises AdapterError. What has no room is not asked for again by itself: that is for who asked for it."""
    await asyncio.to_thread(staged.adapter.mkdir)
    try:
        await fetch(staged.adapter)
    except ApiError as error:
        raise AdapterError([Problem("source", error.message, "import it again later")]) from error
