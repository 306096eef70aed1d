"""A worker that speaks the queue's protocol and says what a script tells it, and a registry of fixed names."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import msgspec
from tokenizers import Tokenizer

from polygraft.card import ModelCard
from polygraft.errors import model_not_found
from polygraft.queue.messages import ChoiceDelta, Job, JobError, JobEvent, Usage, WorkerStatus
from polygraft.queue.worker import ClaimedJob, Emission, WorkerQueue
from polygraft.registry.types import ModelEntry, ResolvedModel
from polygraft.tenancy.principal import Principal
from polygraft_engine.types import FinishReason, TokenLogprob

Step = tuple[ChoiceDelta, ...] | JobError
Script = Callable[[Job], Iterator[Step]]
"""The steps of a job; an error ends it, and so does running out of steps."""


def status_of(worker: str, model: str) -> WorkerStatus:
    return WorkerStatus(
        id=worker,
        pid=1,
        host="h",
        model=model,
        state="ready",
        running=0,
        waiting=0,
        kv_blocks_total=10,
        kv_blocks_free=10,
        resident_adapters=(),
        last_seen=time.time(),
        stalled_seconds=0.0,
    )


@dataclass
class _Running:
    claimed: ClaimedJob
    steps: Iterator[Step]
    seq: int = 0
    generated: int = 0
    open: set[int] = field(default_factory=set)


class FakeWorker(threading.Thread):
    """Serves every card. `script` may be exchanged between calls; `jobs` and `cancelled` tell what it saw."""

    def __init__(self, url: str, cards: Mapping[str, ModelCard], script: Script) -> None:
        super().__init__(daemon=True)
        self.script = script
        self.pace = 0.0
        """Seconds that a step takes."""
        self.held = False
        """While true, no job is claimed: they wait in the queue."""
        self.jobs: list[Job] = []
        self.cancelled: list[str] = []
        self.steps = 0
        self.idle = threading.Event()
        """No job is running."""
        self._ending = threading.Event()
        self._nonces = map(str, itertools.count())
        self._queues = [WorkerQueue(url, f"worker-{name}", name) for name in cards]
        for queue in self._queues:
            queue.register(cards[queue.model], status_of(queue.worker_id, queue.model))
        self._running: dict[str, dict[str, _Running]] = {queue.model: {} for queue in self._queues}
        self._last_beat = time.monotonic()

    def stop(self) -> None:
        """End the thread and its connections."""
        self._ending.set()
        self.join()
        for queue in self._queues:
            queue.close()

    def run(self) -> None:
        while not self._ending.is_set():
            busy = False
            for queue in self._queues:
                busy |= self._turn(queue, self._running[queue.model])
            if busy:
                self.idle.clear()
            else:
                self.idle.set()
            time.sleep(max(self.pace, 0.001 if busy else 0.003))
            if time.monotonic() - self._last_beat > 1.0:
                self._last_beat = time.monotonic()
                for queue in self._queues:
                    queue.heartbeat(status_of(queue.worker_id, queue.model))

    def _turn(self, queue: WorkerQueue, running: dict[str, _Running]) -> bool:
        if not self.held:
            for claimed in queue.claim(16, next(self._nonces)):
                self.jobs.append(claimed.job)
                running[claimed.job.id] = _Running(claimed, self.script(claimed.job))
        if not running:
            return False
        self.steps += 1
        emissions = [self._step(each) for each in running.values()]
        ended = [emission.job for emission in emissions if emission.event is not None and emission.event.final]
        verdicts = queue.publish(time.time(), emissions)
        for job in (*ended, *verdicts.stale):
            running.pop(job, None)
        aborted = [running.pop(job) for job in sorted(verdicts.cancelled) if job in running]
        if aborted:
            self.cancelled += [each.claimed.job.id for each in aborted]
            queue.publish(time.time(), [_final(each, "abort") for each in aborted])
        return True

    def _step(self, each: _Running) -> Emission:
        step = next(each.steps, None)
        if step is None:
            return _final(each, None)
        job, attempt = each.claimed.job.id, each.claimed.attempt
        seq = each.seq
        each.seq += 1
        if isinstance(step, JobError):
            return Emission(job, attempt, JobEvent(job=job, seq=seq, error=step))
        each.generated += sum(len(delta.token_ids) for delta in step)
        return Emission(job, attempt, JobEvent(job=job, seq=seq, deltas=step))


def _final(each: _Running, reason: FinishReason | None) -> Emission:
    job = each.claimed.job
    usage = Usage(prompt_tokens=sum(map(len, job.prompts)), cached_tokens=1, completion_tokens=each.generated)
    deltas = () if reason is None else (ChoiceDelta(index=0, finish_reason=reason),)
    return Emission(job.id, each.claimed.attempt, JobEvent(job=job.id, seq=each.seq, deltas=deltas, usage=usage))


def saying(tokenizer: Tokenizer, text: str) -> Script:
    """Each choice says `text`, a token a step, within max_tokens, and finishes with its last token. The likeliest
    others are always tokens 5, 6, 7, …; the logprob of a token is minus its position, from 1.
    """
    ids = tokenizer.encode(text, add_special_tokens=False).ids

    def script(job: Job) -> Iterator[Step]:
        params = job.params
        choices = range(len(job.prompts) * params.n)
        said = ids[: params.max_tokens]
        reason: FinishReason = "length" if len(ids) > len(said) else "stop"
        for at, token in enumerate(said or [None]):
            yield tuple(
                ChoiceDelta(
                    index=index,
                    text="" if token is None else tokenizer.decode([token]),
                    token_ids=() if token is None else (token,),
                    logprobs=_scored(token, at, params.logprobs),
                    prompt_logprobs=_prompt_scored(job, index) if at == 0 else None,
                    finish_reason=reason if at + 1 >= len(said) else None,
                )
                for index in choices
            )

    return script


def _scored(token: int | None, at: int, count: int | None) -> tuple[TokenLogprob, ...]:
    if token is None or count is None:
        return ()
    return (TokenLogprob(token, -float(at + 1), tuple((5 + other, -0.5 - other) for other in range(count))),)


def _prompt_scored(job: Job, index: int) -> tuple[TokenLogprob, ...] | None:
    if (count := job.params.prompt_logprobs) is None:
        return None
    prompt = job.prompts[index // job.params.n]
    return tuple(_scored(token, at, count)[0] for at, token in enumerate(prompt[1:]))


@dataclass(frozen=True)
class FakeRegistry:
    """Knows the base models and these adapters of the base `base`: name → version."""

    cards: Mapping[str, ModelCard]
    adapters: Mapping[str, int]

    async def resolve(self, principal: Principal, name: str, conversation: str | None = None) -> ResolvedModel:
        if name in self.cards:
            return ResolvedModel(base=name, digest=None, adapter=None, version=None)
        adapter, _, version = name.partition("@v")
        if adapter in self.adapters:
            number = int(version) if version else self.adapters[adapter]
            return ResolvedModel(base="base", digest=f"sha256:{adapter}{number}", adapter=adapter, version=number)
        raise model_not_found(name)

    async def describe(self, principal: Principal, name: str) -> ModelEntry:
        resolved = await self.resolve(principal, name)
        listed = resolved.base if resolved.adapter is None else resolved.adapter
        entry = next(entry for entry in await self.list_models(principal) if entry.id == listed)
        return replace(entry, id=name)

    async def list_models(self, principal: Principal) -> list[ModelEntry]:
        bases = [ModelEntry(name, 7, "polygraft", None, card.max_model_len) for name, card in self.cards.items()]
        return bases + [ModelEntry(name, 8, "tenant", "base", 64) for name in self.adapters]


def error_of(body: bytes) -> dict[str, object]:
    """The error in a JSON body."""
    error: dict[str, object] = msgspec.json.decode(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


class NullObserver:
    """Observes nothing."""

    def first_token(self, model: str, seconds: float) -> None:
        """Nothing."""

    def inter_token(self, model: str, seconds: float) -> None:
        """Nothing."""

    def end_to_end(self, model: str, seconds: float) -> None:
        """Nothing."""

    def added_latency(self, seconds: float) -> None:
        """Nothing."""

    def tokens(self, model: str, prompt: int, cached: int, completion: int) -> None:
        """Nothing."""

    def outcome(self, model: str | None, status: int) -> None:
        """Nothing."""
