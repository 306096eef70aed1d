"""What a weighted split sticks to: the same in each request of a conversation, different in others."""

from typing import Any

from polygraft.openai.conversation import chat_conversation, completion_conversation
from polygraft.openai.schemas import ChatBody, CompletionBody


def chat(*texts: str, **other: Any) -> str:
    """A conversation of turns after the same instructions."""
    roles = ["user", "assistant"] * len(texts)
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    messages = [{"role": "system", "content": "Be brief."}, *turns]
    return chat_conversation(ChatBody.model_validate({"model": "m", "messages": messages} | other))


def completion(prompt: object, **other: Any) -> str:
    return completion_conversation(CompletionBody.model_validate({"model": "m", "prompt": prompt} | other))


def test_a_conversation_stays_itself_as_it_grows() -> None:
    assert chat("hi") == chat("hi", "hello", "and now?")
    assert chat("hi") != chat("ho")


def test_the_user_goes_before_the_text() -> None:
    assert chat("hi", user="u") == chat("ho", user="u") == completion("x", user="u")
    assert chat("hi", user="u") != chat("hi", user="v")
    # Nobody named `hi` is taken for somebody who says so.
    assert chat("hi", user="hi") != chat("hi")


def test_instructions_alone_and_parts_are_a_conversation_too() -> None:
    alone = ChatBody.model_validate({"model": "m", "messages": [{"role": "system", "content": "Be brief."}]})
    assert "Be brief." in chat_conversation(alone)
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    whole = [{"role": "user", "content": "hi"}]
    assert chat_conversation(
        ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": parts}]})
    ) == chat_conversation(ChatBody.model_validate({"model": "m", "messages": whole}))


def test_prompts_are_told_apart_by_their_beginning() -> None:
    beginning = "once upon a time " * 50
    assert completion(beginning) == completion(beginning + "there was")
    assert completion("a") != completion("b")
    assert completion(["a", "b"]) == completion("a")
    assert completion([1, 2]) != completion([1, 3])
    assert completion(list(range(100))) == completion(list(range(200)))
