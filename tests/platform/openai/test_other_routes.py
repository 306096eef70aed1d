"""Models, tokenizing, and everything that is no legal call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from polygraft.openai import body as body_module
from polygraft.openai.body import MAX_BODY

from .fakes import FakeWorker, error_of

HI = [{"role": "user", "content": "hi"}]


async def test_models_are_listed(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    models = {model["id"]: model for model in body["data"]}
    assert models["base"] == {
        "id": "base",
        "object": "model",
        "created": 7,
        "owned_by": "polygraft",
        "parent": None,
        "max_model_len": 512,
    }
    assert models["pirate"]["parent"] == "base"


async def test_one_model(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/models/base")).json()["parent"] is None
    assert (await client.get("/v1/models/pirate@v2")).json()["id"] == "pirate@v2"
    for name in ("nope", "org/nope", ""):
        answer = await client.get(f"/v1/models/{name}")
        assert answer.status_code == 404
        assert error_of(answer.content)["code"] == "model_not_found"


async def test_tokenize_a_text(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello, world!").ids
    body = (await client.post("/tokenize", json={"model": "base", "prompt": "Hello, world!"})).json()
    assert body == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    asked = {"model": "base", "prompt": "Hello, world!", "return_token_strs": True}
    strings = (await client.post("/tokenize", json=asked)).json()["token_strs"]
    assert strings == [tokenizer.id_to_token(token) for token in ids]


async def test_no_route_writes_a_second_bos(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    async def tokens(**fields: Any) -> list[int]:
        answer = await client.post("/tokenize", json={"model": "bos"} | fields)
        tokens: list[int] = answer.json()["tokens"]
        return tokens

    assert (await tokens(prompt="Your")).count(0) == 1
    assert (await tokens(prompt="Your", add_special_tokens=False)).count(0) == 0
    assert (await tokens(messages=HI)).count(0) == 1
    assert (await tokens(messages=HI, add_special_tokens=True)).count(0) == 2
    chat = await client.post("/v1/chat/completions", json={"model": "bos", "messages": HI})
    assert list(worker.jobs[0].prompts[0]) == await tokens(messages=HI)
    assert chat.json()["usage"]["prompt_tokens"] == len(worker.jobs[0].prompts[0])
    assert len(await tokens(messages=HI, add_generation_prompt=False)) < len(await tokens(messages=HI))


async def test_detokenize_is_the_inverse(client: httpx.AsyncClient) -> None:
    text = "Arr, 42 fathoms — 🌊!"
    tokens = (await client.post("/tokenize", json={"model": "base", "prompt": text})).json()["tokens"]
    body = {"model": "base", "tokens": tokens}
    assert (await client.post("/detokenize", json=body)).json() == {"prompt": text}


async def test_bad_tokenizer_calls_are_400(client: httpx.AsyncClient) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": HI}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": [320]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {"tokens": [1.5]}),
    ]
    for path, fields in calls:
        answer = await client.post(path, json={"model": "base"} | fields)
        assert answer.status_code == 400
        assert error_of(answer.content)["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
async def test_bodies_that_are_no_requests_are_400(client: httpx.AsyncClient, path: str) -> None:
    for body in (b"[]", b"5", b'"x"', b"{", b"", b"[" * 100_000, b"{}"):
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert error_of(answer.content)["type"] == "invalid_request_error"


async def test_bodies_of_other_types_are_400(client: httpx.AsyncClient) -> None:
    body = json.dumps({"model": "base", "messages": HI}).encode()
    for headers in ({}, {"content-type": ""}, {"content-type": "text/plain"}):
        answer = await client.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 400
        assert "Content-Type" in str(error_of(answer.content)["message"])


async def test_the_type_may_have_parameters(client: httpx.AsyncClient) -> None:
    body = json.dumps({"model": "base", "messages": HI}).encode()
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await client.post("/v1/chat/completions", content=body, headers=headers)).status_code == 200


async def test_a_body_beyond_the_cap_is_413(client: httpx.AsyncClient) -> None:
    body = b'{"model":"base","prompt":"' + b"x" * MAX_BODY + b'"}'
    answer = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert error_of(answer.content)["code"] == "too_large"


async def test_unknown_routes_and_verbs(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/nope", json={})
    assert answer.status_code == 404
    assert error_of(answer.content)["code"] == "not_found"
    answer = await client.get("/v1/chat/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert error_of(answer.content)["type"] == "invalid_request_error"


async def test_the_bodies_are_described(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "model" in schema["required"]
        assert schema["$id"]


async def test_a_body_that_says_to_be_too_large_is_not_read(client: httpx.AsyncClient) -> None:
    async def body() -> AsyncIterator[bytes]:
        pytest.fail("it was asked for")
        yield b""

    headers = {"content-type": "application/json", "content-length": str(MAX_BODY + 1)}
    answer = await client.post("/v1/completions", content=body(), headers=headers)
    assert answer.status_code == 413
    assert error_of(answer.content)["code"] == "too_large"


async def test_a_body_that_stops_half_way_ends_the_connection(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "BODY_SILENCE", 0.1)

    async def body() -> AsyncIterator[bytes]:
        yield b'{"model":'
        await asyncio.sleep(60)

    answer = await client.post("/v1/completions", content=body(), headers={"content-type": "application/json"})
    assert answer.status_code == 408
    assert answer.headers["connection"] == "close"
    assert error_of(answer.content)["type"] == "invalid_request_error"


async def test_long_names_are_not_told_back_whole(client: httpx.AsyncClient) -> None:
    for method, path in (("GET", "/v1/models/" + "x" * 20_000), ("GET", "/" + "x" * 20_000)):
        answer = await client.request(method, path)
        assert answer.status_code == 404
        assert len(answer.content) < 400
