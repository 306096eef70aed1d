"""What tells one conversation from another, the same in each of its requests: weighted splits stick to it."""

from __future__ import annotations

from polygraft.openai.schemas import ChatBody, CompletionBody, Message

MESSAGE_CHARACTERS = 4096
PROMPT_CHARACTERS = 256
"""A prompt that goes on growing keeps its beginning."""
PROMPT_TOKENS = 64


def chat_conversation(body: ChatBody) -> str:
    """The client's `user`, or else how the conversation begins: until its first message that is not an instruction,
    since many conversations begin with the same instructions.
    """
    if body.user is not None:
        return f"user:{body.user}"
    beginning: list[str] = []
    for message in body.messages:
        beginning.append(f"{message.role}:{_text(message)[:MESSAGE_CHARACTERS]}")
        if message.role not in ("system", "developer"):
            break
    return "\n".join(beginning)


def completion_conversation(body: CompletionBody) -> str:
    """The client's `user`, or else the beginning of the first prompt."""
    if body.user is not None:
        return f"user:{body.user}"
    first = body.prompt[0]
    if isinstance(first, str):
        return f"text:{first[:PROMPT_CHARACTERS]}"
    return f"tokens:{first[:PROMPT_TOKENS]}"


def _text(message: Message) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content if message.content is not None else ""
    return "".join(part["text"] for part in message.content)
