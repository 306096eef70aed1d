"""The answers of the two endpoints: whole, and as the chunks of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from polygraft.openai import wire
from polygraft.openai.logprobs import BytesOf, CompletionLogprobsWriter, chat_logprobs
from polygraft.queue.messages import ChoiceDelta, Usage


@dataclass(frozen=True, slots=True)
class Head:
    """What is the same in every chunk of an answer."""

    id: str
    created: int
    model: str
    """As the client asked for it."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that its completions begin with."""

    ids: tuple[int, ...]
    text: str


class Format(Protocol):
    """How the answer to one call is written. It belongs to that call and remembers which choices it has opened."""

    def chunks(self, delta: ChoiceDelta) -> list[msgspec.Struct]:
        """The chunks that tell this news of one choice: its opening the first time, what was added, its end."""

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The chunk without choices that tells the usage."""

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> msgspec.Struct:
        """The answer in one piece, of complete choices in order."""


class ChatFormat:
    """POST /v1/chat/completions. `bytes_of` is None if no logprobs were asked for; `include_usage` makes each chunk say
    that its usage is null.
    """

    def __init__(self, head: Head, *, include_usage: bool, bytes_of: BytesOf | None) -> None:
        self._head = head
        self._usage: UnsetType | None = None if include_usage else UNSET
        self._bytes_of = bytes_of
        self._opened: set[int] = set()

    def chunks(self, delta: ChoiceDelta) -> list[msgspec.Struct]:
        """See Format. The opening carries the role."""
        choices: list[wire.ChatChunkChoice] = []
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            choices.append(wire.ChatChunkChoice(delta.index, wire.Delta(role="assistant", content="")))
        if delta.text or delta.logprobs:
            choices.append(
                wire.ChatChunkChoice(delta.index, wire.Delta(content=delta.text), logprobs=self._logprobs(delta))
            )
        if delta.finish_reason is not None:
            choices.append(
                wire.ChatChunkChoice(
                    delta.index, wire.Delta(), finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
                )
            )
        return [self._chunk([choice]) for choice in choices]

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """See Format."""
        return wire.ChatChunk(self._head.id, self._head.created, self._head.model, [], wire.Usage.of(usage))

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> msgspec.Struct:
        """See Format."""
        answers = [
            wire.ChatChoice(
                choice.index,
                wire.ChatMessage(choice.text),
                str(choice.finish_reason),
                self._logprobs(choice),
                choice.stop_reason,
            )
            for choice in choices
        ]
        return wire.ChatCompletion(self._head.id, self._head.created, self._head.model, answers, wire.Usage.of(usage))

    def _chunk(self, choices: list[wire.ChatChunkChoice]) -> wire.ChatChunk:
        return wire.ChatChunk(self._head.id, self._head.created, self._head.model, choices, self._usage)

    def _logprobs(self, delta: ChoiceDelta) -> wire.ChatLogprobs | None:
        return None if self._bytes_of is None else chat_logprobs(delta.logprobs, self._bytes_of)


class CompletionFormat:
    """POST /v1/completions. `new_writer` makes what writes one choice's logprobs, None if none were asked for; `echoes`
    are the prompts to begin with, if asked for: choice p * n + i has prompt p.
    """

    def __init__(
        self,
        head: Head,
        *,
        include_usage: bool,
        new_writer: Callable[[], CompletionLogprobsWriter] | None,
        n: int,
        echoes: Sequence[Echo] | None,
    ) -> None:
        self._head = head
        self._usage: UnsetType | None = None if include_usage else UNSET
        self._new_writer = new_writer
        self._n = n
        self._echoes = echoes
        self._opened: set[int] = set()
        self._writers: dict[int, CompletionLogprobsWriter] = {}

    def chunks(self, delta: ChoiceDelta) -> list[msgspec.Struct]:
        """See Format. The opening carries the echo; without one there is none."""
        choices: list[wire.CompletionChoice] = []
        if delta.index not in self._opened:
            self._opened.add(delta.index)
            if self._echoes is not None:
                choices.append(
                    wire.CompletionChoice(delta.index, self._echo(delta.index).text, self._prompt_logprobs(delta))
                )
        if delta.text or delta.logprobs:
            choices.append(wire.CompletionChoice(delta.index, delta.text, self._logprobs(delta)))
        if delta.finish_reason is not None:
            choices.append(
                wire.CompletionChoice(delta.index, "", finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
            )
        return [
            wire.Completion(self._head.id, self._head.created, self._head.model, [choice], self._usage)
            for choice in choices
        ]

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """See Format."""
        return wire.Completion(self._head.id, self._head.created, self._head.model, [], wire.Usage.of(usage))

    def whole(self, choices: Sequence[ChoiceDelta], usage: Usage) -> msgspec.Struct:
        """See Format."""
        answers = [self._answer(choice) for choice in choices]
        return wire.Completion(self._head.id, self._head.created, self._head.model, answers, wire.Usage.of(usage))

    def _answer(self, choice: ChoiceDelta) -> wire.CompletionChoice:
        text = choice.text
        prompt_logprobs = None
        if self._echoes is not None:
            text = self._echo(choice.index).text + text
            prompt_logprobs = self._prompt_logprobs(choice)
        logprobs = self._logprobs(choice)
        if logprobs is not None and prompt_logprobs is not None:
            logprobs = prompt_logprobs.followed_by(logprobs)
        return wire.CompletionChoice(choice.index, text, logprobs, choice.finish_reason, choice.stop_reason)

    def _echo(self, index: int) -> Echo:
        assert self._echoes is not None
        return self._echoes[index // self._n]

    def _prompt_logprobs(self, delta: ChoiceDelta) -> wire.CompletionLogprobs | None:
        if delta.prompt_logprobs is None or (writer := self._writer(delta.index)) is None:
            return None
        echo = self._echo(delta.index)
        return writer.prompt(echo.ids, delta.prompt_logprobs, echo.text)

    def _logprobs(self, delta: ChoiceDelta) -> wire.CompletionLogprobs | None:
        writer = self._writer(delta.index)
        return None if writer is None else writer.generated(delta.logprobs)

    def _writer(self, index: int) -> CompletionLogprobsWriter | None:
        if self._new_writer is None:
            return None
        if index not in self._writers:
            self._writers[index] = self._new_writer()
        return self._writers[index]
