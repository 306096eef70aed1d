"""Uploads in pieces, over broken connections and restarts."""

import asyncio
import hashlib
import shutil
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import delete, select, update
from tests.platform.registry.fakes import ACTOR

from polygraft.blobs import BlobStore
from polygraft.db import Adapter, AdapterVersion, AuditEntry, Database, Upload, now
from polygraft.registry.adapters import Adapters
from polygraft.registry.intake import Intake
from polygraft.registry.live import LiveModels
from polygraft.registry.uploads import resumable, staging
from polygraft.registry.uploads.assembly import Receiving, assemble
from polygraft.registry.uploads.staging import Staging
from polygraft.tenancy.request import Owner

from .conftest import check_here
from .making import PATH, WEIGHTS, files, form_of, weights_of, zip_of

CONTENT = zip_of(files())
UPLOADS = f"{PATH}/uploads"


async def begun(client: httpx.AsyncClient, **changed: Any) -> str:
    body = {"name": "pirate", "filename": "adapter.zip", "size_bytes": len(CONTENT)} | changed
    response = await client.post(UPLOADS, json=body)
    assert response.status_code == 201, response.text
    return str(response.json()["id"])


async def sent(client: httpx.AsyncClient, upload: str, start: int, content: bytes, **headers: str) -> httpx.Response:
    piece = {"Content-Range": f"bytes {start}-{start + len(content) - 1}/{len(CONTENT)}"} | headers
    return await client.patch(f"{UPLOADS}/{upload}", content=content, headers=piece)


async def test_piece_by_piece(client: httpx.AsyncClient, staged: Callable[[], list[str]]) -> None:
    upload = await begun(client)
    middle = len(CONTENT) // 2
    first = await sent(client, upload, 0, CONTENT[:middle])
    assert (first.status_code, first.json()["received_bytes"], first.json()["size_bytes"]) == (
        200,
        middle,
        len(CONTENT),
    )
    assert (await client.get(f"{UPLOADS}/{upload}")).json() == first.json()
    assert (await sent(client, upload, middle, CONTENT[middle:])).json()["received_bytes"] == len(CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    done = await client.post(f"{UPLOADS}/{upload}/complete", json={"sha256": digest})
    assert (done.status_code, done.json()["object"], done.json()["status"]) == (201, "adapter", "ready")
    assert (await client.get(f"{UPLOADS}/{upload}")).status_code == 404
    assert staged() == []


async def test_the_same_contents_again(client: httpx.AsyncClient) -> None:
    for status in (201, 200):
        upload = await begun(client)
        await sent(client, upload, 0, CONTENT)
        assert (await client.post(f"{UPLOADS}/{upload}/complete")).status_code == status


async def completed_twice(client: httpx.AsyncClient, content: bytes = CONTENT) -> httpx.Response:
    """The second answer, which is that of the first."""
    upload = await begun(client)
    await sent(client, upload, 0, content)
    first = await client.post(f"{UPLOADS}/{upload}/complete")
    again = await client.post(f"{UPLOADS}/{upload}/complete")
    assert (again.status_code, again.json()) == (first.status_code, first.json())
    return again


async def test_completing_it_again_tells_the_same(
    client: httpx.AsyncClient, database: Database, staged: Callable[[], list[str]]
) -> None:
    for status in (201, 200):
        again = await completed_twice(client)
        assert (again.status_code, again.json()["version"], again.json()["status"]) == (status, 1, "ready")
    refused = await completed_twice(client, bytes(len(CONTENT)))
    assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_adapter")
    async with database.transaction() as session:
        actions = list(await session.scalars(select(AuditEntry.action)))
    assert actions.count("adapter.upload") == 3
    assert staged() == []


async def test_completing_it_again_tells_of_its_own_version_although_another_is_served(
    client: httpx.AsyncClient,
) -> None:
    upload = await begun(client)
    await sent(client, upload, 0, CONTENT)
    first = await client.post(f"{UPLOADS}/{upload}/complete")
    body, headers = form_of(("name", None, b"pirate"), ("file", "a.zip", zip_of(files(**{WEIGHTS: weights_of(0.25)}))))
    assert (await client.post(PATH, content=body, headers=headers)).json()["version"] == 2
    again = await client.post(f"{UPLOADS}/{upload}/complete")
    assert (again.status_code, again.json()) == (201, first.json())
    other = await client.post(f"{UPLOADS}/{upload}/complete", headers={"X-Tenant": "other"})
    assert other.status_code == 404


async def test_completing_it_again_when_what_it_became_is_gone(
    client: httpx.AsyncClient, database: Database, adapters: Adapters, owners: dict[str, Owner]
) -> None:
    upload = await begun(client)
    await sent(client, upload, 0, CONTENT)
    await client.post(f"{UPLOADS}/{upload}/complete")
    await adapters.delete(owners["acme"], ACTOR, "pirate")
    assert (await client.post(f"{UPLOADS}/{upload}/complete")).status_code == 404
    async with database.transaction() as session:
        await session.execute(delete(Adapter))
    assert (await client.post(f"{UPLOADS}/{upload}/complete")).status_code == 404


async def test_completing_it_at_the_same_time_makes_one_version(client: httpx.AsyncClient, database: Database) -> None:
    upload = await begun(client)
    await sent(client, upload, 0, CONTENT)
    answers = await asyncio.gather(*(client.post(f"{UPLOADS}/{upload}/complete") for _ in range(4)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert {answer.json()["error"]["code"] for answer in answers if answer.status_code == 409} <= {"upload_in_use"}
    assert (await client.post(f"{UPLOADS}/{upload}/complete")).status_code == 201
    async with database.transaction() as session:
        assert len((await session.scalars(select(AdapterVersion))).all()) == 1


@pytest.mark.parametrize("start", [0, 5, 50])
async def test_a_wrong_offset_tells_how_far_it_got(client: httpx.AsyncClient, start: int) -> None:
    upload = await begun(client)
    await sent(client, upload, 0, CONTENT[:10])
    response = await sent(client, upload, start, CONTENT[start : start + 10])
    assert (response.status_code, response.json()["error"]["code"]) == (409, "wrong_offset")
    assert response.headers["Upload-Offset"] == "10"
    assert "10 bytes" in response.json()["error"]["message"]


async def test_what_came_before_the_connection_broke_is_kept(client: httpx.AsyncClient) -> None:
    upload = await begun(client)
    short = await sent(client, upload, 0, CONTENT[:10], **{"Content-Range": f"bytes 0-99/{len(CONTENT)}"})
    assert (short.status_code, short.json()["received_bytes"]) == (200, 10)


async def test_a_piece_that_is_longer_than_it_says(client: httpx.AsyncClient) -> None:
    upload = await begun(client)
    response = await sent(client, upload, 0, CONTENT[:50], **{"Content-Range": f"bytes 0-9/{len(CONTENT)}"})
    assert response.status_code == 413
    assert (await client.get(f"{UPLOADS}/{upload}")).json()["received_bytes"] == 0


@pytest.mark.parametrize(
    "header",
    ["", "bytes", "bytes 5-4/9", "bytes */100", "bytes 0-9", "items 0-9/100", "bytes 0-9/7", "bytes 0-99999/100000",
     "bytes -1-9/100", "bytes 0-9/100, 20-29/100", "bytes " + "9" * 18 + "-" + "9" * 18 + "/*", "bytes ०-९/*"],
)  # fmt: skip
async def test_another_content_range(client: httpx.AsyncClient, header: str) -> None:
    upload = await begun(client)
    response = await sent(client, upload, 0, b"0123456789", **{"Content-Range": header.encode()})  # type: ignore[arg-type]
    assert response.status_code == 400, response.text


async def test_no_content_range(client: httpx.AsyncClient) -> None:
    upload = await begun(client)
    assert (await client.patch(f"{UPLOADS}/{upload}", content=b"x")).status_code == 400


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"name": "No"}, "name"),
        ({"filename": "adapter.bin"}, "filename"),
        ({"filename": "x" * 300 + ".zip"}, "filename"),
        ({"filename": "../../etc/passwd"}, "filename"),
        ({"size_bytes": 0}, "size_bytes"),
        ({"size_bytes": -1}, "size_bytes"),
        ({"size_bytes": 10**30}, "size_bytes"),
        ({"size_bytes": "10"}, "size_bytes"),
        ({"base_model": "other"}, "base_model"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_an_announcement_that_is_wrong(client: httpx.AsyncClient, changed: Any, param: str) -> None:
    body = {"name": "pirate", "filename": "adapter.zip", "size_bytes": 10} | changed
    response = await client.post(UPLOADS, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_an_announcement_that_is_too_large(client: httpx.AsyncClient) -> None:
    body = {"name": "pirate", "filename": "a.tgz", "size_bytes": 2**40}
    response = await client.post(UPLOADS, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "too_large")


async def test_another_tenants_upload_does_not_exist(client: httpx.AsyncClient) -> None:
    upload = await begun(client)
    other = {"X-Tenant": "other"}
    hidden = await client.get(f"{UPLOADS}/{upload}", headers=other)
    unknown = await client.get(f"{UPLOADS}/upl_{'0' * 24}", headers=other)
    assert hidden.status_code == unknown.status_code == 404
    assert hidden.text.replace(upload, f"upl_{'0' * 24}") == unknown.text
    assert (await sent(client, upload, 0, CONTENT, **other)).status_code == 404
    assert (await client.delete(f"{UPLOADS}/{upload}", headers=other)).status_code == 404
    assert (await client.post(f"{UPLOADS}/{upload}/complete", headers=other)).status_code == 404
    assert (await client.get(f"{UPLOADS}/{upload}")).status_code == 200


@pytest.mark.parametrize("upload", ["x", "..%2f..", "upl_%00", "%F0%9F%A6%99", "upl_" + "0" * 5000])
async def test_an_id_that_is_none(client: httpx.AsyncClient, upload: str) -> None:
    assert (await client.get(f"{UPLOADS}/{upload}")).status_code == 404


async def test_completing_what_is_not_whole(client: httpx.AsyncClient) -> None:
    upload = await begun(client)
    await sent(client, upload, 0, CONTENT[:10])
    response = await client.post(f"{UPLOADS}/{upload}/complete")
    assert (response.status_code, response.json()["error"]["code"]) == (409, "wrong_offset")


async def test_completing_what_was_damaged(client: httpx.AsyncClient) -> None:
    upload = await begun(client)
    await sent(client, upload, 0, CONTENT)
    for sha256 in ("0" * 64, "x"):
        response = await client.post(f"{UPLOADS}/{upload}/complete", json={"sha256": sha256})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "sha256")


async def test_a_rejected_one(client: httpx.AsyncClient, staged: Callable[[], list[str]]) -> None:
    upload = await begun(client)
    await sent(client, upload, 0, bytes(len(CONTENT)))
    response = await client.post(f"{UPLOADS}/{upload}/complete", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_adapter")
    assert staged() == []


async def test_giving_it_up(client: httpx.AsyncClient, staged: Callable[[], list[str]]) -> None:
    upload = await begun(client)
    await sent(client, upload, 0, CONTENT)
    deleted = await client.delete(f"{UPLOADS}/{upload}")
    assert (deleted.status_code, deleted.json()) == (
        200,
        {"id": upload, "object": "adapter.upload.deleted", "deleted": True},
    )
    assert (await client.get(f"{UPLOADS}/{upload}")).status_code == 404
    assert staged() == []


async def test_only_what_becomes_of_an_adapter_is_in_the_audit_log(
    client: httpx.AsyncClient, database: Database
) -> None:
    await client.delete(f"{UPLOADS}/{await begun(client)}")
    upload = await begun(client)
    await sent(client, upload, 0, CONTENT)
    assert (await client.post(f"{UPLOADS}/{upload}/complete", json={})).status_code == 201
    async with database.transaction() as session:
        actions = set(await session.scalars(select(AuditEntry.action)))
    assert actions
    assert {action.partition(".")[0] for action in actions} == {"adapter"}


async def test_the_number_of_open_ones_is_bounded(client: httpx.AsyncClient) -> None:
    await completed_twice(client)
    uploads = [await begun(client) for _ in range(resumable.MAX_OPEN)]
    body = {"name": "pirate", "filename": "a.zip", "size_bytes": 1}
    refused = await client.post(UPLOADS, json=body)
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "60")
    assert (await client.post(UPLOADS, json=body, headers={"X-Tenant": "other"})).status_code == 201
    await client.delete(f"{UPLOADS}/{uploads[0]}")
    assert (await client.post(UPLOADS, json=body)).status_code == 201


async def test_announcing_many_at_once_opens_no_more(client: httpx.AsyncClient) -> None:
    body = {"name": "pirate", "filename": "a.zip", "size_bytes": 1}
    answers = await asyncio.gather(*(client.post(UPLOADS, json=body) for _ in range(resumable.MAX_OPEN + 4)))
    assert sorted(answer.status_code for answer in answers) == [201] * resumable.MAX_OPEN + [429] * 4


async def test_two_at_once_on_one_upload(client: httpx.AsyncClient, staging: Staging) -> None:
    upload = await begun(client)
    busy = await staging.take(upload, create=True)
    assert busy is not None
    async with busy:
        response = await sent(client, upload, 0, CONTENT)
    assert (response.status_code, response.json()["error"]["code"]) == (409, "upload_in_use")
    assert (await sent(client, upload, 0, CONTENT)).status_code == 200


async def test_it_goes_on_after_a_restart(
    client: httpx.AsyncClient,
    receiving: Receiving,
    database: Database,
    intake: Intake,
    live: LiveModels,
    blobs: BlobStore,
    owners: Any,
) -> None:
    upload = await begun(client)
    await sent(client, upload, 0, CONTENT[:10])
    await receiving.validator.close()
    again = assemble(database, intake, live, blobs, check_here, max_bytes=1 << 20)
    await again.validator.sweep()
    assert (await again.uploads.progress(owners["acme"], upload)).received_bytes == 10


async def test_it_waits_for_room(client: httpx.AsyncClient, blobs: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = await begun(client)
    announcement = {"name": "pirate", "filename": "a.zip", "size_bytes": 1000}
    for request in (
        lambda: client.post(UPLOADS, json=announcement),
        lambda: sent(client, upload, 0, CONTENT),
        lambda: client.post(f"{UPLOADS}/{upload}/complete"),
    ):
        with monkeypatch.context() as full:
            full.setattr(staging, "FLOOR", shutil.disk_usage(blobs.root).total)
            refused = await request()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded"), refused.text
        assert (refused.headers["Retry-After"], "no room" in refused.text) == ("60", True)
        assert (await request()).status_code in (200, 201)


async def test_it_expires(
    client: httpx.AsyncClient, receiving: Receiving, database: Database, staged: Callable[[], list[str]]
) -> None:
    upload = await begun(client)
    await sent(client, upload, 0, CONTENT)
    async with database.transaction() as session:
        await session.execute(update(Upload).values(expires_at=now() - timedelta(seconds=1)))
    assert (await client.get(f"{UPLOADS}/{upload}")).status_code == 404
    await receiving.validator.sweep()
    assert staged() == []
