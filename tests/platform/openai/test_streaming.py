"""Streams: the order of chunks, usage, errors before and after the 200, keep-alives."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from polygraft.queue.messages import ChoiceDelta, Job, JobError

from .fakes import FakeWorker, Step, error_of, saying

HI = [{"role": "user", "content": "hi"}]
URL = "/v1/chat/completions"
FAULT = JobError(status=500, type="server_error", code=None, message="The engine failed.")


async def stream(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post(URL, json={"model": "base", "messages": HI, "stream": True} | fields)


def events_of(answer: httpx.Response) -> list[str]:
    """The payloads, comments left out."""
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("\n\n")
    events = answer.text.removesuffix("\n\n").split("\n\n")
    return [event.removeprefix("data: ") for event in events if not event.startswith(":")]


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    *chunks, done = events_of(answer)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


async def test_the_order_of_chunks(client: httpx.AsyncClient) -> None:
    answer = await stream(client, model="pirate")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-polygraft-adapter"] == "pirate@v3"
    assert "openai-processing-ms" in answer.headers
    chunks = chunks_of(answer)
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("chat.completion.chunk", "pirate")}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello, world!"
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert not any("usage" in chunk for chunk in chunks)


async def test_each_choice_opens_once_and_ends_once(client: httpx.AsyncClient) -> None:
    chunks = chunks_of(await stream(client, n=3))
    for index in range(3):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [("role" in choice["delta"]) for choice in choices] == [True] + [False] * (len(choices) - 1)
        assert sum(choice["finish_reason"] is not None for choice in choices) == 1
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello, world!"


async def test_usage_is_not_told_unasked(client: httpx.AsyncClient) -> None:
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        chunks = chunks_of(await stream(client, stream_options=options))
        assert not any("usage" in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)


async def test_usage_comes_last_when_asked_for(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    *chunks, last = chunks_of(await stream(client, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == len(worker.jobs[0].prompts[0])
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_logprobs_travel_with_their_text(
    client: httpx.AsyncClient, worker: FakeWorker, tokenizer: Tokenizer
) -> None:
    worker.script = saying(tokenizer, "Hi there")
    chunks = chunks_of(await stream(client, logprobs=True, top_logprobs=1))
    said = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["logprobs"] is not None]
    for choice in said:
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert "".join(tokens) == choice["delta"]["content"]
    assert chunks[0]["choices"][0]["logprobs"] is None
    assert chunks[-1]["choices"][0]["logprobs"] is None


async def test_held_back_text_makes_no_chunk(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    def script(job: Job) -> Iterator[Step]:
        yield (ChoiceDelta(index=0, text="a", token_ids=(5,)),)
        yield (ChoiceDelta(index=0, text=""),)
        yield (ChoiceDelta(index=0, text="", finish_reason="stop", stop_reason=9),)

    worker.script = script
    choices = [chunk["choices"][0] for chunk in chunks_of(await stream(client))]
    assert [choice["delta"] for choice in choices] == [{"role": "assistant", "content": ""}, {"content": "a"}, {}]
    assert choices[-1]["stop_reason"] == 9


async def test_an_error_after_the_200_ends_the_stream_without_done(
    client: httpx.AsyncClient, worker: FakeWorker
) -> None:
    def script(job: Job) -> Iterator[Step]:
        for _ in range(3):
            yield (ChoiceDelta(index=0, text="x", token_ids=(5,)),)
        yield FAULT

    worker.script = script
    *chunks, last = events_of(await stream(client))
    assert all(json.loads(chunk)["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert error_of(last.encode())["message"] == FAULT.message


async def test_a_choice_that_fails_is_never_finished(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    def script(job: Job) -> Iterator[Step]:
        yield (ChoiceDelta(index=0, text="x", token_ids=(5,)),)
        yield (ChoiceDelta(index=0, finish_reason="error"),)

    worker.script = script
    answer = await stream(client)
    assert error_of(events_of(answer)[-1].encode())["type"] == "server_error"
    assert '"finish_reason":"' not in answer.text
    whole = await client.post(URL, json={"model": "base", "messages": HI})
    assert whole.status_code == 500


@pytest.mark.parametrize("streamed", [True, False])
async def test_an_error_before_the_first_token_has_its_own_status(
    client: httpx.AsyncClient, worker: FakeWorker, streamed: bool
) -> None:
    overloaded = JobError(status=503, type="service_unavailable_error", code="overloaded", message="Full.")
    worker.script = lambda job: iter([overloaded])
    answer = await stream(client, stream=streamed)
    assert answer.status_code == 503
    assert error_of(answer.content)["code"] == "overloaded"
    assert int(answer.headers["retry-after"]) >= 1
    assert "openai-processing-ms" in answer.headers


async def test_what_is_refused_is_refused_before_the_200(client: httpx.AsyncClient) -> None:
    answer = await stream(client, temperature=3)
    assert answer.status_code == 400
    assert error_of(answer.content)["param"] == "temperature"


async def test_comments_keep_a_waiting_stream_alive(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    def script(job: Job) -> Iterator[Step]:
        yield (ChoiceDelta(index=0, text="a", token_ids=(5,)),)
        time.sleep(0.8)
        yield (ChoiceDelta(index=0, text="b", token_ids=(5,), finish_reason="stop"),)

    worker.script = script
    answer = await stream(client)
    assert answer.text.count(": keep-alive\n\n") >= 2
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks_of(answer)) == "ab"


async def test_an_error_after_a_comment_is_an_event(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    def script(job: Job) -> Iterator[Step]:
        time.sleep(0.5)
        yield FAULT

    worker.script = script
    answer = await stream(client)
    assert answer.text.startswith(": keep-alive\n\n")
    assert int(answer.headers["openai-processing-ms"]) >= 300
    assert [error_of(event.encode())["type"] for event in events_of(answer)] == ["server_error"]


async def test_what_is_wrong_in_detail_reaches_the_client(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    details = {"tensor": "q_proj.lora_A.weight", "problem": "is missing", "hint": ""}
    fault = JobError(
        status=422,
        type="invalid_request_error",
        code="invalid_adapter",
        message="No.",
        param="model",
        errors=(details,),
    )
    worker.script = lambda job: iter([fault])
    for streamed in (False, True):
        answer = await stream(client, model="pirate", stream=streamed)
        assert answer.status_code == 422
        error = answer.json()["error"]
        assert (error["code"], error["param"], error["errors"]) == ("invalid_adapter", "model", [details])
    assert {job.adapter_name for job in worker.jobs} == {"pirate@v3"}
