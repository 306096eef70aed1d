"""From outcomes to figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE_HEAD
from rich.table import Table

from polygraft.bench.load import Outcome

ADDED_LATENCY = "polygraft_added_latency_seconds"


def percentile(values: Sequence[float], share: float) -> float | None:
    """The `share` quantile by linear interpolation between ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one model or of all. Latencies in milliseconds."""

    model: str
    requests: int
    failures: int
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int


def figures(model: str, outcomes: Sequence[Outcome], seconds: float) -> Figures:
    """Sums and quantiles over those that succeeded, within a run of `seconds`."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    first = [(outcome.arrivals[0] - outcome.began) * 1000 for outcome in good if outcome.arrivals]
    gaps = [(later - earlier) * 1000 for outcome in good for earlier, later in pairwise(outcome.arrivals)]
    prompt = sum(outcome.prompt_tokens for outcome in good)
    output = sum(outcome.output_tokens for outcome in good)
    return Figures(
        model=model,
        requests=len(outcomes),
        failures=len(outcomes) - len(good),
        output_tokens_per_second=output / seconds,
        total_tokens_per_second=(prompt + output) / seconds,
        ttft_p50=percentile(first, 0.5),
        ttft_p99=percentile(first, 0.99),
        itl_p50=percentile(gaps, 0.5),
        itl_p99=percentile(gaps, 0.99),
        prompt_tokens=prompt,
        cached_prompt_tokens=sum(outcome.cached_tokens for outcome in good),
        output_tokens=output,
    )


@dataclass(frozen=True, slots=True)
class Report:
    """A run: all requests together, and each model's."""

    seconds: float
    total: Figures
    models: tuple[Figures, ...]
    errors: dict[str, int]
    """How often each failure was told."""
    added_latency_ms_p50: float | None = None

    def json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


def report(outcomes: Sequence[Outcome], added_latency_ms: float | None = None) -> Report:
    """What the run shows. The clock runs from the first request's start to the last one's end."""
    seconds = max(outcome.ended for outcome in outcomes) - min(outcome.began for outcome in outcomes)
    by_model: dict[str, list[Outcome]] = {}
    errors: dict[str, int] = {}
    for outcome in outcomes:
        by_model.setdefault(outcome.model, []).append(outcome)
        if outcome.error is not None:
            errors[outcome.error] = errors.get(outcome.error, 0) + 1
    return Report(
        seconds=seconds,
        total=figures("all", outcomes, seconds),
        models=tuple(figures(model, found, seconds) for model, found in sorted(by_model.items())),
        errors=errors,
        added_latency_ms_p50=added_latency_ms,
    )


def table(run: Report) -> Table:
    """For people; fits 80 columns unless a model's name is long."""
    shown = Table(title=f"{run.total.requests} requests in {run.seconds:.1f} s", box=SIMPLE_HEAD)
    shown.add_column("model", overflow="fold")
    for column in ("requests\nfailed", "output\ntok/s", "total\ntok/s", "TTFT ms\np50 / p99", "ITL ms\np50 / p99",
                   "prompt\ntokens", "from\ncache"):  # fmt: skip
        shown.add_column(column, justify="right", no_wrap=True)
    for row in (*(run.models if len(run.models) > 1 else ()), run.total):
        shown.add_row(
            row.model,
            f"{row.requests} / {row.failures}",
            f"{row.output_tokens_per_second:.1f}",
            f"{row.total_tokens_per_second:.1f}",
            f"{_ms(row.ttft_p50)} / {_ms(row.ttft_p99)}",
            f"{_ms(row.itl_p50)} / {_ms(row.itl_p99)}",
            str(row.prompt_tokens),
            str(row.cached_prompt_tokens),
            end_section=row is run.models[-1],
        )
    return shown


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def added_latency_buckets(metrics: str) -> dict[float, float]:
    """Cumulative counts by upper bound (seconds) of the server's added-latency histogram, from its metrics page."""
    return {
        float(sample.labels["le"]): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == f"{ADDED_LATENCY}_bucket"
    }


def histogram_median(before: Mapping[float, float], after: Mapping[float, float]) -> float | None:
    """The median of what was observed between two readings, interpolated within its bucket; None of nothing."""
    counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
    if not counts or counts[-1][1] == 0:
        return None
    half = counts[-1][1] / 2
    lower, below = 0.0, 0.0
    for bound, cumulative in counts:
        if cumulative >= half:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (half - below) / (cumulative - below)
        lower, below = bound, cumulative
    raise AssertionError("the last bucket holds everything")


def most_told(errors: Mapping[str, int], limit: int = 5) -> Iterable[str]:
    """The most frequent failures, with their counts."""
    ranked = sorted(errors.items(), key=lambda item: -item[1])
    return (f"{count} × {error}" for error, count in ranked[:limit])
