"""The answers' JSON, as OpenAI's clients parse it; `stop_reason` is vLLM's addition.

A field that is UNSET is absent; one that is None is null.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from polygraft.queue import messages

encode = msgspec.json.Encoder().encode


class CachedTokens(msgspec.Struct, frozen=True):
    """Of the prompt."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, usage: messages.Usage) -> Usage:
        """The job's usage in OpenAI's words."""
        total = usage.prompt_tokens + usage.completion_tokens
        return cls(usage.prompt_tokens, usage.completion_tokens, total, CachedTokens(usage.cached_tokens))


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a place."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """A generated token and what else was likely."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry per generated token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists, one entry per token. The first token of a prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def followed_by(self, other: CompletionLogprobs) -> CompletionLogprobs:
        """These tokens, then the others."""
        return CompletionLogprobs(
            self.tokens + other.tokens,
            self.token_logprobs + other.token_logprobs,
            self.top_logprobs + other.top_logprobs,
            self.text_offset + other.text_offset,
        )


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's turn."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct, frozen=True):
    """POST /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to the assistant's turn."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """What a chunk adds to one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a chat's stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionChoice(msgspec.Struct, frozen=True):
    """One text, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class Completion(msgspec.Struct, frozen=True):
    """POST /v1/completions, whole or one event of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["text_completion"] = "text_completion"
