"""POST /v1/completions, over the real queue."""

from __future__ import annotations

import json
from typing import Any

import httpx
from tokenizers import Tokenizer

from .fakes import FakeWorker, error_of

URL = "/v1/completions"


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(URL, json={"model": "base", "prompt": "Your"} | fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def refusal(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(URL, json={"model": "base", "prompt": "Your"} | fields)
    assert answer.status_code == 400, answer.text
    return error_of(answer.content)


async def test_a_completion(client: httpx.AsyncClient, worker: FakeWorker, tokenizer: Tokenizer) -> None:
    body = await ask(client)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["choices"] == [
        {"index": 0, "text": "Hello, world!", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    assert worker.jobs[0].prompts == (tuple(tokenizer.encode("Your").ids),)
    assert worker.jobs[0].params.max_tokens == 16


async def test_raw_text_gets_a_bos_and_token_arrays_do_not(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    await ask(client, model="bos", prompt="Your")
    await ask(client, model="bos", prompt=[65, 66])
    await ask(client, model="bos", prompt="Your", add_special_tokens=False)
    raw, tokens, bare = (job.prompts[0] for job in worker.jobs)
    assert raw[0] == 0
    assert raw[1:] == bare
    assert tokens == (65, 66)


async def test_a_tokenizer_file_neither_cuts_nor_pads(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    await ask(client, model="bos", prompt="~" * 40)
    assert len(worker.jobs[0].prompts[0]) == 41


async def test_lists_of_prompts_and_n(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    body = await ask(client, prompt=[[65], [66, 67]], n=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert worker.jobs[0].prompts == ((65,), (66, 67))
    assert body["usage"]["prompt_tokens"] == 3


async def test_empty_prompts_are_400_on_a_model_without_bos(client: httpx.AsyncClient) -> None:
    for prompt in ("", [], [[]], ["", ""], ["x", ""], [[5], []]):
        assert (await refusal(client, prompt=prompt))["param"] == "prompt"


async def test_an_empty_text_is_a_bos_where_there_is_one(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    await ask(client, model="bos", prompt="")
    assert worker.jobs[0].prompts == ((0,),)
    assert (await refusal(client, model="bos", prompt=[[]]))["param"] == "prompt"


async def test_prompt_ids_outside_the_vocabulary_are_400(client: httpx.AsyncClient) -> None:
    for prompt in ([0, 9999999], [-1], [320], [[1, 2], [3, 5279552648203111001]]):
        error = await refusal(client, prompt=prompt)
        assert error["param"] == "prompt"
        assert "319" in str(error["message"])
    # the embedding has more rows than the tokenizer has tokens
    assert (await ask(client, prompt=[319]))["choices"]


async def test_a_text_with_tokens_that_only_the_tokenizer_knows_is_400(client: httpx.AsyncClient) -> None:
    assert "99" in str((await refusal(client, model="narrow", prompt="Your answer"))["message"])
    assert (await ask(client, model="narrow", prompt="!"))["choices"]


async def test_the_prompt_is_scored_without_generating(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    text = "Your answer: Yes"
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text).ids]
    body = await ask(client, prompt=text, echo=True, max_tokens=0, logprobs=1)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
    assert body["usage"]["completion_tokens"] == 0
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == pieces
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(logprob < 0 for logprob in logprobs["token_logprobs"][1:])
    assert [text[at : at + len(piece)] for at, piece in zip(logprobs["text_offset"], pieces, strict=True)] == pieces


async def test_max_tokens_0_without_echo_gives_an_empty_text(client: httpx.AsyncClient) -> None:
    body = await ask(client, max_tokens=0)
    assert body["choices"][0]["text"] == ""
    assert body["choices"][0]["finish_reason"] == "length"


async def test_echo_comes_before_what_was_generated(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    generated = tokenizer.decode(tokenizer.encode("Hello, world!").ids[:2])
    for prompts in (["Your", "brown fox"], [[65], [66, 67]]):
        body = await ask(client, prompt=prompts, n=2, echo=True, logprobs=0, max_tokens=2)
        echoed = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in prompts]
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == [echoed[0] + generated] * 2 + [echoed[1] + generated] * 2
        for choice in body["choices"]:
            logprobs = choice["logprobs"]
            assert "".join(logprobs["tokens"]) == choice["text"]
            assert {len(value) for value in logprobs.values()} == {len(logprobs["tokens"])}
    assert (await ask(client, echo=True, max_tokens=0))["choices"][0]["text"] == "Your"


async def test_likeliest_tokens_have_unique_keys(client: httpx.AsyncClient) -> None:
    body = await ask(client, logprobs=5)
    for top in body["choices"][0]["logprobs"]["top_logprobs"]:
        assert 5 <= len(top) <= 6


async def test_impossible_max_tokens_are_400(client: httpx.AsyncClient) -> None:
    for max_tokens in (-1, 2**31, "5", 1.5):
        assert (await refusal(client, max_tokens=max_tokens))["type"] == "invalid_request_error"


async def test_the_default_of_16_tokens_shrinks_with_the_context(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    await ask(client, model="short", prompt=[[65] * 3, [65] * 7])
    await ask(client, model="short", prompt=[65], max_tokens=None)
    assert [job.params.max_tokens for job in worker.jobs] == [1, 7]
    error = await refusal(client, model="short", prompt=[[65], [65] * 8])
    assert error["code"] == "context_length_exceeded"


async def test_a_stream_echoes_first(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    body = {"model": "base", "prompt": "Your", "echo": True, "logprobs": 1, "stream": True, "max_tokens": 2}
    whole = await ask(client, **body | {"stream": False})
    events = (await client.post(URL, json=body)).text.split("\n\n")
    assert events[-2] == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert choices[0]["text"] == "Your"
    assert choices[0]["logprobs"]["token_logprobs"][0] is None
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert choices[-1]["text"] == ""
    for name, value in whole["choices"][0]["logprobs"].items():
        assert [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"][name]] == value
