"""The request bodies. Names, ranges and defaults are OpenAI's; those it does not have are vLLM's.

Types are strict ("2" is no number), an int passes for a float, and unknown fields are not read.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

MAX_N = 128
MAX_CHOICES = 1024
MAX_MESSAGES = 4096
MAX_TOKENS = 2**18
"""Choices of one call: n times the number of prompts."""
MAX_STOPS = 16
MAX_STOP_BYTES = 1024
MAX_LOGIT_BIASES = 1024
MAX_STOP_TOKENS = 128
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

TextPart = dict[str, Any]
"""`{"type": "text", "text": str}`."""


def _stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not 1 <= len(stop.encode()) <= MAX_STOP_BYTES:
            raise ValueError(f"must hold strings of 1 to {MAX_STOP_BYTES} bytes")
    return tuple(stops)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"has {len(value)} entries; at most {MAX_LOGIT_BIASES} are allowed")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.removeprefix("-").isascii() and key.removeprefix("-").isdigit()):
            raise ValueError(f"has the key {str(key)[:32]!r}; keys must be token ids, written as decimal integers")
        if len(key) > 20:
            raise ValueError(f"has the token id {key[:20]}…, which no vocabulary has")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"of token {key} must be a number between -100 and 100")
        biases[int(key)] = float(bias)
    return biases


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _prompt(value: object) -> tuple[str, ...] | tuple[tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
    if not value:
        raise ValueError("must not be empty")
    if len(value) > MAX_TOKENS:
        raise ValueError(f"must not have more than {MAX_TOKENS} entries")
    if all(isinstance(prompt, str) for prompt in value):
        return tuple(value)
    if _is_tokens(value):
        return (tuple(value),)
    if all(_is_tokens(prompt) for prompt in value):
        return tuple(tuple(prompt) for prompt in value)
    raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")


def _content(value: object) -> str | list[TextPart]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    if not value:
        raise ValueError("must not be an empty list")
    parts: list[TextPart] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError('must hold parts like {"type": "text", "text": "..."}')
        if kind != "text":
            raise ValueError(f"has a part of type {kind[:32]!r}; this model reads text only")
        if not isinstance(part.get("text"), str):
            raise ValueError("has a text part without a string `text`")
        parts.append({"type": "text", "text": part["text"]})
    return parts


Stop = Annotated[tuple[str, ...], PlainValidator(_stop), WithJsonSchema({"type": ["string", "array"]})]
LogitBias = Annotated[dict[int, float], PlainValidator(_logit_bias), WithJsonSchema({"type": "object"})]
Prompts = Annotated[
    tuple[str, ...] | tuple[tuple[int, ...], ...],
    PlainValidator(_prompt),
    WithJsonSchema({"type": ["string", "array"]}),
]
Content = Annotated[
    str | list[TextPart] | None, PlainValidator(_content), WithJsonSchema({"type": ["string", "array", "null"]})
]


ModelName = Annotated[str, Field(max_length=512)]


class Body(BaseModel):
    """What all bodies share: strict, frozen, unknown fields not read."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool | None = None


class Message(Body):
    """One turn. Fields beyond these reach the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1)
    content: Content = ""
    tool_calls: list[dict[str, Any]] | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_content(cls, value: object) -> object:
        """An assistant's turn may consist of tool calls alone."""
        if isinstance(value, dict) and value.get("content") is None:
            calls_alone = value.get("role") == "assistant" and value.get("tool_calls")
            return {**value, "content": "" if calls_alone else None}
        return value


class SamplingBody(Body):
    """The part of a request that says how to generate."""

    model: ModelName
    user: str | None = None
    """Whose conversation it is, in the client's own words."""
    n: int = Field(1, ge=1, le=MAX_N)
    best_of: int | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1)
    """0 and -1: off."""
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=2)
    """Bounded away from 0, which no logit survives."""
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    logit_bias: LogitBias = {}
    stop: Stop = ()
    stop_token_ids: list[int] = Field([], max_length=MAX_STOP_TOKENS)
    include_stop_str_in_output: bool = False
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(f"`best_of` ({self.best_of}) must equal `n` ({self.n}): ranking is not supported")
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` is allowed only when `stream` is true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream's last chunk tells the usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _logprobs_agree(self) -> Self:
        if self.top_logprobs > 0 and not self.logprobs:
            raise ValueError("`top_logprobs` is allowed only when `logprobs` is true")
        return self


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MAX_COMPLETION_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _few_choices(self) -> Self:
        choices = self.n * len(self.prompt)
        if choices > MAX_CHOICES:
            raise ValueError(f"`prompt` and `n` ask for {choices} choices; at most {MAX_CHOICES} are allowed")
        return self


class TokenizeBody(Body):
    """POST /tokenize: a text or a conversation."""

    model: ModelName
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    """Default: true for a text, false for a conversation, whose template writes them."""
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("must have exactly one of `prompt` and `messages`")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: ModelName
    tokens: list[int] = Field(max_length=MAX_TOKENS)
