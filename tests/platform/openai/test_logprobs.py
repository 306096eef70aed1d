"""Log probabilities in OpenAI's shapes."""

from __future__ import annotations

import json

from polygraft.openai import wire
from polygraft.openai.logprobs import CompletionLogprobsWriter, chat_logprobs, token_text
from polygraft_engine.types import TokenLogprob

BYTES = {1: b"Hi", 2: b"\xf0\x9f", 3: b"\x8c\x8a", 4: b" sea", 5: b"\xe2", 6: b"\xe3", 7: b"<s>", 8: b"\x8a!"}


def never(token: int) -> bool:
    """No token is left out of the text."""
    return False


def test_texts_of_tokens_are_unique_even_of_broken_characters() -> None:
    assert token_text(b"Hi") == "Hi"
    assert token_text(b"\xe2\x80") == "bytes:\\xe2\\x80"
    assert token_text(b"") == ""


def test_chats_carry_the_raw_bytes() -> None:
    entries = [TokenLogprob(2, -0.5, ((2, -0.5), (5, -3.5))), TokenLogprob(3, -1.0)]
    written = json.loads(wire.encode(chat_logprobs(entries, BYTES.__getitem__)))
    first, second = written["content"]
    assert first["token"] == "bytes:\\xf0\\x9f"
    assert bytes(first["bytes"] + second["bytes"]).decode() == "🌊"
    assert first["top_logprobs"][1] == {"token": "bytes:\\xe2", "logprob": -3.5, "bytes": [0xE2]}
    assert second["top_logprobs"] == []


def test_completions_have_parallel_lists_whose_offsets_count_characters() -> None:
    writer = CompletionLogprobsWriter(BYTES.__getitem__, never)
    first = writer.generated([TokenLogprob(1, -0.1, ((5, -1.0), (6, -2.0))), TokenLogprob(2, -0.2)])
    second = writer.generated([TokenLogprob(3, -0.3), TokenLogprob(4, -0.4)])
    assert first.tokens == ["Hi", "bytes:\\xf0\\x9f"]
    assert first.top_logprobs[0] == {"bytes:\\xe2": -1.0, "bytes:\\xe3": -2.0, "Hi": -0.1}
    assert first.text_offset + second.text_offset == [0, 2, 2, 3]
    assert second.token_logprobs == [-0.3, -0.4]


def test_a_token_with_the_tail_of_a_character_has_its_offset() -> None:
    writer = CompletionLogprobsWriter({1: b"a\xf0\x9f\x8c", 2: b"\x8a!", 3: b"z"}.__getitem__, never)
    written = writer.generated([TokenLogprob(token, -1.0) for token in (1, 2, 3)])
    assert written.text_offset == [0, 1, 3]


def test_an_echoed_prompt_is_scored_from_its_second_token_on() -> None:
    writer = CompletionLogprobsWriter(BYTES.__getitem__, never)
    echoed = writer.prompt([7, 1, 4], [TokenLogprob(1, -0.5, ((1, -0.5),)), TokenLogprob(4, -0.6)], "Hi sea")
    assert echoed.tokens == ["<s>", "Hi", " sea"]
    assert echoed.token_logprobs == [None, -0.5, -0.6]
    assert echoed.top_logprobs == [None, {"Hi": -0.5}, {" sea": -0.6}]
    assert echoed.text_offset == [0, 0, 2]
    assert writer.generated([TokenLogprob(1, -1.0)]).text_offset == [6]


def test_of_two_tokens_with_one_text_the_likelier_counts() -> None:
    writer = CompletionLogprobsWriter({1: b"a", 2: b"a"}.__getitem__, never)
    written = writer.generated([TokenLogprob(2, -3.0, ((1, -0.5),))])
    assert written.top_logprobs == [{"a": -0.5}]


def test_a_token_that_the_text_leaves_out_takes_no_room() -> None:
    writer = CompletionLogprobsWriter(BYTES.__getitem__, lambda token: token == 7)
    written = writer.generated([TokenLogprob(token, -1.0) for token in (1, 7, 4)])
    assert written.tokens == ["Hi", "<s>", " sea"]
    assert written.text_offset == [0, 2, 2]
