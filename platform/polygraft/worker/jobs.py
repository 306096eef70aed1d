"""One job as it runs: from its choices' step outputs to its events. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import Tokenizer

from polygraft.blobs import BlobError, BlobUnavailable
from polygraft.queue.messages import ChoiceDelta, JobError, JobEvent, Usage
from polygraft.queue.worker import ClaimedJob, Emission
from polygraft_adapters.types import AdapterError
from polygraft_engine.text import OutputStage, TextDelta
from polygraft_engine.types import Generation, InvalidRequest, StepOutput

FAILED = JobError(
    status=500, type="server_error", code=None, message="The model failed while it computed this request."
)
STOPPED = JobError(
    status=503,
    type="service_unavailable_error",
    code="overloaded",
    message="The worker was stopped before this request was done; try again.",
)


def refusal(error: InvalidRequest) -> JobError:
    """400, in the engine's words."""
    return JobError(status=400, type="invalid_request_error", code=error.code, message=str(error), param=error.param)


def broken_adapter(name: str | None, error: BaseException) -> JobError:
    """422 for what is wrong with the adapter or its files, 503 where they cannot be read at present; 500 if the fault
    is our own.
    """
    if isinstance(error, AdapterError):
        problems = [
            {problem.kind: problem.where, "problem": problem.problem, "hint": problem.hint}
            for problem in error.problems
        ]
        return _invalid_adapter(f"The adapter `{name}` cannot be served: {error}.", tuple(problems))
    if isinstance(error, BlobUnavailable):
        return JobError(
            status=503,
            type="service_unavailable_error",
            code="dependency_unavailable",
            message=f"The files of the adapter `{name}` cannot be read at present; try again.",
        )
    if isinstance(error, BlobError):
        return _invalid_adapter(
            f"The adapter `{name}` cannot be served: its files are missing or damaged where they are stored. "
            "Upload it again."
        )
    return JobError(status=500, type="server_error", code=None, message=f"The adapter `{name}` could not be loaded.")


def overflow(name: str | None) -> JobError:
    """What a computation ends with whose numbers are not finite: the adapter's doing if there is one."""
    if name is None:
        return FAILED
    return _invalid_adapter(
        f"The adapter `{name}` makes the model compute numbers that are not finite: its weights or its scale are too "
        "large."
    )


def _invalid_adapter(message: str, problems: tuple[dict[str, str], ...] | None = None) -> JobError:
    return JobError(
        status=422,
        type="invalid_request_error",
        code="invalid_adapter",
        message=message,
        param="model",
        errors=problems,
    )


def unprepared(claimed: ClaimedJob) -> Emission:
    """The only event of a job that could not even be looked at."""
    return Emission(claimed.job.id, claimed.attempt, JobEvent(job=claimed.job.id, seq=0, error=FAILED))


@dataclass(slots=True)
class _Choice:
    generation: Generation
    stage: OutputStage
    finished: bool = False
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class RunningJob:
    """A claimed job with one Generation for each prompt and choice.

    What its choices did is gathered by `push` and given out as one event by `take`.
    """

    claimed: ClaimedJob
    choices: dict[str, _Choice]
    """By the Generation's id."""
    started: bool = False
    """In the engine."""
    ended: bool = False
    """Its final event has been taken."""
    _seq: int = 0
    _deltas: list[ChoiceDelta] = field(default_factory=list)

    @classmethod
    def prepare(cls, claimed: ClaimedJob, tokenizer: Tokenizer) -> RunningJob:
        """Generations and output stages, in the order of the answer's choices."""
        job = claimed.job
        choices: dict[str, _Choice] = {}
        for prompt in job.prompts:
            for choice in range(job.params.n):
                generation = Generation(
                    id=f"{job.id}/{claimed.attempt}/{len(choices)}",
                    prompt=prompt,
                    params=job.params,
                    adapter=job.adapter,
                    cache_namespace=job.cache_namespace,
                    choice=choice,
                )
                choices[generation.id] = _Choice(generation, OutputStage(tokenizer, job.params, prompt))
        return cls(claimed, choices)

    @property
    def id(self) -> str:
        return self.claimed.job.id

    @property
    def generations(self) -> list[Generation]:
        """All of them."""
        return [choice.generation for choice in self.choices.values()]

    @property
    def unfinished(self) -> list[str]:
        """Ids of the Generations that are still to be computed."""
        return [id for id, choice in self.choices.items() if not choice.finished]

    def push(self, output: StepOutput) -> bool:
        """Take one step's output of one choice. True when a stop string ended it, which the engine has to be told."""
        choice = self.choices[output.id]
        choice.cached_tokens = max(choice.cached_tokens, output.cached_tokens)
        delta = choice.stage.push(output)
        choice.completion_tokens = delta.completion_tokens
        choice.finished = delta.finish_reason is not None
        if delta.text or delta.token_ids or choice.finished or output.prompt_logprobs is not None:
            self._deltas.append(self._delta(output, delta))
        return choice.finished and output.finish_reason is None

    def take(self) -> Emission | None:
        """What has been gathered since the last time, if anything; with the last choice's end, the final event."""
        final = not self.unfinished
        if not self._deltas and not final:
            return None
        return self._emit(usage=self._usage() if final else None)

    def abort(self) -> Emission:
        """The final event of a job that was cancelled."""
        for index, choice in enumerate(self.choices.values()):
            if not choice.finished:
                choice.finished = True
                self._deltas.append(ChoiceDelta(index=index, finish_reason="abort"))
        return self._emit(usage=self._usage())

    def fail(self, error: JobError) -> Emission:
        """The final event of a job that cannot go on."""
        self._deltas.clear()
        return self._emit(usage=self._usage(), error=error)

    def keep(self) -> Emission:
        """Nothing new, but the lease is renewed."""
        return Emission(self.id, self.claimed.attempt)

    def _emit(self, usage: Usage | None, error: JobError | None = None) -> Emission:
        event = JobEvent(job=self.id, seq=self._seq, deltas=tuple(self._deltas), usage=usage, error=error)
        self._seq += 1
        self._deltas.clear()
        self.ended = event.final
        return Emission(self.id, self.claimed.attempt, event)

    def _delta(self, output: StepOutput, delta: TextDelta) -> ChoiceDelta:
        return ChoiceDelta(
            index=int(output.id.rpartition("/")[2]),
            text=delta.text,
            token_ids=delta.token_ids,
            logprobs=delta.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def _usage(self) -> Usage:
        """Prompts count once, whatever n is, by their first choice. What never reached the engine used nothing."""
        job = self.claimed.job
        if not self.started:
            return Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)
        firsts = [choice for choice in self.choices.values() if choice.generation.choice == 0]
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in job.prompts),
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
            completion_tokens=sum(choice.completion_tokens for choice in self.choices.values()),
        )
