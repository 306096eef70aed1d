"""`polygraft bench`."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Annotated

import httpx
import typer
import uvloop
from rich.console import Console

from polygraft.bench.client import BenchError
from polygraft.bench.load import Popularity
from polygraft.bench.report import Report, most_told, table
from polygraft.bench.run import Plan, first_model, run
from polygraft.cli.remote import DEFAULT_URL, authorization, server_url
from polygraft.errors import ConfigError


def bench(
    url: Annotated[str, typer.Option(envvar="POLYGRAFT_URL", help="The server.")] = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(envvar="POLYGRAFT_API_KEY", help="A tenant's key.")] = None,
    models: Annotated[
        str | None, typer.Option(help="Model names, separated by commas; default: the server's first model.")
    ] = None,
    popularity: Annotated[
        Popularity, typer.Option(help="Who is asked: the first model only, all alike, or the k-th 1/k as often.")
    ] = "uniform",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time (closed loop).")] = 16,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second (Poisson arrivals) instead of a closed loop.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many in all.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=8, help="Length of a prompt, about.")] = 126,
    output_tokens: Annotated[int, typer.Option(min=1, help="Length of an answer, exactly.")] = 64,
    warmup: Annotated[int, typer.Option(min=0, help="Short requests before the clock runs, over all models.")] = 16,
    seed: Annotated[int | None, typer.Option(help="Repeats a run's prompts and choices; default: new ones.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for one request.")] = 600.0,
    metrics_url: Annotated[
        str | None, typer.Option(help="The server's metrics page, for what gateway and queue add.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
) -> None:
    """Load a running server with streamed completions; print tokens per second and latencies, per model and in all."""
    url = server_url(url)
    authorization(api_key)  # refuses what cannot be a key
    named = tuple(name for name in models.split(",") if name) if models is not None else ()
    try:
        plan = Plan(
            url=url,
            api_key=api_key,
            models=named if named else (first_model(url, api_key),),
            popularity=popularity,
            concurrency=concurrency,
            rate=rate,
            requests=requests,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            warmup=warmup,
            seed=secrets.randbits(32) if seed is None else seed,
            timeout=timeout,
            metrics_url=metrics_url,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(run(plan, quiet=as_json))
    except (BenchError, httpx.HTTPError) as error:
        raise ConfigError(f"{url}: {error}") from None
    if as_json:
        typer.echo(json.dumps(found.json(), indent=2))
    else:
        _show(found)
    if found.total.failures:
        raise typer.Exit(1)


def _show(found: Report) -> None:
    console = Console()
    console.print(table(found))
    total = found.total
    if total.prompt_tokens:
        console.print(f"{total.cached_prompt_tokens} of {total.prompt_tokens} prompt tokens came from the prefix cache")
    if found.added_latency_ms_p50 is not None:
        console.print(f"gateway and queue add {found.added_latency_ms_p50:.2f} ms (median)")
    for line in most_told(found.errors):
        console.print(f"[red]failed[/red] {line}", highlight=False)
