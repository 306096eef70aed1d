"""Validation goes on behind the answers, and after the gateway that began it has died."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update
from tests.platform.registry.fakes import ACTOR

from polygraft.blobs import BlobStore
from polygraft.card import ModelCard
from polygraft.db import AdapterVersion, Database, now
from polygraft.errors import ApiError, unavailable
from polygraft.registry.adapters import Adapters
from polygraft.registry.intake import Intake, Ticket
from polygraft.registry.live import LiveModels
from polygraft.registry.uploads import service, validator
from polygraft.registry.uploads.assembly import Receiving, assemble
from polygraft.registry.uploads.staging import Staging
from polygraft.registry.uploads.validator import GIVE_UP_AFTER, Validator
from polygraft.registry.validation import CheckLimits
from polygraft.tenancy.request import Owner
from polygraft_adapters.types import AdapterInfo

from .conftest import check_here
from .making import PATH, Send, eventually, files, zip_of

Shown = Callable[[str], Awaitable[Any]]


class Held:
    """A check that waits to be let go, and may fail."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.failure: Exception | None = None
        self.running = 0
        self.most = 0

    async def runs(self, number: int) -> bool:
        return self.running == number

    async def __call__(
        self,
        folder: Path,
        card: ModelCard,
        limits: CheckLimits,
        *,
        archive: Path | None = None,
        converted: Path | None = None,
    ) -> AdapterInfo:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.go.wait()
            if self.failure is not None:
                raise self.failure
            return await check_here(folder, card, limits, archive=archive, converted=converted)
        finally:
            self.running -= 1


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
async def receiving(database: Database, intake: Intake, live: LiveModels, blobs: BlobStore, held: Held) -> Any:
    receiving = assemble(database, intake, live, blobs, held, max_bytes=1 << 20)
    yield receiving
    await receiving.validator.close()


@pytest.fixture
def heir(database: Database, intake: Intake, live: LiveModels, blobs: BlobStore, staging: Staging) -> Validator:
    """Another gateway's, on the same blobs."""
    return Validator(database, intake, live, blobs, staging, CheckLimits(1 << 20), check_here)


@pytest.fixture
async def abandon(database: Database) -> Callable[[], Awaitable[None]]:
    """Let every lease run out."""

    async def abandon() -> None:
        async with database.transaction() as session:
            await session.execute(update(AdapterVersion).values(lease_until=now() - timedelta(seconds=1)))

    return abandon


async def until(shown: Shown, status: str) -> Any:
    """The adapter `pirate` once it has this status."""

    async def has() -> bool:
        return bool((await shown("pirate")).status == status)

    await eventually(has)
    return await shown("pirate")


async def sent(client: httpx.AsyncClient) -> str:
    """The path of a resumable upload that is whole."""
    content = zip_of(files())
    announcement = {"name": "pirate", "filename": "a.zip", "size_bytes": len(content)}
    upload = f"{PATH}/uploads/{(await client.post(f'{PATH}/uploads', json=announcement)).json()['id']}"
    await client.patch(upload, content=content, headers={"Content-Range": f"bytes 0-{len(content) - 1}/*"})
    return upload


async def test_a_long_validation_is_answered_before_its_end(
    push: Send, held: Held, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.05)
    response = await push(zip_of(files()))
    assert (response.status_code, response.json()["status"], response.json()["digest"]) == (201, "validating", None)
    held.go.set()
    assert (await until(shown, "ready")).rank == 2


async def test_whoever_completes_an_upload_again_waits_for_the_same_validation(
    client: httpx.AsyncClient, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = await sent(client)
    with monkeypatch.context() as hurried:
        hurried.setattr(service, "ANSWER_SECONDS", 0.05)
        for _ in range(2):
            early = await client.post(f"{upload}/complete")
            assert (early.status_code, early.json()["status"]) == (201, "validating")
    again = asyncio.create_task(client.post(f"{upload}/complete"))
    await asyncio.sleep(0.05)
    held.go.set()
    assert ((await again).status_code, (await again).json()["status"]) == (201, "ready")
    assert (await client.post(f"{upload}/complete")).json() == (await again).json()


async def test_whoever_completes_an_upload_again_hears_what_became_of_it_when_its_gateway_died(
    client: httpx.AsyncClient, receiving: Receiving, heir: Validator, blobs: BlobStore,
    abandon: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    upload = await sent(client)
    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.05)
    await client.post(f"{upload}/complete")
    await receiving.validator.close()
    early = await client.post(f"{upload}/complete")
    assert (early.status_code, early.json()["status"]) == (201, "validating")
    shutil.rmtree(blobs.root / "staging")
    await abandon()
    await heir.take_over()
    lost = await client.post(f"{upload}/complete")
    assert (lost.status_code, lost.json()["error"]["code"]) == (422, "invalid_adapter")
    assert "upload or import it again" in lost.json()["error"]["message"]


async def test_two_uploads_of_the_same_at_once_make_one_version(
    push: Send, held: Held, adapters: Adapters, owners: dict[str, Owner]
) -> None:
    pushing = [asyncio.create_task(push(zip_of(files()))) for _ in range(2)]
    await eventually(lambda: held.runs(2))
    held.go.set()
    answers = await asyncio.gather(*pushing)
    assert sorted(answer.status_code for answer in answers) == [200, 201]
    (version,) = await adapters.versions(owners["acme"], "pirate", 10, None)
    assert {answer.json()["version"] for answer in answers} == {version.version}


async def test_checks_run_a_few_at_a_time(push: Send, held: Held) -> None:
    pushing = [asyncio.create_task(push(zip_of(files()), name=f"n{index}")) for index in range(4)]
    await eventually(lambda: held.runs(2))
    await asyncio.sleep(0.1)
    held.go.set()
    assert [(await each).status_code for each in pushing] == [201] * 4
    assert held.most == 2


async def test_a_stopped_gateway_leaves_the_version_to_the_next(
    push: Send,
    receiving: Receiving,
    heir: Validator,
    abandon: Callable[[], Awaitable[None]],
    shown: Shown,
    staged: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.05)
    assert (await push(zip_of(files()))).json()["status"] == "validating"
    await receiving.validator.close()
    await heir.sweep()
    assert len(staged()) == 1
    await heir.take_over()
    assert (await shown("pirate")).status == "validating"
    await abandon()
    await heir.take_over()
    assert (await until(shown, "ready")).version == 1
    await heir.close()
    assert staged() == []


async def test_a_living_gateway_keeps_what_it_validates_although_its_lease_ran_out(
    push: Send, held: Held, heir: Validator, abandon: Callable[[], Awaitable[None]], shown: Shown,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.05)
    await push(zip_of(files()))
    await abandon()
    await heir.take_over()
    assert (await shown("pirate")).status == "validating"
    held.go.set()
    await until(shown, "ready")


async def test_a_version_whose_files_are_gone_fails_with_the_reason(
    intake: Intake, heir: Validator, owners: dict[str, Owner], abandon: Callable[[], Awaitable[None]], shown: Shown
) -> None:
    await intake.begin(owners["acme"], ACTOR, "pirate", "base", "upload", None)
    await abandon()
    await heir.take_over()
    found = await shown("pirate")
    assert (found.status, "upload or import it again" in found.status_reason) == ("failed", True)


@pytest.mark.parametrize("failure", [unavailable("no processes"), OSError("no disk")])
async def test_trouble_of_the_servers_own_is_no_verdict(
    push: Send, held: Held, heir: Validator, abandon: Callable[[], Awaitable[None]], shown: Shown, failure: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.05)
    held.failure = failure
    await push(zip_of(files()))
    held.go.set()
    await eventually(lambda: held.runs(0))
    assert (await shown("pirate")).status == "validating"
    await asyncio.sleep(0.05)
    await abandon()
    await heir.take_over()
    await until(shown, "ready")
    await heir.close()


@pytest.mark.parametrize("failure", [unavailable("no processes"), OSError("no disk"), KeyError("a mistake")])
async def test_trouble_that_does_not_end_is_given_up(
    push: Send, held: Held, receiving: Receiving, database: Database, abandon: Callable[[], Awaitable[None]],
    shown: Shown, staged: Callable[[], list[str]], failure: Exception, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(service, "ANSWER_SECONDS", 0.05)
    held.failure = failure
    await push(zip_of(files()))
    held.go.set()
    await eventually(lambda: held.runs(0))
    await asyncio.sleep(0.05)
    assert (await shown("pirate")).status == "validating"
    async with database.transaction() as session:
        await session.execute(update(AdapterVersion).values(created_at=now() - GIVE_UP_AFTER))
    await abandon()
    await receiving.validator.take_over()
    found = await until(shown, "failed")
    assert "could not check" in found.status_reason

    async def removed() -> bool:
        return staged() == []

    await eventually(removed)


@pytest.mark.parametrize("failure", [OSError("no disk"), KeyError("a mistake")])
async def test_tending_goes_on_after_what_did_not_work(
    heir: Validator, intake: Intake, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = 0

    async def abandoned() -> list[Ticket]:
        nonlocal rounds
        rounds += 1
        if rounds < 3:
            raise failure
        return []

    async def third() -> bool:
        return rounds >= 3

    monkeypatch.setattr(validator, "TAKEOVER_SECONDS", 0.01)
    monkeypatch.setattr(intake, "abandoned", abandoned)
    tending = asyncio.create_task(heir.keep_going())
    await eventually(third)
    tending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tending


async def test_a_lease_is_renewed_while_the_check_runs(
    push: Send, held: Held, intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = asyncio.Event()

    async def renew(ticket: Ticket) -> None:
        renewed.set()

    monkeypatch.setattr("polygraft.registry.uploads.validator.LEASE_SECONDS", 0.03)
    monkeypatch.setattr(intake, "renew", renew)
    pushing = asyncio.create_task(push(zip_of(files())))
    async with asyncio.timeout(10):
        await renewed.wait()
    held.go.set()
    assert (await pushing).status_code == 201


async def test_an_adapter_that_is_gone_in_the_meantime(
    push: Send, held: Held, intake: Intake, staged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ready(*_: object) -> None:
        raise ApiError(404, "gone", code="not_found")

    monkeypatch.setattr(intake, "ready", ready)
    held.go.set()
    assert (await push(zip_of(files()))).status_code == 404
    assert staged() == []


async def test_a_killed_receivers_folder_is_swept_and_a_living_ones_is_not(
    heir: Validator, staging: Staging, blobs: BlobStore, staged: Callable[[], list[str]]
) -> None:
    mine = await staging.fresh()
    program = (
        "import asyncio, pathlib, sys, time\n"
        "from polygraft.blobs import BlobStore\n"
        "from polygraft.registry.uploads.staging import Staging\n"
        f"staged = asyncio.run(Staging(BlobStore(pathlib.Path({str(blobs.root)!r}))).fresh())\n"
        "print('here', flush=True); time.sleep(60)"
    )
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert await other.stdout.readline() == b"here\n"
    await heir.sweep()
    assert len(staged()) == 2
    os.kill(other.pid, signal.SIGKILL)
    await other.wait()
    await heir.sweep()
    assert staged() == [mine.path.name]
    async with mine:
        pass
    assert staged() == []


async def test_folders_of_finished_versions_are_swept(
    push: Send, held: Held, heir: Validator, blobs: BlobStore, staged: Callable[[], list[str]]
) -> None:
    held.go.set()
    await push(zip_of(files()))
    for name in ("adv_" + "0" * 24, "upl_" + "0" * 24):
        (blobs.root / "staging" / name).mkdir()
    (blobs.root / "staging" / "tmp-of-the-blob-store").mkdir()
    await heir.sweep()
    assert staged() == ["tmp-of-the-blob-store"]
