"""Prometheus metrics of the gateway and, from their heartbeats, of the workers. Labels: model, status, state,
phase.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, make_asgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from polygraft.errors import ApiError
from polygraft.queue.messages import LOAD_SECONDS, LoadTimes, WorkerStatus
from polygraft.registry.live import LiveModels

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_STEP_SECONDS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.2, 0.4, 1.0, 5.0)
_ADDED_SECONDS = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5)


# A second series beside each counter, of which nobody asks.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One registry of its own. Is the Observer that the OpenAI routes tell their news."""

    def __init__(self, live: LiveModels) -> None:
        self.registry = CollectorRegistry()
        self._responses = self._counter("http_responses", "Answers of every route by status.", "status")
        self._requests = self._counter("requests", "Inference calls by how they ended.", "model", "status")
        self._refusals = self._counter("refusals", "Requests that were refused, by reason.", "status", "reason")
        self._first = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._inter = self._histogram("inter_token_seconds", "Between two arrivals of tokens.", _STEP_SECONDS)
        self._whole = self._histogram("request_seconds", "From arrival to the end of the answer.", _SECONDS)
        self._added = Histogram(
            "polygraft_added_latency_seconds",
            "From the end of an engine step to the write on the socket: what queue and gateway add.",
            buckets=_ADDED_SECONDS,
            registry=self.registry,
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens.", "model")
        self._cached = self._counter("cached_prompt_tokens", "Prompt tokens that the prefix cache spared.", "model")
        self._completion = self._counter("completion_tokens", "Generated tokens.", "model")
        self.registry.register(_Workers(live))

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"polygraft_{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Callable[[str], Histogram]:
        """One histogram for each model, found quickly: tokens are observed one by one."""
        return cache(Histogram(f"polygraft_{name}", help, ("model",), buckets=buckets, registry=self.registry).labels)

    def response(self, status: int) -> None:
        """An answer of any route."""
        self._responses.labels(status).inc()

    def refusal(self, error: ApiError) -> None:
        """An answer that is an error of the API; its code is the reason, or its type where that says it all."""
        self._refusals.labels(error.status, error.type if error.code is None else error.code).inc()

    def first_token(self, model: str, seconds: float) -> None:
        """See Observer."""
        self._first(model).observe(seconds)

    def inter_token(self, model: str, seconds: float) -> None:
        """See Observer."""
        self._inter(model).observe(seconds)

    def end_to_end(self, model: str, seconds: float) -> None:
        """See Observer."""
        self._whole(model).observe(seconds)

    def added_latency(self, seconds: float) -> None:
        """See Observer."""
        # Clocks of two machines may disagree by more than the latency.
        self._added.observe(max(seconds, 0.0))

    def tokens(self, model: str, prompt: int, cached: int, completion: int) -> None:
        """See Observer."""
        self._prompt.labels(model).inc(prompt)
        self._cached.labels(model).inc(cached)
        self._completion.labels(model).inc(completion)

    def outcome(self, model: str | None, status: int) -> None:
        """See Observer."""
        self._requests.labels("" if model is None else model, status).inc()

    def app(self) -> ASGIApp:
        """The listener's application."""
        return make_asgi_app(self.registry)


class _Workers(Collector):
    """Sums over the workers of a model; one worker's own numbers would need a label that grows without bound."""

    def __init__(self, live: LiveModels) -> None:
        self._live = live

    def describe(self) -> Iterable[Metric]:
        """Nothing in advance: what workers report is theirs to say."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The numbers of the last heartbeats."""
        now = self._live.now
        yield GaugeMetricFamily("polygraft_queue_depth", "Jobs that wait for a worker.", value=now.queued)
        states = GaugeMetricFamily("polygraft_workers", "Live workers by state.", labels=("model", "state"))
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for worker in now.workers:
            counts[worker.model, worker.state] += 1
        for (model, state), count in sorted(counts.items()):
            states.add_metric((model, state), count)
        yield states
        phases = CounterMetricFamily(
            "polygraft_step_seconds",
            "Time in engine steps by phase, summed over the workers.",
            labels=("model", "phase"),
        )
        spent: dict[tuple[str, str], float] = defaultdict(float)
        for worker in now.workers:
            for phase, seconds in worker.step_seconds.items():
                spent[worker.model, phase] += seconds
        for (model, phase), seconds in sorted(spent.items()):
            phases.add_metric((model, phase), seconds)
        yield phases
        yield _load_seconds(now.workers)
        for name, by_model in sorted(_sums(now.workers).items()):
            family: GaugeMetricFamily | CounterMetricFamily
            if name.endswith("_total"):
                family = CounterMetricFamily(f"polygraft_{name}", "Summed over the workers.", labels=("model",))
            else:
                family = GaugeMetricFamily(f"polygraft_{name}", "Summed over the workers.", labels=("model",))
            for model, value in sorted(by_model.items()):
                family.add_metric((model,), value)
            yield family


def _load_seconds(workers: Iterable[WorkerStatus]) -> Metric:
    """How long adapters took from the blob store into a worker's memory."""
    by_model: dict[str, LoadTimes] = {}
    for worker in workers:
        known = by_model.get(worker.model)
        by_model[worker.model] = worker.adapter_loads if known is None else known + worker.adapter_loads
    family = HistogramMetricFamily(
        "polygraft_adapter_load_seconds", "From the blob store into a worker's memory.", labels=("model",)
    )
    for model, times in sorted(by_model.items()):
        bounds = [*map(str, LOAD_SECONDS), "+Inf"]
        family.add_metric((model,), list(zip(bounds, accumulate(times.counts), strict=True)), times.seconds)
    return family


def _sums(workers: Iterable[WorkerStatus]) -> dict[str, dict[str, float]]:
    """metric -> model -> sum."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for worker in workers:
        reported = {
            "requests_running": float(worker.running),
            "requests_waiting": float(worker.waiting),
            "kv_blocks": float(worker.kv_blocks_total),
            "kv_blocks_free": float(worker.kv_blocks_free),
            "adapters_resident": float(len(worker.resident_adapters)),
            "steps_total": float(worker.steps),
            **worker.metrics,
        }
        for name, value in reported.items():
            sums[name][worker.model] += value
    return sums
