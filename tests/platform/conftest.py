"""A registry database of its own for each test, a real server behind the queue, and a queue's directory that says
what it is told.
"""

import logging
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
import structlog

from polygraft.card import ModelCard
from polygraft.db import Base, Database, sqlite_url
from polygraft.errors import unavailable
from polygraft.queue.messages import LoadTimes, WorkerState, WorkerStatus
from polygraft.valkey import PrivateValkey
from polygraft_adapters.types import ModuleShapes


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """An empty registry in SQLite."""
    database = Database(sqlite_url(tmp_path / "registry.db"))
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield database
    await database.close()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
async def any_database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """An empty registry in each of the supported databases."""
    postgres = request.param == "postgresql"
    database = Database(request.getfixturevalue("postgres_url") if postgres else sqlite_url(tmp_path / "registry.db"))
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield database
    await database.close()


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[PrivateValkey]:
    """One server for the whole session, on a short path."""
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        server = PrivateValkey(Path(folder))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def valkey(valkey_server: PrivateValkey) -> str:
    """The URL of an empty, running server."""
    with redis.Redis.from_url(valkey_server.url) as client:
        client.flushall()
        client.script_flush()
    return valkey_server.url


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """Put back what a test configured for the whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def card() -> ModelCard:
    """A small model of the name `base`."""
    return ModelCard(
        name="base",
        created=1,
        max_model_len=128,
        max_context=64,
        vocab_size=10,
        eos_token_ids=(2,),
        bos_token=None,
        eos_token=None,
        chat_template=None,
        tokenizer="sha256:0",
        modules=ModuleShapes(layers=1, shapes={"q_proj": (4, 4)}, base_model="base"),
        max_loras=4,
        max_lora_rank=16,
        numerics_id="n",
    )


@dataclass
class FakeDirectory:
    """What the queue's directory answers."""

    known: dict[str, ModelCard]
    live: list[WorkerStatus] = field(default_factory=list)
    away: bool = False

    def worker(self, state: WorkerState = "ready", *, stalled: float = 0.0, **metrics: float) -> None:
        """Have one worker of the model `base`, in this state."""
        self.live = [
            WorkerStatus(
                id="worker-1",
                pid=1,
                host="h",
                model="base",
                state=state,
                running=2,
                waiting=1,
                kv_blocks_total=8,
                kv_blocks_free=6,
                resident_adapters=("sha256:a",),
                last_seen=0.0,
                stalled_seconds=stalled,
                steps=5,
                adapter_loads=LoadTimes.of(0.05) + LoadTimes.of(0.25),
                step_seconds={"forward": 0.4, "sample": 0.1},
                metrics=metrics,
            )
        ]

    async def cards(self) -> dict[str, ModelCard]:
        """The known cards; raises while the queue is away."""
        if self.away:
            raise unavailable("The queue cannot be reached.")
        return self.known

    async def workers(self) -> list[WorkerStatus]:
        """The live workers."""
        return self.live

    async def depth(self) -> int:
        """Three jobs wait."""
        return 3

    async def ping(self) -> bool:
        """Whether the queue is there."""
        return not self.away


@pytest.fixture
def directory(card: ModelCard) -> FakeDirectory:
    """The model `base` with one ready worker."""
    directory = FakeDirectory({card.name: card})
    directory.worker()
    return directory
