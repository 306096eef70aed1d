"""One run of the load client against a server."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from polygraft.bench.client import BenchError, Client
from polygraft.bench.load import Load, Popularity, choose_models, make_requests
from polygraft.bench.prompts import PromptSource
from polygraft.bench.report import Report, added_latency_buckets, histogram_median, report
from polygraft.errors import OptionError

SAMPLE_WORDS = 400
"""How much text is tokenized to learn how many words make the wanted number of tokens."""
WARMUP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do to which server."""

    url: str
    api_key: str | None
    models: tuple[str, ...]
    popularity: Popularity
    concurrency: int
    rate: float | None
    """Requests a second; None is a closed loop of `concurrency`."""
    requests: int
    prompt_tokens: int
    output_tokens: int
    warmup: int
    seed: int
    timeout: float
    metrics_url: str | None


async def run(plan: Plan, *, quiet: bool) -> Report:
    """Warm up, load and measure, with a progress bar on stderr unless `quiet`. Raises BenchError, httpx.HTTPError, and
    OptionError where a key is wanted and there is none.
    """
    prompts = PromptSource(plan.seed, words=await _words(plan))
    client = Client(plan.url, plan.api_key, plan.timeout)
    # The bar is drawn rarely: the machine is the server's.
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2, disable=quiet) as bars:
        await _warm_up(plan, client, prompts)
        before = await _added_latency(plan)
        task = bars.add_task("requests", total=plan.requests)
        load = Load(client, plan.output_tokens, on_done=lambda: bars.advance(task))
        chosen = choose_models(plan.models, plan.popularity, plan.seed)
        asked = make_requests(plan.requests, chosen, prompts)
        outcomes = (
            await load.closed_loop(asked, plan.concurrency)
            if plan.rate is None
            else await load.poisson(asked, plan.rate, plan.seed)
        )
        after = await _added_latency(plan)
    client.close()
    added = histogram_median(before, after)
    return report(outcomes, None if added is None else added * 1000)


async def _warm_up(plan: Plan, client: Client, prompts: PromptSource) -> None:
    """Every model at least once, unless there is no warm-up. Raises BenchError for a server that cannot do it."""
    count = max(plan.warmup, len(plan.models)) if plan.warmup else 0
    in_turn = iter([plan.models[number % len(plan.models)] for number in range(count)])
    load = Load(client, min(WARMUP_TOKENS, plan.output_tokens))
    # Numbers beyond the run's own, so that the run's prompts are new to the server.
    asked = make_requests(count, in_turn, prompts, first=plan.requests)
    outcomes = await load.closed_loop(asked, plan.concurrency)
    for outcome in outcomes:
        if outcome.error is not None:
            raise BenchError(f"{outcome.model}: {outcome.error}")


async def _words(plan: Plan) -> int:
    """How many words make a prompt of the wanted number of tokens, by the server's own tokenizer."""
    sample = PromptSource(plan.seed, SAMPLE_WORDS).prompt(-1)
    async with httpx.AsyncClient(base_url=plan.url, headers=_headers(plan.api_key), trust_env=False) as http:
        answer = await http.post("/tokenize", json={"model": plan.models[0], "prompt": sample})
        _require_success(answer)
        return max(4, round(plan.prompt_tokens * SAMPLE_WORDS / int(answer.json()["count"])))


async def _added_latency(plan: Plan) -> dict[float, float]:
    if plan.metrics_url is None:
        return {}
    async with httpx.AsyncClient(trust_env=False, follow_redirects=True) as http:
        answer = await http.get(plan.metrics_url)
        _require_success(answer)
        return added_latency_buckets(answer.text)


def first_model(url: str, api_key: str | None) -> str:
    """The first model that the server lists. Raises BenchError, OptionError, httpx.HTTPError."""
    answer = httpx.get(f"{url.rstrip('/')}/v1/models", headers=_headers(api_key), trust_env=False)
    _require_success(answer)
    listed = answer.json()["data"]
    if not listed:
        raise BenchError("the server serves no model yet")
    return str(listed[0]["id"])


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _require_success(answer: httpx.Response) -> None:
    if answer.status_code == 401 and "authorization" not in answer.request.headers:
        raise OptionError("which key? --api-key or POLYGRAFT_API_KEY")
    if answer.status_code != 200:
        raise BenchError(f"{answer.status_code}: {answer.text[:300]}")
