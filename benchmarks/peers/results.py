"""From single measurements to medians, ratios, a table and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .loads import Load

OURS = "polygraft"


@dataclass(frozen=True, slots=True)
class Sample:
    """One side under one load in one round. Latencies in milliseconds; None where a side does not stream."""

    side: str
    load: str
    round: int
    tokens_per_second: float
    ttft_p50: float | None = None
    itl_p50: float | None = None
    requests: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Summary:
    """One side under one load, over all rounds: medians of rates and latencies, sums of counts."""

    rounds: int
    tokens_per_second: float
    lowest: float
    highest: float
    ttft_p50: float | None
    itl_p50: float | None
    requests: int
    failures: int
    prompt_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides under one load."""

    load: Load
    ours: Summary
    peer: Summary

    @property
    def ratio(self) -> float | None:
        """Our median throughput over the peer's; None where the peer's is 0."""
        if self.peer.tokens_per_second == 0:
            return None
        return self.ours.tokens_per_second / self.peer.tokens_per_second


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None of none."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def summarize(samples: Sequence[Sample]) -> Summary:
    """Of one side's samples under one load; at least one."""
    rates = [sample.tokens_per_second for sample in samples]
    return Summary(
        rounds=len(samples),
        tokens_per_second=statistics.median(rates),
        lowest=min(rates),
        highest=max(rates),
        ttft_p50=median(sample.ttft_p50 for sample in samples),
        itl_p50=median(sample.itl_p50 for sample in samples),
        requests=sum(sample.requests for sample in samples),
        failures=sum(sample.failures for sample in samples),
        prompt_tokens=sum(sample.prompt_tokens for sample in samples),
        cached_prompt_tokens=sum(sample.cached_prompt_tokens for sample in samples),
    )


def compare(loads: Sequence[Load], samples: Sequence[Sample], peer: str) -> tuple[Comparison, ...]:
    """Every load that both sides have measured, in the order of `loads`."""
    found = []
    for load in loads:
        ours = [sample for sample in samples if sample.load == load.name and sample.side == OURS]
        theirs = [sample for sample in samples if sample.load == load.name and sample.side == peer]
        if ours and theirs:
            found.append(Comparison(load, summarize(ours), summarize(theirs)))
    return tuple(found)


def faults(comparisons: Sequence[Comparison]) -> tuple[str, ...]:
    """What makes the figures void: requests that failed, prompts that a cache answered."""
    found = []
    for each in comparisons:
        for side, summary in ((OURS, each.ours), ("the peer", each.peer)):
            if summary.failures:
                found.append(f"{each.load.name}: {summary.failures} of {summary.requests} requests to {side} failed")
            if summary.cached_prompt_tokens:
                found.append(f"{each.load.name}: {side} took {summary.cached_prompt_tokens} prompt tokens from a cache")
    return tuple(found)


def counts(comparisons: Sequence[Comparison], peer: str) -> str:
    """Requests, failures and cache hits of both sides, in one line."""
    told = []
    for side, summaries in ((OURS, [each.ours for each in comparisons]), (peer, [each.peer for each in comparisons])):
        failures, requests = sum(each.failures for each in summaries), sum(each.requests for each in summaries)
        cached, prompts = (
            sum(each.cached_prompt_tokens for each in summaries),
            sum(each.prompt_tokens for each in summaries),
        )
        told.append(f"{side}: {failures} of {requests} requests failed, {cached} of {prompts} prompt tokens cached")
    return "; ".join(told)


def table(comparisons: Sequence[Comparison], peer: str) -> Table:
    """For people, within 80 columns. Latencies only where both sides stream."""
    streamed = all(each.ours.ttft_p50 is not None and each.peer.ttft_p50 is not None for each in comparisons)
    shown = Table(title=f"{OURS} against {peer}: medians, output tokens/s", box=SIMPLE_HEAD)
    shown.add_column("load", no_wrap=True)
    latencies = ("TTFT ms\nours / peer", "ITL ms\nours / peer") if streamed else ()
    for column in ("ours", "peer", "ratio", *latencies):
        shown.add_column(column, justify="right", no_wrap=True)
    for each in comparisons:
        ours, theirs = each.ours, each.peer
        times = (
            f"{_whole(ours.ttft_p50)} / {_whole(theirs.ttft_p50)}",
            f"{_whole(ours.itl_p50)} / {_whole(theirs.itl_p50)}",
        )
        shown.add_row(
            each.load.name,
            f"{ours.tokens_per_second:.1f}",
            f"{theirs.tokens_per_second:.1f}",
            "–" if each.ratio is None else f"{each.ratio:.2f}×",
            *(times if streamed else ()),
        )
    return shown


def to_json(comparisons: Sequence[Comparison], samples: Sequence[Sample], peer: str) -> dict[str, Any]:
    """For machines: the comparisons and every sample behind them."""
    return {
        "peer": peer,
        "comparisons": [asdict(each) | {"ratio": each.ratio} for each in comparisons],
        "samples": [asdict(sample) for sample in samples],
        "faults": list(faults(comparisons)),
    }


def _whole(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"
