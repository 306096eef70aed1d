"""Medians, ratios, what voids a comparison, and how it is shown."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from benchmarks.peers.loads import Load
from benchmarks.peers.results import (
    OURS,
    Comparison,
    Sample,
    compare,
    counts,
    faults,
    median,
    summarize,
    table,
    to_json,
)
from rich.console import Console

LOADS = (Load("base-1", 1), Load("adapters8-16", 16, adapters=8))


def rounds(side: str, load: str, *rates: float, **counts: int) -> list[Sample]:
    return [
        Sample(side, load, number, rate, ttft_p50=10.0 * rate, itl_p50=rate, requests=8, **counts)
        for number, rate in enumerate(rates)
    ]


def shown(comparisons: tuple[Comparison, ...]) -> str:
    out = StringIO()
    Console(file=out, width=80).print(table(comparisons, "vllm"))
    return out.getvalue()


def test_a_median_passes_over_what_is_missing() -> None:
    assert median([3.0, None, 1.0, 2.0]) == 2.0
    assert median([None, None]) is None


def test_a_summary_takes_medians_of_rates_and_sums_of_counts() -> None:
    found = summarize(rounds(OURS, "base-1", 30.0, 10.0, 50.0, failures=1, prompt_tokens=100))
    assert (found.tokens_per_second, found.lowest, found.highest) == (30.0, 10.0, 50.0)
    assert (found.ttft_p50, found.itl_p50) == (300.0, 30.0)
    assert (found.rounds, found.requests, found.failures, found.prompt_tokens) == (3, 24, 3, 300)


def test_the_ratio_is_that_of_the_medians() -> None:
    # Round by round the ratios are 1, 8 and 9/8: their median is another number.
    samples = rounds(OURS, "base-1", 10.0, 80.0, 90.0) + rounds("vllm", "base-1", 10.0, 10.0, 80.0)
    (only,) = compare(LOADS, samples, "vllm")
    assert only.ratio == 8.0


def test_a_load_that_only_one_side_has_measured_is_left_out() -> None:
    samples = rounds(OURS, "base-1", 1.0) + rounds(OURS, "adapters8-16", 1.0) + rounds("vllm", "adapters8-16", 2.0)
    assert [each.load.name for each in compare(LOADS, samples, "vllm")] == ["adapters8-16"]


def test_there_is_no_ratio_to_a_peer_that_made_nothing() -> None:
    (only,) = compare(LOADS, rounds(OURS, "base-1", 5.0) + rounds("vllm", "base-1", 0.0), "vllm")
    assert only.ratio is None
    assert "–" in shown((only,))


@pytest.mark.parametrize("side", [OURS, "vllm"])
@pytest.mark.parametrize(
    ("counts", "told"), [({"failures": 2}, "2 of 8 requests"), ({"cached_prompt_tokens": 48}, "48 prompt tokens")]
)
def test_failures_and_cache_hits_of_either_side_void_a_comparison(side: str, counts: dict[str, int], told: str) -> None:
    other = "vllm" if side == OURS else OURS
    samples = rounds(side, "base-1", 5.0, **counts) + rounds(other, "base-1", 5.0)
    (line,) = faults(compare(LOADS, samples, "vllm"))
    assert line.startswith("base-1: ")
    assert told in line


def test_clean_figures_are_not_void() -> None:
    assert faults(compare(LOADS, rounds(OURS, "base-1", 5.0) + rounds("vllm", "base-1", 5.0), "vllm")) == ()


def test_the_table_holds_rates_ratio_and_latencies_in_80_columns() -> None:
    samples = [
        Sample(OURS, "adapters8-16", 0, 1234.5, ttft_p50=1200.4, itl_p50=17.6, requests=64),
        Sample("vllm", "adapters8-16", 0, 49.3, ttft_p50=17692.0, itl_p50=247.0, requests=64),
    ]
    text = shown(compare(LOADS, samples, "vllm"))
    row = next(line for line in text.splitlines() if "adapters8-16" in line)
    assert row.split()[0] == "adapters8-16"
    for part in ("1234.5", "49.3", "25.04×", "1200 / 17692", "18 / 247"):
        assert part in row


def test_failures_and_cache_hits_are_counted_over_all_loads() -> None:
    samples = rounds(OURS, "base-1", 5.0, 6.0, prompt_tokens=100) + rounds(OURS, "adapters8-16", 5.0)
    samples += rounds("vllm", "base-1", 5.0, failures=1) + rounds("vllm", "adapters8-16", 5.0, cached_prompt_tokens=7)
    assert counts(compare(LOADS, samples, "vllm"), "vllm") == (
        "polygraft: 0 of 24 requests failed, 0 of 200 prompt tokens cached; "
        "vllm: 1 of 16 requests failed, 7 of 0 prompt tokens cached"
    )


def test_a_side_that_does_not_stream_has_no_columns_of_latencies() -> None:
    samples = [*rounds(OURS, "base-1", 5.0), Sample("vllm", "base-1", 0, 5.0)]
    assert "TTFT" not in shown(compare(LOADS, samples, "vllm"))


def test_json_carries_every_sample_and_the_ratio() -> None:
    samples = rounds(OURS, "base-1", 6.0) + rounds("vllm", "base-1", 4.0, failures=1)
    found = json.loads(json.dumps(to_json(compare(LOADS, samples, "vllm"), samples, "vllm")))
    assert found["comparisons"][0]["ratio"] == 1.5
    assert found["comparisons"][0]["load"]["name"] == "base-1"
    assert [sample["side"] for sample in found["samples"]] == [OURS, "vllm"]
    assert len(found["faults"]) == 1
