"""Figures out of outcomes."""

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from polygraft.bench.load import Outcome
from polygraft.bench.report import ADDED_LATENCY, added_latency_buckets, histogram_median, percentile, report


def outcome(model: str, began: float, arrivals: list[float], error: str | None = None) -> Outcome:
    tokens = len(arrivals)
    return Outcome(
        model, began, began + 10.0, arrivals, prompt_tokens=100, cached_tokens=16, output_tokens=tokens, error=error
    )


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([3.0], 0.99, 3.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([0.0, 100.0], 0.99, 99.0),
    ],
)
def test_percentiles_interpolate_between_ranks(values: list[float], share: float, expected: float | None) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_a_run_is_told_per_model_and_in_all() -> None:
    run = report(
        [
            outcome("a", 0.0, [1.0, 1.1, 1.2]),
            outcome("b", 5.0, [7.0, 7.3]),
            outcome("b", 10.0, [], error="503: overloaded"),
        ],
        added_latency_ms=1.5,
    )
    assert run.seconds == 20.0
    assert [(row.model, row.requests, row.failures) for row in run.models] == [("a", 1, 0), ("b", 2, 1)]
    a, b = run.models
    assert a.output_tokens_per_second == pytest.approx(3 / 20)
    assert a.ttft_p50 == pytest.approx(1000)
    assert a.itl_p50 == pytest.approx(100)
    assert b.ttft_p50 == pytest.approx(2000)
    assert (run.total.output_tokens, run.total.prompt_tokens, run.total.cached_prompt_tokens) == (5, 200, 32)
    assert run.total.total_tokens_per_second == pytest.approx(205 / 20)
    assert run.errors == {"503: overloaded": 1}
    assert run.json()["added_latency_ms_p50"] == 1.5


def test_the_median_of_what_a_histogram_gained_between_two_readings() -> None:
    registry = CollectorRegistry()
    histogram = Histogram(ADDED_LATENCY, "added", buckets=(0.001, 0.002, 0.004), registry=registry)
    for _ in range(100):
        histogram.observe(1.0)
    before = added_latency_buckets(generate_latest(registry).decode())
    for seconds in (0.0005, 0.0015, 0.0015, 0.003):
        histogram.observe(seconds)
    after = added_latency_buckets(generate_latest(registry).decode())
    # Half of the four lies in the middle of the second bucket's two.
    assert histogram_median(before, after) == pytest.approx(0.0015)
    assert histogram_median(after, after) is None
    assert histogram_median({}, {}) is None
