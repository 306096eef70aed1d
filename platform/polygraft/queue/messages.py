"""What travels between gateways and workers, encoded as MessagePack."""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal

import msgspec

from polygraft_engine.types import FinishReason, SamplingParams, TokenLogprob


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One API call: `params.n` choices for each prompt. Choice `p * n + i` of the answer is choice i of prompt p."""

    id: str
    """Made by the server, never by a client."""
    model: str
    tenant: str
    gateway: str
    adapter: str | None
    """The adapter's digest; None is the base model."""
    adapter_name: str | None = None
    """The adapter as its tenant knows it, for errors."""
    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    cache_namespace: str
    submitted_at: float
    """Unix seconds."""
    deadline: float | None = None
    """Unix seconds after which the job is dropped or cancelled."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one job. The prompt counts once per prompt, whatever n is."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class JobError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job failed, in the API's words."""

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None
    errors: tuple[dict[str, str], ...] | None = None
    """What is wrong in detail, where there is more than one thing."""


class ChoiceDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one choice. `text` may be empty while a stop string or an unfinished character is
    held back.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    """Tokens whose text begins in `text`; with logprobs asked for, `logprobs` has one entry for each."""
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, when one did (vLLM's name)."""


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One step's news of one job. The last event carries `usage`, and `error` if the job failed."""

    job: str
    seq: int
    """Counts from 0 without a gap; a gateway that sees one reads the job's record again."""
    deltas: tuple[ChoiceDelta, ...] = ()
    usage: Usage | None = None
    error: JobError | None = None

    @property
    def final(self) -> bool:
        """Whether the job has ended."""
        return self.usage is not None or self.error is not None


class StepMessage(msgspec.Struct, frozen=True, kw_only=True):
    """All news of one step for one gateway."""

    step_ended: float
    """Unix seconds at which the engine's step ended; the gateway measures its own share of the latency from here."""
    events: tuple[JobEvent, ...]


Refusal = Literal["invalid_api_key", "tenant_disabled"]
"""Why a key that was good is turned away from now on."""


class AccessChange(msgspec.Struct, frozen=True, kw_only=True):
    """What all gateways are told when a key or a tenant was changed."""

    kind: Literal["key", "tenant"]
    id: str
    refusal: Refusal | None = None
    """Why its running requests end; None: they go on, and only what is remembered of it is to be read again."""


LOAD_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds by which loads of adapters are counted."""


class LoadTimes(msgspec.Struct, frozen=True):
    """How long loads of adapters took: how many up to each of LOAD_SECONDS and beyond the last, and all together."""

    counts: tuple[int, ...] = (0,) * (len(LOAD_SECONDS) + 1)
    seconds: float = 0.0

    def __add__(self, other: LoadTimes) -> LoadTimes:
        return LoadTimes(
            tuple(mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)),
            self.seconds + other.seconds,
        )

    @classmethod
    def of(cls, seconds: float) -> LoadTimes:
        """One load."""
        bucket = bisect_left(LOAD_SECONDS, seconds)
        return cls(tuple(int(at == bucket) for at in range(len(LOAD_SECONDS) + 1)), seconds)


WorkerState = Literal["loading", "ready", "draining"]


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's heartbeat."""

    id: str
    pid: int
    host: str
    model: str
    state: WorkerState
    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_free: int
    resident_adapters: tuple[str, ...]
    last_seen: float
    """Unix seconds."""
    stalled_seconds: float
    """How long the engine's present step has been running with work waiting; 0 when idle."""
    step_seconds: dict[str, float] = {}
    """Time spent in engine steps since start, by phase."""
    steps: int = 0
    adapter_loads: LoadTimes = LoadTimes()
    metrics: dict[str, float] = {}
    """Counters and gauges for the metrics listener, by Prometheus name without the prefix."""
