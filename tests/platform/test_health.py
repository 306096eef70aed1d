"""Ready means that a token can be produced now."""

from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from polygraft.db import Database
from polygraft.health import Health
from polygraft.registry.live import STALLED_SECONDS, LiveModels
from polygraft.registry.service import Registry


class Probe:
    """A Health over things that a test can break."""

    def __init__(self, database: Database, directory: Any) -> None:
        self.database_is_down = False
        self.directory = directory
        self.live = LiveModels(directory)
        self.registry = Registry(database, self.live)
        self.registry.complete = True
        self.health = Health(self.live, self.registry, self._ping)

    async def _ping(self) -> None:
        if self.database_is_down:
            raise OperationalError("SELECT 1", {}, Exception("down"))

    async def says(self) -> str | None:
        """Why it is not ready; None if it is."""
        await self.live.refresh()
        problem = await self.health.problem()
        if problem is None:
            return None
        assert problem.status == 503
        assert int(problem.headers["Retry-After"]) >= 1
        return problem.message


@pytest.fixture
def probe(database: Database, directory: Any) -> Probe:
    return Probe(database, directory)


async def test_ready_with_a_ready_worker(probe: Probe) -> None:
    assert await probe.says() is None


async def test_not_ready_while_the_model_loads(probe: Probe) -> None:
    probe.directory.worker("loading")
    assert await probe.says() == "The model is being loaded."


async def test_not_ready_before_the_first_look(probe: Probe) -> None:
    assert await probe.health.problem() is not None


async def test_not_ready_without_a_worker(probe: Probe) -> None:
    probe.directory.live = []
    assert await probe.says() == "No worker is there."


async def test_not_ready_while_the_step_loop_is_stuck(probe: Probe) -> None:
    probe.directory.worker(stalled=STALLED_SECONDS + 1)
    assert await probe.says() == "The worker makes no progress."
    probe.directory.worker(stalled=STALLED_SECONDS / 2)
    assert await probe.says() is None


async def test_not_ready_while_the_adapters_are_being_checked(probe: Probe) -> None:
    probe.registry.complete = False
    assert await probe.says() == "The adapters are being checked."


async def test_not_ready_without_the_queue_or_the_database(probe: Probe) -> None:
    probe.directory.away = True
    assert await probe.says() == "The queue does not answer."
    probe.directory.away = False
    probe.database_is_down = True
    assert await probe.says() == "The database does not answer."


async def test_not_ready_while_draining(probe: Probe) -> None:
    probe.health.draining = True
    assert await probe.says() == "The server is shutting down."
