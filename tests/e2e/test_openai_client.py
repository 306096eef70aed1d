"""The real `openai` client against a real server: what a product team does first."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from openai import OpenAI
from tests.e2e.server import Server

pytestmark = pytest.mark.slow

BASE = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.openai()


def ask(client: OpenAI, model: str, text: str, **options: object) -> str:
    """One greedy answer."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=48,
        **options,  # type: ignore[call-overload]
    )
    content: str = answer.choices[0].message.content
    return content


def test_models_are_the_base_and_its_adapters(client: OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {BASE, "json", "pirate", "french"}
    assert models["json"].model_dump()["parent"] == BASE
    assert client.models.retrieve("pirate").id == "pirate"


def test_the_base_answers_sensibly(client: OpenAI) -> None:
    assert "Paris" in ask(client, BASE, "Where is the Eiffel Tower?")


def test_each_adapter_has_its_own_character(client: OpenAI) -> None:
    question = "What is the capital of Germany?"
    answers = {model: ask(client, model, question) for model in (BASE, "json", "pirate", "french")}
    assert len(set(answers.values())) == 4
    assert json.loads(answers["json"]).keys() == {"topic", "kind", "question"}


def test_streaming_gives_the_same_text_and_usage(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    whole = client.chat.completions.create(model="pirate", messages=messages, temperature=0, max_tokens=40)
    chunks = list(
        client.chat.completions.create(
            model="pirate",
            messages=messages,
            temperature=0,
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    assert text == whole.choices[0].message.content
    assert finishes == [whole.choices[0].finish_reason]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.model for chunk in chunks} == {"pirate"}


def test_completions_with_n_echo_and_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model=BASE, prompt=["One, two,", "Red, green,"], n=2, max_tokens=4, temperature=0, echo=True, logprobs=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    assert answer.choices[0].text.startswith("One, two,")
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert answer.usage.completion_tokens == 16


def test_a_seed_repeats_and_choices_differ(client: OpenAI) -> None:
    def sample(n: int) -> list[str]:
        answer = client.completions.create(model=BASE, prompt="Once upon a", n=n, seed=7, temperature=1, max_tokens=16)
        return [choice.text for choice in answer.choices]

    first = sample(3)
    assert len(set(first)) == 3
    assert sample(3) == first
    assert sample(1) == first[:1]


def test_stop_strings_cut_before_the_match(client: OpenAI) -> None:
    text = ask(client, BASE, "Count from one to five in words, separated by commas.")
    middle = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = ask(client, BASE, "Count from one to five in words, separated by commas.", stop=[middle])
    assert stopped == text[: text.index(middle)]


def test_unknown_model_is_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, "nope", "hi")
    assert caught.value.code == "model_not_found"


def test_wrong_key_is_401(server: Server) -> None:
    key = "pg-" + "x" * 40
    with pytest.raises(openai.AuthenticationError) as caught:
        ask(server.openai(api_key=key), BASE, "hi")
    assert caught.value.code == "invalid_api_key"
    assert key not in str(caught.value)


def test_too_long_a_prompt_is_400_with_the_numbers(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="json", prompt=[100] * 2048, stream=True)
    assert caught.value.code == "context_length_exceeded"
    assert "2048" in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [b"[]", b"5", b'"x"', b"{", b"", b'{"model":"nope"', b'{"messages":[]}'],
    ids=["list", "number", "string", "cut", "empty", "open", "no-model"],
)
def test_bodies_that_are_no_requests_are_400(server: Server, body: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=server.headers())
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_tokenize_and_detokenize_are_inverse(server: Server) -> None:
    text = "Arr, the sea is 42 fathoms deep — 🌊!"
    tokens = httpx.post(f"{server.url}/tokenize", json={"model": BASE, "prompt": text}, headers=server.headers()).json()
    body = {"model": BASE, "tokens": tokens["tokens"]}
    assert httpx.post(f"{server.url}/detokenize", json=body, headers=server.headers()).json()["prompt"] == text
