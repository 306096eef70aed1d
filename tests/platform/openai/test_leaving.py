"""Clients that hang up, over real sockets: their job ends at once, and nobody else's does."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import redis

from polygraft.queue import keys
from polygraft.queue.messages import ChoiceDelta, Job

from .fakes import FakeWorker, Step

pytestmark = pytest.mark.slow  # real sockets, and waits until what must not happen has not happened

BODY = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}


def endless(job: Job) -> Iterator[Step]:
    """One token a step for each choice, until somebody ends it."""
    while True:
        yield tuple(ChoiceDelta(index=index, text="x", token_ids=(5,)) for index in range(job.params.n))


def silent(job: Job) -> Iterator[Step]:
    """Steps without news: a long prefill."""
    while True:
        yield ()


def eventually(holds: Callable[[], bool], within: float = 20.0) -> bool:
    deadline = time.monotonic() + within
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def send(server: str, **fields: Any) -> socket.socket:
    """Post a chat and leave the answer unread."""
    host, port = server.removeprefix("http://").split(":")
    body = msgspec.json.encode(BODY | fields)
    connection = socket.create_connection((host, int(port)))
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n" + head.encode() + body)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> None:
    received = b""
    while mark not in received:
        part = connection.recv(65536)
        assert part, received
        received += part


def ids_of(worker: FakeWorker) -> list[str]:
    return [job.id for job in worker.jobs]


@pytest.mark.parametrize("n", [1, 4])
def test_leaving_a_stream_cancels_its_job_once(server: str, worker: FakeWorker, n: int) -> None:
    worker.script = endless
    with send(server, stream=True, n=n) as connection:
        read_until(connection, b"data: {")
    assert eventually(lambda: worker.cancelled == ids_of(worker))
    assert eventually(worker.idle.is_set)
    assert len(worker.cancelled) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_before_the_first_token_cancels_the_job(server: str, worker: FakeWorker, stream: bool) -> None:
    worker.script = silent
    with send(server, stream=stream):
        assert eventually(lambda: len(worker.jobs) == 1)
    assert eventually(lambda: worker.cancelled == ids_of(worker))


def test_leaving_a_whole_answer_cancels_the_job(server: str, worker: FakeWorker) -> None:
    worker.script = endless
    with send(server, stream=False):
        assert eventually(lambda: worker.steps > 3)
    assert eventually(lambda: worker.cancelled == ids_of(worker))


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_the_queue_takes_the_job_out(server: str, worker: FakeWorker, valkey: str, stream: bool) -> None:
    worker.held = True
    with redis.Redis.from_url(valkey) as client:
        with send(server, stream=stream):
            assert eventually(lambda: client.zcard(keys.QUEUED) == 1)
        assert eventually(lambda: client.zcard(keys.QUEUED) == 0)
    worker.held = False
    answer = httpx.post(f"{server}/v1/chat/completions", json=BODY)
    assert answer.json()["choices"][0]["message"]["content"] == "Hello, world!"
    assert ids_of(worker) == [answer.json()["id"]]


def test_an_answer_that_is_read_to_its_end_cancels_nothing(server: str, worker: FakeWorker) -> None:
    with httpx.Client() as client:
        for stream in (True, False, True, False):
            answer = client.post(f"{server}/v1/chat/completions", json=BODY | {"stream": stream})
            assert answer.status_code == 200
    time.sleep(0.3)
    assert len(worker.jobs) == 4
    assert worker.cancelled == []


def test_one_that_leaves_does_not_touch_another_with_the_same_request_id(server: str, worker: FakeWorker) -> None:
    worker.script = endless
    stays = send(server, stream=True, request_id="same")
    read_until(stays, b"data: {")
    with send(server, stream=True, request_id="same") as leaves:
        read_until(leaves, b"data: {")
    assert eventually(lambda: len(worker.cancelled) == 1)
    assert worker.cancelled == ids_of(worker)[1:]
    before = worker.steps
    assert eventually(lambda: worker.steps > before + 5)
    read_until(stays, b"data: {")
    stays.close()
    assert eventually(lambda: worker.cancelled == [ids_of(worker)[1], ids_of(worker)[0]])


def test_a_hundred_that_leave_one_after_the_other(server: str, worker: FakeWorker) -> None:
    worker.script = endless
    for number in range(100):
        with send(server, stream=number % 2 == 0):
            assert eventually(lambda number=number: len(worker.jobs) > number)
    assert eventually(lambda: sorted(worker.cancelled) == sorted(ids_of(worker)))
    assert eventually(worker.idle.is_set)


def test_a_large_body_is_answered_with_413(server: str) -> None:
    body = b'{"prompt":"' + b"x" * (20 * 2**20) + b'"}'
    answer = httpx.post(f"{server}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 413
