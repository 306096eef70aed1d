"""Calls whose key is revoked, or whose tenant is disabled, while they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import httpx
import msgspec
import pytest
import redis
from fastapi import FastAPI
from starlette.requests import Request

from polygraft.card import ModelCard
from polygraft.openai.chat import ChatRenderer
from polygraft.queue import keys
from polygraft.queue.messages import AccessChange, ChoiceDelta, Job
from polygraft.tenancy.admissions import Admissions

from .conftest import PRINCIPAL, running_app
from .fakes import FakeWorker, Step, error_of

BODY = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
REVOKED = AccessChange(kind="key", id=PRINCIPAL.key_id, refusal="invalid_api_key")
assert PRINCIPAL.tenant_id is not None
DISABLED = AccessChange(kind="tenant", id=PRINCIPAL.tenant_id, refusal="tenant_disabled")


def endless(job: Job) -> Iterator[Step]:
    """One token a step, until somebody ends it."""
    while True:
        yield (ChoiceDelta(index=0, text="x", token_ids=(5,)),)


@pytest.fixture
async def app(
    valkey: str, cards: Mapping[str, ModelCard], tokenizers: Path, renderer: ChatRenderer, worker: FakeWorker
) -> AsyncIterator[FastAPI]:
    """The app with a worker that does not stop by itself."""
    worker.script, worker.pace = endless, 0.01
    async with running_app(valkey, cards, tokenizers, renderer) as app:
        yield app


@pytest.fixture
async def call(app: FastAPI) -> AsyncIterator[Callable[..., asyncio.Task[httpx.Response]]]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield lambda **fields: asyncio.create_task(client.post("/v1/chat/completions", json=BODY | fields))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - another thread makes it hold
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("change", "status", "code"), [(REVOKED, 401, "invalid_api_key"), (DISABLED, 403, "tenant_disabled")]
)
async def test_a_stream_ends_with_the_reason_and_its_job_is_cancelled(
    app: FastAPI, call: Callable[..., asyncio.Task[httpx.Response]], worker: FakeWorker,
    change: AccessChange, status: int, code: str,
) -> None:  # fmt: skip
    admissions: Admissions = app.state.admissions
    stream, whole = call(stream=True), call()
    await until(lambda: len(worker.jobs) == 2 and worker.steps > 5)
    admissions.apply(change)
    async with asyncio.timeout(2):
        streamed, answered = await stream, await whole
    frames = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert streamed.status_code == 200
    assert len(frames) > 2
    assert error_of(frames[-1].encode())["code"] == code
    assert all(msgspec.json.decode(frame)["choices"] for frame in frames[:-1])
    assert (answered.status_code, error_of(answered.content)["code"]) == (status, code)
    await until(lambda: sorted(worker.cancelled) == sorted(job.id for job in worker.jobs))
    assert admissions.key_ids() == set()


async def test_a_call_that_waits_in_the_queue_ends_as_well(
    app: FastAPI, call: Callable[..., asyncio.Task[httpx.Response]], worker: FakeWorker, valkey: str
) -> None:
    worker.held = True
    waiting = call(stream=True)
    with redis.Redis.from_url(valkey) as queue:
        await until(lambda: queue.zcard(keys.QUEUED) == 1)
        app.state.admissions.apply(DISABLED)
        async with asyncio.timeout(2):
            answer = await waiting
        assert (answer.status_code, error_of(answer.content)["code"]) == (403, "tenant_disabled")
        await until(lambda: queue.zcard(keys.QUEUED) == 0)


async def test_a_call_whose_key_is_revoked_before_it_is_read_is_not_queued(
    app: FastAPI, call: Callable[..., asyncio.Task[httpx.Response]], worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Request.stream

    async def revoked_meanwhile(request: Request) -> AsyncIterator[bytes]:
        async for part in read(request):
            yield part
        app.state.admissions.apply(REVOKED)

    monkeypatch.setattr(Request, "stream", revoked_meanwhile)
    answer = await call()
    assert (answer.status_code, error_of(answer.content)["code"]) == (401, "invalid_api_key")
    assert worker.jobs == []


async def test_others_go_on(
    app: FastAPI, call: Callable[..., asyncio.Task[httpx.Response]], worker: FakeWorker
) -> None:
    stream = call(stream=True)
    await until(lambda: worker.steps > 5)
    app.state.admissions.apply(AccessChange(kind="tenant", id="ten_other", refusal="tenant_disabled"))
    app.state.admissions.apply(AccessChange(kind="key", id=PRINCIPAL.key_id))
    await asyncio.sleep(0.2)
    assert not stream.done()
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
