"""The route that sends a version's files: what it sends, and what it says where it cannot."""

import asyncio
import io
import tarfile
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from fastapi import FastAPI
from tests.platform.registry.fakes import Push

from polygraft.blobs import BlobError, BlobUnavailable
from polygraft.openai.errors import install_error_handlers
from polygraft.registry.adapters import Adapters
from polygraft.registry.lending import Aliases, Shares
from polygraft.registry.routes import AdapterServices, build_router
from polygraft.registry.turns import Turns
from polygraft.tenancy.principal import Principal
from polygraft.tenancy.request import Owner, calling_tenant

from .calling import PREFIX, Folders, client, error


async def test_contents_are_sent_as_a_tar_gz(
    acme: httpx.AsyncClient, push: Push, folders: Folders, tmp_path: Path
) -> None:
    await push("acme", "pirate", "a")
    weights = bytes(range(256)) * 20_000
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    (tmp_path / "secret").write_bytes(b"no")
    folders.known["sha256:a"] = tmp_path
    answer = await acme.get("/pirate/versions/1/content")
    assert answer.headers["content-type"] == "application/gzip"
    assert answer.headers["content-disposition"] == 'attachment; filename="pirate-v1.tar.gz"'
    with tarfile.open(fileobj=io.BytesIO(answer.content), mode="r:gz") as archive:
        found = {member.name: archive.extractfile(member) for member in archive}
        contents = {name: file.read() for name, file in found.items() if file is not None}
    assert contents == {"adapter_config.json": b"{}", "adapter_model.safetensors": weights}
    (tmp_path / "adapter_model.safetensors").unlink()
    assert (await acme.get("/pirate/versions/1/content")).status_code == 503


@pytest.mark.parametrize(
    ("failure", "status", "code", "event"),
    [
        (BlobUnavailable("no answer"), 503, "dependency_unavailable", "adapter_content_not_read"),
        (BlobError("other bytes"), 422, "invalid_adapter", "adapter_content_damaged"),
    ],
)
async def test_contents_that_are_damaged_are_to_be_uploaded_again_and_those_out_of_reach_are_asked_for_later(
    acme: httpx.AsyncClient, push: Push, folders: Folders, failure: BlobError, status: int, code: str, event: str
) -> None:
    await push("acme", "pirate", "a")
    folders.failure = failure
    with structlog.testing.capture_logs() as logged:
        answer = await acme.get("/pirate/versions/1/content")
    assert error(answer)[:2] == (status, code)
    assert ("Upload it again" in answer.text) == (status == 422)
    [entry] = [entry for entry in logged if entry["log_level"] == "error"]
    assert (entry["event"], entry["digest"], entry["error"]) == (event, "sha256:a", str(failure))


async def test_contents_are_checked_one_after_the_other_and_who_waits_long_may_come_back(
    adapters: Adapters, aliases: Aliases, shares: Shares, principals: dict[str, Principal], push: Push, tmp_path: Path
) -> None:
    await push("acme", "pirate", "a")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    checking, release, checked = threading.Event(), threading.Event(), []

    class Slow:
        def verified_adapter(self, digest: str) -> Path:
            checked.append(digest)
            checking.set()
            release.wait()
            return tmp_path

    app = FastAPI()
    install_error_handlers(app)
    services = AdapterServices(adapters, aliases, shares, Slow(), checks=Turns(1, patience=0.1))
    for prefix in (PREFIX, "/again"):
        app.include_router(build_router(services, prefix=prefix, owner=calling_tenant))
    async with client(app, principals, "acme") as acme:
        first = asyncio.create_task(acme.get("/pirate/versions/1/content"))
        try:
            async with asyncio.timeout(10):
                while not checking.is_set():  # noqa: ASYNC110 - a thread sets it
                    await asyncio.sleep(0.01)
            refused = await acme.get("http://localhost/again/pirate/versions/1/content")
        finally:
            release.set()
        assert error(refused)[:2] == (503, "overloaded")
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await first).status_code == 200
        assert (await acme.get("/pirate/versions/1/content")).status_code == 200
    assert len(checked) == 2


async def test_versions_that_are_not_ready_have_no_contents(
    acme: httpx.AsyncClient, intake: Any, owners: dict[str, Owner], actor: Any
) -> None:
    await intake.begin(owners["acme"], actor, "pirate", "base", "upload", None)
    assert (await acme.get("/pirate/versions/1")).json()["status"] == "validating"
    assert error(await acme.get("/pirate/versions/1/content"))[:2] == (404, "not_found")
