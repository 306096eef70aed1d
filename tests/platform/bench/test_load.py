"""The load client against a small server that counts what it is asked."""

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner

from polygraft.bench.client import BenchError, Client
from polygraft.bench.load import Load, Request, choose_models, make_requests
from polygraft.bench.prompts import PromptSource
from polygraft.cli import app
from polygraft.listener import HttpServer, listen, port_of

METRICS = """# TYPE polygraft_added_latency_seconds histogram
polygraft_added_latency_seconds_bucket{le="0.002"} %d
polygraft_added_latency_seconds_bucket{le="+Inf"} %d
"""


class FakeServer:
    """Speaks as much of the API as the load client uses; a token every millisecond."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.at_once = 0
        self.most_at_once = 0
        self.app = Starlette(
            routes=[
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/metrics", self.metrics),
            ]
        )
        self.url = ""

    async def complete(self, request: HttpRequest) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("authorization"))
        if body["model"] == "missing":
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        if body["model"] == "breaks":
            yield b'data: {"error": {"message": "engine fault"}}\n\n'
            self.at_once -= 1
            return
        yield b": keep-alive\n\n"
        for number in range(body["max_tokens"]):
            await asyncio.sleep(0.001)
            chunk = json.dumps({"choices": [{"text": f"t{number}"}], "usage": None}).encode()
            # Events need not arrive whole.
            yield b"data: " + chunk[:7]
            yield chunk[7:] + b"\n\n"
        usage = {
            "prompt_tokens": 20,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 16},
        }
        yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
        self.at_once -= 1

    async def tokenize(self, request: HttpRequest) -> Response:
        # Two tokens a word.
        return JSONResponse({"count": 2 * len((await request.json())["prompt"].split())})

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"data": [{"id": "base"}, {"id": "pirate"}]})

    async def metrics(self, request: HttpRequest) -> Response:
        return PlainTextResponse(METRICS % (len(self.bodies), len(self.bodies)))


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    socket = listen("127.0.0.1", 0, "--port")
    fake.url = f"http://127.0.0.1:{port_of(socket)}"
    http = HttpServer(fake.app, drain_seconds=1)
    serving = asyncio.create_task(http.serve([socket]))
    yield fake
    http.stop()
    await serving


@pytest.fixture
def client(server: FakeServer) -> Client:
    return Client(server.url, "the-key", timeout=10.0)


async def test_a_closed_loop_keeps_so_many_requests_running(server: FakeServer, client: Client) -> None:
    done: list[None] = []
    load = Load(client, 5, on_done=lambda: done.append(None))
    asked = make_requests(10, choose_models(["base"], "single", 0), PromptSource(1, 10))
    outcomes = await load.closed_loop(asked, concurrency=3)
    client.close()
    assert len(outcomes) == len(done) == len(server.bodies) == 10
    assert server.most_at_once == 3
    assert server.keys == {"Bearer the-key"}
    assert server.bodies[0]["ignore_eos"] is True
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
    for outcome in outcomes:
        assert (outcome.error, outcome.output_tokens, outcome.prompt_tokens, outcome.cached_tokens) == (None, 5, 20, 16)
        assert len(outcome.arrivals) == 5
        assert outcome.began < outcome.arrivals[0] <= outcome.arrivals[-1] <= outcome.ended


async def test_poisson_arrivals_wait_for_nobody(server: FakeServer, client: Client) -> None:
    asked = make_requests(20, choose_models(["base"], "single", 0), PromptSource(1, 10))
    began = time.perf_counter()
    outcomes = await Load(client, 50).poisson(asked, rate=400.0, seed=3)
    client.close()
    starts = sorted(outcome.began - began for outcome in outcomes)
    assert [outcome.error for outcome in outcomes] == [None] * 20
    assert server.most_at_once > 3
    assert starts[-1] > 0.02


@pytest.mark.parametrize(("model", "says"), [("missing", "404: .*no such model"), ("breaks", "engine fault")])
async def test_a_failure_is_recorded_and_the_next_request_still_works(client: Client, model: str, says: str) -> None:
    load = Load(client, 2)
    failed = await load.send(Request(model, "hi"))
    assert failed.error is not None
    assert re.search(says, failed.error)
    assert (await load.send(Request("base", "hi"))).error is None
    client.close()


async def test_a_server_that_is_not_there_is_a_failure_of_the_request() -> None:
    outcome = await Load(Client("http://127.0.0.1:1", None, 2.0), 2).send(Request("base", "hi"))
    assert outcome.error is not None
    assert "cannot connect" in outcome.error


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_a_url_must_be_http(url: str) -> None:
    with pytest.raises(BenchError):
        Client(url, None, 1.0)


def test_popularity() -> None:
    models = ["a", "b", "c", "d"]
    single, uniform, zipf = (
        Counter(islice(choose_models(models, popularity, 7), 10_000)) for popularity in ("single", "uniform", "zipf")
    )
    assert single == {"a": 10_000}
    assert all(2200 < uniform[model] < 2800 for model in models)
    # Shares of 1, 1/2, 1/3 and 1/4 of 25/12.
    assert [round(zipf[model] / 10_000, 1) for model in models] == [0.5, 0.2, 0.2, 0.1]
    assert list(islice(choose_models(models, "zipf", 7), 50)) == list(islice(choose_models(models, "zipf", 7), 50))


def test_prompts_differ_from_the_start_and_repeat_by_seed() -> None:
    prompts = [PromptSource(1, 100).prompt(number) for number in range(500)]
    assert len({prompt.split()[0] for prompt in prompts}) > 480
    assert len({" ".join(prompt.split()[:2]) for prompt in prompts}) == 500
    assert {len(prompt.split()) for prompt in prompts} == {100}
    assert PromptSource(1, 100).prompt(3) == prompts[3]
    assert PromptSource(2, 100).prompt(3) != prompts[3]


async def test_the_command_prints_figures_as_json(server: FakeServer) -> None:
    arguments = [
        "bench", "--url", server.url, "--models", "base,pirate", "--requests", "6", "--concurrency", "2",
        "--prompt-tokens", "40", "--output-tokens", "10", "--warmup", "1",
        "--metrics-url", f"{server.url}/metrics", "--json",
    ]  # fmt: skip
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["total"]["requests"], found["total"]["failures"], found["total"]["output_tokens"]) == (6, 0, 60)
    assert found["total"]["output_tokens_per_second"] > 0
    assert found["added_latency_ms_p50"] == pytest.approx(1.0)
    warm = [body for body in server.bodies if body["max_tokens"] == 8]
    assert {body["model"] for body in warm} == {"base", "pirate"}
    # Two tokens a word by the server's tokenizer.
    assert {len(body["prompt"].split()) for body in server.bodies} == {20}
    assert len({body["prompt"] for body in server.bodies}) == 8


async def test_the_command_prints_a_table_and_fails_when_requests_did(server: FakeServer) -> None:
    arguments = ["bench", "--url", server.url, "--requests", "2", "--output-tokens", "3"]
    good = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert good.exit_code == 0, good.output
    assert "all" in good.stdout
    assert "prefix cache" in good.stdout
    bad = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, "--models", "breaks", "--warmup", "0"])
    assert bad.exit_code == 1
    assert "2 × engine fault" in bad.stdout
