"""POST /v1/chat/completions, over the real queue."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from polygraft.queue.messages import ChoiceDelta, Job

from .fakes import FakeWorker, Step, error_of, saying

HI = [{"role": "user", "content": "hi"}]
URL = "/v1/chat/completions"


async def ask(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(URL, json={"model": "base", "messages": HI} | fields)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def refusal(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post(URL, json={"model": "base", "messages": HI} | fields)
    assert answer.status_code == 400, answer.text
    return error_of(answer.content)


async def test_an_answer_in_one_piece(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    body = await ask(client)
    assert body["object"] == "chat.completion"
    assert body["id"] == worker.jobs[0].id
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(worker.jobs[0].prompts[0])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}


async def test_the_prompt_is_the_rendered_template_without_further_special_tokens(
    client: httpx.AsyncClient, worker: FakeWorker, tokenizer: Tokenizer
) -> None:
    await ask(client, model="bos")
    [prompt] = worker.jobs[0].prompts
    text = "<s><|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert list(prompt) == tokenizer.encode(text, add_special_tokens=False).ids
    assert prompt.count(0) == 1


async def test_the_job_says_who_asked_and_for_what(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    await ask(
        client, model="pirate", n=2, seed=7, temperature=0, top_k=-1, logit_bias={"5": 1}, stop="x", stop_token_ids=[9]
    )
    [job] = worker.jobs
    assert (job.model, job.tenant, job.cache_namespace, job.gateway) == ("base", "ten_1", "ten_1", "gateway-1")
    assert job.adapter == "sha256:pirate3"
    params = job.params
    assert (params.n, params.seed, params.temperature, params.top_k) == (2, 7, 0.0, 0)
    assert (params.logit_bias, params.stop, params.stop_token_ids) == (((5, 1.0),), ("x",), (9,))
    assert params.max_tokens == 256 - len(job.prompts[0])
    assert params.logprobs is None


async def test_a_request_without_a_seed_gets_one_of_its_own(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    await ask(client)
    await ask(client, seed=None)
    await ask(client, seed=0)
    first, second, third = (job.params.seed for job in worker.jobs)
    assert first != second
    assert third == 0


async def test_a_zero_stays_a_zero(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    await ask(client, top_p=0, top_k=0, min_p=0, temperature=-0.0, presence_penalty=0)
    params = worker.jobs[0].params
    assert (params.top_p, params.top_k, params.min_p, params.temperature) == (0, 0, 0, 0)
    await ask(client, top_k=10**30)
    assert worker.jobs[1].params.top_k == 320


async def test_the_model_is_what_the_client_asked_for(client: httpx.AsyncClient) -> None:
    answer = await client.post(URL, json={"model": "pirate@v2", "messages": HI})
    assert answer.json()["model"] == "pirate@v2"
    assert answer.headers["x-polygraft-adapter"] == "pirate@v2"
    assert int(answer.headers["openai-processing-ms"]) >= 0
    answer = await client.post(URL, json={"model": "base", "messages": HI})
    assert answer.json()["model"] == "base"
    assert "x-polygraft-adapter" not in answer.headers


async def test_ids_are_the_servers_whatever_a_client_sends(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    for _ in range(2):
        await client.post(
            URL,
            json={"model": "base", "messages": HI, "request_id": "mine", "id": "mine"},
            headers={"X-Request-Id": "mine"},
        )
    ids = {job.id for job in worker.jobs}
    assert len(ids) == 2
    assert not any("mine" in id for id in ids)


async def test_choices_come_in_order(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    def backwards(job: Job) -> Iterator[Step]:
        for index in (2, 0, 1):
            yield (ChoiceDelta(index=index, text=f"{index}", token_ids=(5,), finish_reason="stop", stop_reason="x"),)

    worker.script = backwards
    choices = (await ask(client, n=3))["choices"]
    assert [(choice["index"], choice["message"]["content"]) for choice in choices] == [(0, "0"), (1, "1"), (2, "2")]
    assert choices[0]["stop_reason"] == "x"


async def test_logprobs_list_the_tokens_with_their_bytes(
    client: httpx.AsyncClient, worker: FakeWorker, tokenizer: Tokenizer
) -> None:
    halves = tokenizer.encode("🌊", add_special_tokens=False).ids
    assert len(halves) > 1
    worker.script = saying(tokenizer, "Hi 🌊")
    body = await ask(client, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "Hi 🌊"
    assert content[-1]["token"].startswith("bytes:\\x")
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert worker.jobs[0].params.logprobs == 2
    body = await ask(client, logprobs=True)
    assert body["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert worker.jobs[1].params.logprobs == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_unknown_model_is_404(client: httpx.AsyncClient, stream: bool) -> None:
    answer = await client.post(URL, json={"model": "nope", "messages": HI, "stream": stream})
    assert answer.status_code == 404
    error = error_of(answer.content)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_what_the_template_refuses_is_400(client: httpx.AsyncClient) -> None:
    error = await refusal(client, model="strict", messages=[{"role": "system", "content": "x"}, *HI])
    assert "Role system not supported" in str(error["message"])
    error = await refusal(client, model="bare")
    assert "no chat template" in str(error["message"])


async def test_empty_contents_are_legal_as_long_as_the_template_writes_tokens(client: httpx.AsyncClient) -> None:
    empty = [{"role": "user", "content": ""}]
    assert (await ask(client, messages=empty))["choices"]
    assert (await refusal(client, model="strict", messages=empty))["param"] == "messages"


async def test_ids_outside_the_vocabulary_are_400(client: httpx.AsyncClient) -> None:
    for bias in ({"9999999": 5}, {"-1": 5}, {"320": 5}):
        error = await refusal(client, logit_bias=bias)
        assert error["param"] == "logit_bias"
        assert "319" in str(error["message"])
    for token in (320, -1):
        assert (await refusal(client, stop_token_ids=[token]))["param"] == "stop_token_ids"
    await ask(client, logit_bias={"319": 5}, stop_token_ids=[0, 319])


async def test_more_least_tokens_than_may_be_generated_are_400(client: httpx.AsyncClient) -> None:
    assert (await refusal(client, max_tokens=3, min_tokens=4))["param"] == "min_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_context_bounds_prompt_and_answer(
    client: httpx.AsyncClient, worker: FakeWorker, stream: bool
) -> None:
    async def post(prompt_tokens: int, max_tokens: int | None) -> httpx.Response:
        content = "~" * prompt_tokens  # a byte that no merge knows: one token each
        body = {"model": "short", "messages": [{"role": "user", "content": content}], "stream": stream}
        return await client.post(URL, json=body | {"max_tokens": max_tokens})

    assert (await post(7, None)).status_code == 200
    assert worker.jobs[0].params.max_tokens == 1
    assert (await post(7, 1)).status_code == 200
    assert (await post(6, 2)).status_code == 200
    for prompt, wanted, numbers in (
        (7, 2, (8, 7, 9)),
        (8, None, (8, 8)),
        (9, 1, (8, 9)),
        (6, 2**31, (8, 6, 2**31 + 6)),
    ):
        answer = await post(prompt, wanted)
        assert answer.status_code == 400
        error = error_of(answer.content)
        assert error["code"] == "context_length_exceeded"
        assert all(str(number) in str(error["message"]) for number in numbers)
        assert "None" not in str(error["message"])
    huge = await post(10**6, None)
    assert error_of(huge.content)["code"] == "context_length_exceeded"


async def test_max_completion_tokens_comes_before_max_tokens(client: httpx.AsyncClient, worker: FakeWorker) -> None:
    body = await ask(client, max_tokens=9, max_completion_tokens=2)
    assert body["choices"][0]["finish_reason"] == "length"
    assert worker.jobs[0].params.max_tokens == 2
