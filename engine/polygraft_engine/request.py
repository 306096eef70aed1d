"""One sequence on its way through the engine. The scheduler owns it; everybody else only reads."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import Enum

from polygraft_engine.kv.table import BlockTable
from polygraft_engine.types import EngineError, EngineLimits, FinishReason, Generation, InvalidRequest


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """A Generation and how far it has come.

    `tokens` is the prompt and the output so far. `computed` counts the leading tokens whose keys and values are stored:
    prefill, decode and recompute after preemption all mean to catch `computed` up with `tokens`.
    """

    __slots__ = (
        "adapter",
        "arrival",
        "arrived_at",
        "cached_tokens",
        "computed",
        "generation",
        "id",
        "prompt_length",
        "slot",
        "state",
        "table",
        "tokens",
    )

    def __init__(
        self, generation: Generation, tokens: list[int], table: BlockTable, arrival: int, arrived_at: float
    ) -> None:
        self.generation = generation
        self.id = generation.id
        self.adapter = generation.adapter
        self.tokens = tokens
        self.table = table
        self.arrival = arrival
        """Position in the order of arrival, unique."""
        self.arrived_at = arrived_at
        """The scheduler's clock, in seconds."""
        self.prompt_length = len(tokens)
        self.computed = 0
        self.slot = -1
        self.state = State.WAITING
        self.cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at the first admission; None before it."""

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens known but not yet computed."""
        return len(self.tokens) - self.computed

    @property
    def takes_prefix_hits(self) -> bool:
        """False while every prompt token's logits are still owed."""
        return self.generation.params.prompt_logprobs is None or self.output_length > 0

    def ending(self, eos_token_ids: frozenset[int], max_context: int) -> tuple[FinishReason | None, int | None]:
        """Why the sequence ends here, or None while it goes on; and the token that stopped it, if one did.

        A stop wins over a limit that falls on the same token.
        """
        params, length = self.generation.params, len(self.tokens) - self.prompt_length
        if 0 < length >= params.min_tokens:
            token = self.tokens[-1]
            if token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos):
                return "stop", token
        if length >= params.max_tokens or len(self.tokens) >= max_context:
            return "length", None
        return None, None


class Line:
    """Sequences in the order of their arrival, oldest first."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def oldest(self, count: int) -> list[Sequence]:
        """A copy of the first `count`, safe to walk while the line changes."""
        return self._items[:count]

    def youngest(self) -> Sequence:
        return self._items[-1]

    def add(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_arrival)

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._items, sequence.arrival, key=_arrival)
        assert self._items[index] is sequence, f"{sequence.id} is not in this line"
        del self._items[index]


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def check_limits(limits: EngineLimits) -> None:
    """Raises EngineError for limits under which nothing could run."""
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"):
        value = getattr(limits, name)
        if value < 1:
            raise EngineError(f"{name} is {value}; it must be at least 1")
    if limits.max_loras < 0:
        raise EngineError(f"max_loras is {limits.max_loras}; it must be at least 0")
    if limits.max_context < 2:
        raise EngineError(
            f"max_model_len {limits.max_model_len} and {limits.num_blocks} blocks of {limits.block_size} tokens leave "
            f"a context of {limits.max_context} tokens; a prompt token and an output token need at least 2"
        )


def validate(generation: Generation, limits: EngineLimits) -> None:
    """Raises InvalidRequest for a generation that could never run under these limits."""
    prompt, limit = len(generation.prompt), limits.max_context
    if prompt == 0:
        raise InvalidRequest("The prompt is empty: at least one token is needed.", param="prompt")
    if prompt >= limit:
        raise InvalidRequest(
            f"The context holds at most {limit} tokens, prompt and output together, but the prompt has {prompt} "
            f"tokens and {generation.params.max_tokens} more were requested. Shorten the prompt.",
            param="prompt",
            code="context_length_exceeded",
        )
    if generation.adapter is not None and limits.max_loras == 0:
        raise InvalidRequest("This engine serves no adapters: max_loras is 0.", param="model")
