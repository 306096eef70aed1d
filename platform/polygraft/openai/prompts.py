"""What a request sends, as token ids of the model that will read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polygraft.card import ModelCard
from polygraft.errors import ApiError, bad_request
from polygraft.openai.catalog import ServedModel
from polygraft.openai.chat import ChatRenderer
from polygraft.openai.schemas import CompletionBody, Message


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: its tokens, and the text as the client wrote it (None: it sent tokens)."""

    ids: tuple[int, ...]
    text: str | None


async def completion_prompts(served: ServedModel, body: CompletionBody) -> tuple[Prompt, ...]:
    """The prompts of a completion. Texts get what the tokenizer adds around raw text; token arrays are taken as they
    are. Raises ApiError 400.
    """
    prompts: list[Prompt] = []
    for prompt in body.prompt:
        if isinstance(prompt, str):
            ids = await encode(served, prompt, special=body.add_special_tokens, param="prompt")
            prompts.append(Prompt(ids, prompt))
        else:
            check_ids(prompt, served.card, "prompt")
            prompts.append(Prompt(prompt, None))
        if not prompts[-1].ids:
            raise bad_request("`prompt` is empty: the model needs at least one token to start from.", param="prompt")
    return tuple(prompts)


async def chat_prompt(
    served: ServedModel,
    renderer: ChatRenderer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    variables: dict[str, Any],
    special: bool = False,
) -> Prompt:
    """A conversation as the template writes it. The template writes the special tokens too, so the tokenizer adds
    none unless `special`. Raises ApiError 400.
    """
    text = await renderer.render(
        served.card, messages, add_generation_prompt=add_generation_prompt, variables=variables
    )
    ids = await encode(served, text, special=special, param="messages")
    if not ids:
        raise bad_request("`messages` render to an empty prompt.", param="messages")
    return Prompt(ids, text)


async def encode(served: ServedModel, text: str, *, special: bool, param: str) -> tuple[int, ...]:
    """Token ids of a text. Raises ApiError 400: it cannot fit whatever its tokens are (it is not even read then), or
    the tokenizer knows tokens that the model does not.
    """
    card, tokenizer = served.card, served.tokenizer
    at_least = len(text) // tokenizer.longest_token
    if at_least > card.max_context:
        raise _too_long(
            f"The context of `{card.name}` is {card.max_context} tokens; the prompt alone has more than {at_least}.",
            param,
        )
    ids = await tokenizer.encode(text, special=special)
    check_ids(ids, card, param)
    return ids


def check_ids(ids: Sequence[int], card: ModelCard, param: str) -> None:
    """Raise ApiError 400 for the first id that is not in the vocabulary."""
    for token in ids:
        if not 0 <= token < card.vocab_size:
            raise bad_request(
                f"`{param}` has the token id {str(token)[:24]}, which is not in 0 to {card.vocab_size - 1}.",
                param=param,
            )


def fit_context(
    card: ModelCard, prompts: Sequence[Prompt], max_tokens: int | None, default: int | None, param: str
) -> int:
    """How many tokens each choice may generate: `max_tokens`, or else what the context leaves, `default` at most.

    Raises ApiError 400 context_length_exceeded if a prompt leaves no room, or not as much as was asked for.
    """
    longest = max(len(prompt.ids) for prompt in prompts)
    left = card.max_context - longest
    if left < 1:
        raise _too_long(
            f"The context of `{card.name}` is {card.max_context} tokens, and the prompt alone has {longest}, which "
            f"leaves no room for an answer: at least {longest + 1} are requested. Send a shorter prompt.",
            param,
        )
    if max_tokens is None:
        return left if default is None else min(default, left)
    if max_tokens > left:
        raise _too_long(
            f"The context of `{card.name}` is {card.max_context} tokens, and {longest + max_tokens} are requested: "
            f"{longest} in the prompt and {max_tokens} for the answer. Shorten the prompt or ask for fewer tokens.",
            param,
        )
    return max_tokens


def _too_long(message: str, param: str) -> ApiError:
    return bad_request(message, param=param, code="context_length_exceeded")
