"""The adapters of the command line become versions under names, or all of them are refused together."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from polygraft.audit import Actor
from polygraft.blobs import BlobUnavailable
from polygraft.card import ModelCard
from polygraft.db import Database, Tenant
from polygraft.errors import ConfigError
from polygraft.registry import repository
from polygraft.registry.adapters import Adapters
from polygraft.registry.intake import Intake
from polygraft.registry.options import AdapterOption
from polygraft.registry.registration import register_options, retire_options, warnings_of
from polygraft.tenancy.request import Owner
from polygraft_adapters.types import AdapterError, AdapterInfo, ModuleShapes, Problem

from .fakes import Audited


class Blobs:
    """Remembers what was stored."""

    def __init__(self) -> None:
        self.stored: list[tuple[str, str]] = []

    def put_adapter(self, folder: Path, digest: str) -> None:
        self.stored.append((folder.name, digest))


def inspect(path: Path, modules: ModuleShapes, max_rank: int) -> AdapterInfo:
    """A folder's name decides: `bad…` is refused, else what precedes the dash is the content."""
    if path.name.startswith("bad"):
        raise AdapterError([Problem("q_proj", f"wrong in {path.name}"), Problem("r", f"rank 99 > limit {max_rank}")])
    content = path.name.partition("-")[0]
    return AdapterInfo(
        digest=f"sha256:{content}",
        rank=8,
        scale=2.0,
        targets=("q_proj",),
        size_bytes=100,
        base_model=None,
        warnings=("another base",) if content == "odd" else (),
    )


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


@pytest.fixture
async def register(database: Database, card: ModelCard, blobs: Blobs) -> Any:
    """register(name="folder", …) as the option list of one start."""
    async with database.transaction() as session:
        tenant = Tenant(name="default")
        session.add(tenant)

    async def start(**options: str) -> Any:
        listed = [AdapterOption(name, Path(folder)) for name, folder in options.items()]
        return await register_options(database, blobs, tenant.id, card, listed, inspect)

    start.tenant_id = tenant.id  # type: ignore[attr-defined]
    return start


async def served(database: Database, tenant_id: str) -> dict[str, tuple[int, str]]:
    async with database.transaction() as session:
        return {model.name: (model.version, model.digest) for model in await repository.own_models(session, tenant_id)}


async def test_a_disk_that_takes_no_adapter_is_told_by_the_adapters_name_and_nothing_is_registered(
    database: Database, register: Any, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, digest: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blobs, "put_adapter", full)
    with pytest.raises(BlobUnavailable, match=r"'pirate' cannot be stored: .*No space left"):
        await register(pirate="p")
    assert await served(database, register.tenant_id) == {}


async def test_names_serve_their_contents_which_are_stored_by_digest(
    database: Database, register: Any, blobs: Blobs
) -> None:
    await register(pirate="p", haiku="h")
    assert await served(database, register.tenant_id) == {"pirate": (1, "sha256:p"), "haiku": (1, "sha256:h")}
    assert blobs.stored == [("p", "sha256:p"), ("h", "sha256:h")]


async def test_the_same_contents_are_the_same_version_and_others_the_next(database: Database, register: Any) -> None:
    await register(a="x")
    await register(a="x-copy")
    assert await served(database, register.tenant_id) == {"a": (1, "sha256:x")}
    await register(a="y")
    assert await served(database, register.tenant_id) == {"a": (2, "sha256:y")}
    await register(a="x")
    assert await served(database, register.tenant_id) == {"a": (1, "sha256:x")}


async def test_an_adapter_lives_as_long_as_its_option(database: Database, register: Any) -> None:
    await register(a="x", b="y")
    await register(b="y")
    assert await served(database, register.tenant_id) == {"b": (1, "sha256:y")}
    await retire_options(database, register.tenant_id)
    assert await served(database, register.tenant_id) == {}
    await register(a="x")
    assert await served(database, register.tenant_id) == {"a": (1, "sha256:x")}


async def test_what_came_in_another_way_is_served_once_the_option_is_gone(
    database: Database, register: Any, intake: Intake, actor: Actor
) -> None:
    owner = Owner(register.tenant_id, "default")
    ticket = await intake.begin(owner, actor, "a", "base", "upload", None)
    await intake.ready(ticket, actor, inspect(Path("uploaded"), ModuleShapes(1, {}, "base"), 16))
    await register(a="x")
    assert await served(database, register.tenant_id) == {"a": (2, "sha256:x")}
    await retire_options(database, register.tenant_id)
    assert await served(database, register.tenant_id) == {"a": (1, "sha256:uploaded")}


async def test_an_option_brings_back_what_was_deleted(
    database: Database, register: Any, adapters: Adapters, actor: Actor
) -> None:
    await register(a="x")
    await adapters.delete(Owner(register.tenant_id, "default"), actor, "a")
    assert await served(database, register.tenant_id) == {}
    await register(a="x")
    assert await served(database, register.tenant_id) == {"a": (1, "sha256:x")}


async def test_only_changes_are_audited(database: Database, register: Any, audited: Audited) -> None:
    for _ in range(2):
        await register(a="x")
    for _ in range(2):
        await retire_options(database, register.tenant_id)
    assert await audited() == [
        ("adapter.option", {"name": "a", "version": 1, "digest": "sha256:x"}),
        ("adapter.retire", {"name": "a", "serves": None}),
    ]


async def test_gateways_that_start_at_once_agree(database: Database, register: Any) -> None:
    await asyncio.gather(*(register(a="x", b="y", c="z") for _ in range(4)))
    assert await served(database, register.tenant_id) == {
        "a": (1, "sha256:x"), "b": (1, "sha256:y"), "c": (1, "sha256:z"),
    }  # fmt: skip


async def test_every_bad_adapter_is_named_with_all_of_its_problems_and_none_is_registered(
    database: Database, register: Any, blobs: Blobs
) -> None:
    with pytest.raises(ConfigError) as caught:
        await register(good="g", one="bad1", two="bad2")
    for piece in ("'one'", "wrong in bad1", "'two'", "wrong in bad2", "rank 99 > limit 16"):
        assert piece in str(caught.value)
    assert "'good'" not in str(caught.value)
    assert await served(database, register.tenant_id) == {}
    assert blobs.stored == []


async def test_the_same_contents_under_two_names_are_served_with_a_warning(database: Database, register: Any) -> None:
    checked = await register(a="x", b="x-again", c="odd")
    assert set(await served(database, register.tenant_id)) == {"a", "b", "c"}
    assert warnings_of(checked) == ["c: another base", "b: the same contents as a"]
