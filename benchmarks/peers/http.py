"""Servers under the load of `polygraft bench`: ours, and any other that speaks the OpenAI API."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .loads import OUTPUT_TOKENS, PROMPT_TOKENS, Load
from .processes import Server, ask, serving
from .results import OURS, Sample

CLIENT_TIMEOUT = 1800


@dataclass(frozen=True)
class HttpSide:
    """One system, measured over HTTP: a server for each group of loads, one run of the client for each load."""

    name: str
    base: str
    """The base model's name in requests."""
    adapters: Mapping[str, Path]
    logs: Path
    per_stream: int

    def server(self, loads: Sequence[Load]) -> Server:
        """The server that takes `loads`."""
        raise NotImplementedError

    def measure(self, loads: Sequence[Load], number: int) -> Iterator[Sample]:
        """See rounds.Side."""
        log = self.logs / f"{number}-{self.name}-{loads[0].name}.log"
        with serving(self.server(loads), log) as url:
            for load in loads:
                yield self._client(url, load, number)

    def _client(self, url: str, load: Load, number: int) -> Sample:
        names = load.models(self.base, list(self.adapters))
        command = [sys.executable, "-m", "polygraft", "bench", "--json", "--url", url, "--models", ",".join(names)]
        command += ["--popularity", load.popularity, "--concurrency", str(load.streams)]
        command += ["--requests", str(load.requests(self.per_stream)), "--warmup", str(max(4, load.streams))]
        command += ["--prompt-tokens", str(PROMPT_TOKENS), "--output-tokens", str(OUTPUT_TOKENS)]
        # The same prompts for both sides, new ones for every round and load.
        command += ["--seed", str(seed(load, number)), "--timeout", str(CLIENT_TIMEOUT)]
        log = self.logs / f"{number}-{self.name}-{load.name}-client.log"
        return sample(ask(command, log, {}), self.name, load, number)


def seed(load: Load, number: int) -> int:
    """Of the prompts of round `number`, the same on every machine."""
    return 1000 * number + sum(load.name.encode())


def sample(report: Mapping[str, Any], side: str, load: Load, number: int) -> Sample:
    """From the client's JSON report."""
    total = report["total"]
    return Sample(
        side=side,
        load=load.name,
        round=number,
        tokens_per_second=total["output_tokens_per_second"],
        ttft_p50=total["ttft_p50"],
        itl_p50=total["itl_p50"],
        requests=total["requests"],
        failures=total["failures"],
        prompt_tokens=total["prompt_tokens"],
        cached_prompt_tokens=total["cached_prompt_tokens"],
        errors=tuple(report["errors"]),
    )


@dataclass(frozen=True)
class Polygraft(HttpSide):
    """Our ordinary server, with every adapter registered; only the prefix cache is off."""

    model: Path = field(kw_only=True)

    def server(self, loads: Sequence[Load]) -> Server:
        """See HttpSide."""
        command = [sys.executable, "-m", "polygraft", "serve", str(self.model), "--served-model-name", self.base]
        command += ["--auth", "none", "--data-dir", str(self.data), "--port", "{port}", "--metrics-port", "0"]
        command += ["--no-enable-prefix-caching"]
        for name, folder in self.adapters.items():
            command += ["--adapter", f"{name}={folder}"]
        return Server(self.name, tuple(command), "/health/ready", {})

    @property
    def data(self) -> Path:
        """The server's folder, kept short: a Unix socket lies in it."""
        return self.logs / "data"


def polygraft(model: Path, adapters: Mapping[str, Path], logs: Path, per_stream: int) -> Polygraft:
    """Our side."""
    return Polygraft(OURS, "base", adapters, logs, per_stream, model=model)
