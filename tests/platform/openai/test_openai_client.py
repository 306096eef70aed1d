"""The real `openai` client against the real server."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI

from polygraft.queue.messages import ChoiceDelta, Job, JobError

from .fakes import FakeWorker, Step

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def openai_client(server: str) -> Iterator[OpenAI]:
    """As a product team makes it, but without retries."""
    with OpenAI(base_url=f"{server}/v1", api_key="pg-x", max_retries=0) as client:
        yield client


def test_chat(openai_client: OpenAI) -> None:
    answer = openai_client.chat.completions.with_raw_response.create(
        model="pirate", messages=HI, n=2, logprobs=True, top_logprobs=1, user="u", metadata={"a": "b"}
    )
    assert answer.headers["x-polygraft-adapter"] == "pirate@v3"
    chat = answer.parse()
    assert [choice.message.content for choice in chat.choices] == ["Hello, world!"] * 2
    assert chat.model == "pirate"
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens
    assert chat.usage.prompt_tokens_details.cached_tokens == 1
    entries = chat.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == "Hello, world!"
    assert len(entries[0].top_logprobs) == 1


def test_chat_stream(openai_client: OpenAI) -> None:
    chunks = list(
        openai_client.chat.completions.create(
            model="base", messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello, world!"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens > 0


def test_the_clients_own_accumulator_understands_the_stream(openai_client: OpenAI) -> None:
    with openai_client.chat.completions.stream(model="base", messages=HI) as stream:
        chat = stream.get_final_completion()
    assert chat.choices[0].message.content == "Hello, world!"


def test_completions(openai_client: OpenAI) -> None:
    answer = openai_client.completions.create(model="base", prompt=["Your", "fox"], echo=True, logprobs=2, max_tokens=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[1].text.startswith("fox")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    chunks = openai_client.completions.create(model="base", prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello, world!"


def test_models(openai_client: OpenAI) -> None:
    assert "pirate" in [model.id for model in openai_client.models.list()]
    assert openai_client.models.retrieve("base").owned_by == "polygraft"


def test_errors_are_the_clients_own(openai_client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        openai_client.chat.completions.create(model="nope", messages=HI)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as hot:
        openai_client.chat.completions.create(model="base", messages=HI, temperature=3, stream=True)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as tools:
        openai_client.chat.completions.create(
            model="base", messages=HI, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    assert tools.value.param == "tools"


def test_an_error_in_a_stream_is_raised(openai_client: OpenAI, worker: FakeWorker) -> None:
    def script(job: Job) -> Iterator[Step]:
        yield (ChoiceDelta(index=0, text="x", token_ids=(5,)),)
        yield JobError(status=500, type="server_error", code=None, message="The engine failed.")

    worker.script = script
    stream = openai_client.chat.completions.create(model="base", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="The engine failed"):
        list(stream)
