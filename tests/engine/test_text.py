"""The output stage: what of the generated tokens becomes text, entries and a finish reason."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.text_harness import byte_fallback, byte_ids, byte_level, ids
from tokenizers import Tokenizer

from polygraft_engine.text import OutputStage, TextDelta, detokenizer, token_bytes
from polygraft_engine.types import FinishReason, SamplingParams, StepOutput, TokenLogprob

FOX = ["the", " quick", " brown", " fox", " jumps"]


@dataclass(frozen=True)
class Result:
    """All deltas of one output, put together as a client would."""

    text: str
    token_ids: list[int]
    offsets: list[int]
    logprobs: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    completion_tokens: int
    deltas: list[TextDelta]


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, "seed": 0, "logprobs": 0, **changes})


def generate(
    tokenizer: Tokenizer,
    output: list[int],
    how: SamplingParams,
    *,
    steps: list[int] | None = None,
    reason: FinishReason | None = "length",
    stop_token: int | None = None,
    prompt: list[int] | None = None,
) -> Result:
    """Push `output` through a stage in steps of the given sizes (one token each by default), the last one with the
    engine's finish reason; the caller stops, as it must, when the stage says so.
    """
    stage = OutputStage(tokenizer, how, prompt or [])
    sizes = steps or [1] * len(output) or [0]
    deltas: list[TextDelta] = []
    position = 0
    for number, size in enumerate(sizes):
        tokens = tuple(output[position : position + size])
        position += size
        last = number == len(sizes) - 1
        logprobs = tuple(TokenLogprob(token, -1.0) for token in tokens) if how.logprobs is not None else ()
        deltas.append(
            stage.push(
                StepOutput(
                    id="x",
                    token_ids=tokens,
                    logprobs=logprobs,
                    finish_reason=reason if last else None,
                    stop_token=stop_token if last else None,
                )
            )
        )
        if deltas[-1].finish_reason is not None:
            break
    return Result(
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        offsets=[offset for delta in deltas for offset in delta.offsets],
        logprobs=[entry.token_id for delta in deltas for entry in delta.logprobs],
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        completion_tokens=deltas[-1].completion_tokens,
        deltas=deltas,
    )


def spell(*words: str) -> list[int]:
    """The words' bytes, one token each: every border that a tokenizer could choose."""
    return [token for word in words for token in byte_ids(byte_level(), word.encode())]


def test_all_text_and_tokens_come_through() -> None:
    output = byte_level().encode("".join(FOX)).ids
    result = generate(byte_level(), output, params())
    assert result.text == "the quick brown fox jumps"
    assert result.token_ids == result.logprobs == output
    assert (result.finish_reason, result.stop_reason, result.completion_tokens) == ("length", None, len(output))
    assert [delta.completion_tokens for delta in result.deltas] == list(range(1, len(output) + 1))
    texts = [token_bytes(byte_level())(token).decode() for token in output]
    assert result.offsets == [len("".join(texts[:index])) for index in range(len(texts))]


def test_without_logprobs_there_are_none() -> None:
    result = generate(byte_level(), spell("ab"), params(logprobs=None))
    assert (result.token_ids, result.logprobs) == (spell("ab"), [])


def test_a_stop_across_token_borders_is_cut_off_and_never_sent() -> None:
    result = generate(byte_level(), spell("the quick brown fox jumps"), params(stop=("own fox",)))
    assert result.text == "the quick br"
    assert result.token_ids == result.logprobs == spell("the quick br")
    assert (result.finish_reason, result.stop_reason) == ("stop", "own fox")
    assert result.completion_tokens == len("the quick brown fox")
    assert [delta.text for delta in result.deltas[-8:]] == ["r"] + [""] * 7


def test_a_stop_can_be_included_with_its_tokens() -> None:
    result = generate(byte_level(), spell("the fox!"), params(stop=("fox",), include_stop=True))
    assert result.text == "the fox"
    assert result.token_ids == spell("the fox")
    assert (result.finish_reason, result.stop_reason, result.completion_tokens) == ("stop", "fox", 7)


def test_text_that_only_began_like_a_stop_is_sent_once_it_did_not() -> None:
    result = generate(byte_level(), spell("xabaabc"), params(stop=("abc",)))
    assert [delta.text for delta in result.deltas] == ["x", "", "", "ab", "a", "", ""]
    assert result.text == "xaba"
    result = generate(byte_level(), spell("xab"), params(stop=("abc",)))
    assert result.text == "xab"
    assert result.token_ids == spell("xab")


def test_a_stop_inside_a_token_keeps_the_token_that_began_before_it() -> None:
    output = byte_level().encode("the quick").ids
    texts = [token_bytes(byte_level())(token).decode() for token in output]
    assert texts == ["the", " quick"]
    result = generate(byte_level(), output, params(stop=("uic",)))
    assert (result.text, result.token_ids, result.completion_tokens) == ("the q", output, 2)
    result = generate(byte_level(), output, params(stop=("uic",), include_stop=True))
    assert (result.text, result.token_ids, result.completion_tokens) == ("the quic", output, 2)
    result = generate(byte_level(), output, params(stop=(" q",)))
    assert (result.text, result.token_ids, result.completion_tokens) == ("the", output[:1], 2)


@pytest.mark.parametrize("steps", [[1] * 12, [12], [3, 3, 3, 3], [7, 5]])
def test_tokens_behind_the_stop_do_not_count_however_many_a_step_brings(steps: list[int]) -> None:
    result = generate(byte_level(), spell("abcdefSTOPgh"), params(stop=("STOP",)), steps=steps)
    assert (result.text, result.completion_tokens) == ("abcdef", 10)
    assert result.token_ids == spell("abcdef")


def test_the_earliest_stop_wins_whatever_the_order() -> None:
    for stop in (("ab", "abc"), ("abc", "ab")):
        assert generate(byte_level(), spell("xabc"), params(stop=stop)).stop_reason == "ab"
    assert generate(byte_level(), spell("aaab"), params(stop=("aab",))).text == "a"


@pytest.mark.parametrize(("min_tokens", "text", "count"), [(0, "", 1), (1, "a", 2), (2, "aa", 3), (4, "aaaab", 6)])
def test_a_stop_counts_only_behind_the_first_min_tokens(min_tokens: int, text: str, count: int) -> None:
    result = generate(byte_level(), spell("aaaaba"), params(stop=("a",), min_tokens=min_tokens))
    assert (result.text, result.completion_tokens, result.finish_reason) == (text, count, "stop")


def test_a_stop_may_begin_within_the_first_min_tokens() -> None:
    result = generate(byte_level(), spell("xabcy"), params(stop=("abc",), min_tokens=3))
    assert (result.text, result.completion_tokens) == ("x", 4)
    result = generate(byte_level(), spell("xabcy"), params(stop=("abc",), min_tokens=4))
    assert (result.text, result.finish_reason) == ("xabcy", "length")


def test_an_emoji_with_joiners_and_an_output_that_ends_within_a_character() -> None:
    rocket = "👩‍🚀"
    output = byte_ids(byte_level(), rocket.encode())
    result = generate(byte_level(), output, params())
    assert (result.text, result.token_ids) == (rocket, output)
    result = generate(byte_level(), output[:-1], params())
    assert result.text == "👩‍\ufffd"
    assert result.deltas[-1].text == "\ufffd"
    assert result.token_ids == output[:-1]


def test_tokens_of_one_character_are_released_together_with_it() -> None:
    result = generate(byte_level(), spell("aé世"), params())
    assert [len(delta.token_ids) for delta in result.deltas] == [1, 0, 2, 0, 0, 3]
    assert result.offsets == [0, 1, 1, 2, 2, 2]


def test_a_character_that_begins_a_stop_is_cut_with_all_its_tokens() -> None:
    result = generate(byte_level(), spell("a世!"), params(stop=("世!",)))
    assert (result.text, result.token_ids, result.completion_tokens) == ("a", spell("a"), 5)


@pytest.mark.parametrize("include", [False, True])
def test_an_end_token_counts_but_shows_only_as_asked(include: bool) -> None:
    (end,) = ids(byte_level(), "<|end|>")
    output = [*spell("hi"), end]
    for skip in (False, True):
        how = params(include_stop=include, skip_special_tokens=skip)
        result = generate(byte_level(), output, how, reason="stop", stop_token=end)
        assert result.text == ("hi<|end|>" if include and not skip else "hi")
        assert result.token_ids == result.logprobs == (output if include else output[:-1])
        assert (result.finish_reason, result.stop_reason, result.completion_tokens) == ("stop", None, 3)


def test_a_stop_token_is_the_stop_reason() -> None:
    (stop,) = spell("z")
    how = params(stop_token_ids=(stop,))
    result = generate(byte_level(), [*spell("hi"), stop], how, reason="stop", stop_token=stop, steps=[3])
    assert (result.text, result.stop_reason, result.completion_tokens) == ("hi", stop, 3)
    shown = params(stop_token_ids=(stop,), include_stop=True)
    result = generate(byte_level(), [*spell("hi"), stop], shown, reason="stop", stop_token=stop)
    assert (result.text, result.stop_reason, result.token_ids[-1]) == ("hiz", stop, stop)


def test_a_stop_string_before_a_stop_token_in_the_same_step_wins() -> None:
    (end,) = ids(byte_level(), "<|end|>")
    result = generate(
        byte_level(), [*spell("hi!x"), end], params(stop=("!",)), reason="stop", stop_token=end, steps=[5]
    )
    assert (result.text, result.stop_reason, result.completion_tokens) == ("hi", "!", 3)


def test_what_is_held_back_is_sent_when_an_end_token_comes() -> None:
    (end,) = ids(byte_level(), "<|end|>")
    result = generate(byte_level(), [*spell("xab"), end], params(stop=("abc",)), reason="stop", stop_token=end)
    assert result.text == "xab"
    assert [delta.text for delta in result.deltas] == ["x", "", "", "ab"]


def test_a_stop_completed_by_the_last_token_is_a_stop_not_a_length() -> None:
    result = generate(byte_level(), spell("ab"), params(stop=("b",)))
    assert (result.text, result.finish_reason, result.stop_reason) == ("a", "stop", "b")


def test_special_tokens_without_text_keep_their_entries() -> None:
    (special,) = ids(byte_level(), "<|start|>")
    result = generate(byte_level(), [special, *spell("a"), special], params())
    assert (result.text, result.offsets) == ("a", [0, 0, 1])
    assert result.token_ids == [special, *spell("a"), special]
    result = generate(byte_level(), [special, *spell("a"), special], params(skip_special_tokens=False))
    assert result.text == "<|start|>a<|start|>"


def test_no_tokens_at_all() -> None:
    result = generate(byte_level(), [], params(max_tokens=0))
    assert (result.text, result.token_ids, result.finish_reason, result.completion_tokens) == ("", [], "length", 0)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_output_that_breaks_off_gives_what_was_held_back(reason: FinishReason) -> None:
    stage = OutputStage(byte_level(), params(stop=("abc",), logprobs=None), [])
    assert stage.push(StepOutput(id="x", token_ids=tuple(spell("ab")))).text == ""
    last = stage.push(StepOutput(id="x", finish_reason=reason))
    assert (last.text, last.finish_reason, last.completion_tokens) == ("ab", reason, 2)


def test_nothing_comes_after_the_end() -> None:
    stage = OutputStage(byte_level(), params(stop=("b",), logprobs=None), [])
    assert stage.push(StepOutput(id="x", token_ids=tuple(spell("ab")))).finish_reason == "stop"
    late = stage.push(StepOutput(id="x", token_ids=tuple(spell("cd")), finish_reason="length"))
    assert late == TextDelta(completion_tokens=2)


def test_a_stop_within_a_run_of_byte_tokens() -> None:
    tokenizer = byte_fallback()
    run = byte_ids(tokenizer, "é!世".encode())
    for output in (run, [*run, *ids(tokenizer, "x")]):
        result = generate(tokenizer, output, params(stop=("!",)))
        assert (result.text, result.token_ids) == ("é", run[:2])
        assert (result.finish_reason, result.stop_reason, result.completion_tokens) == ("stop", "!", 3)


def test_output_continues_the_text_of_the_prompt() -> None:
    tokenizer = byte_fallback()
    output = ids(tokenizer, "▁the", "▁quick")
    assert generate(tokenizer, output, params()).text == "the quick"
    assert generate(tokenizer, output, params(), prompt=ids(tokenizer, "a")).text == " the quick"


letters = st.lists(st.sampled_from(["a", "b", "c", "ab", "é", "世", "<|end|>", "<0xC3>"]), max_size=14)
stops = st.lists(st.text(alphabet="abcé世", min_size=1, max_size=3), max_size=3).map(tuple)


@given(letters, stops, st.integers(0, 5), st.booleans(), st.booleans(), st.lists(st.integers(0, 4)))
@settings(deadline=None)
def test_any_output_in_any_steps_follows_the_rules(
    names: list[str], stop: tuple[str, ...], min_tokens: int, include: bool, fallback: bool, sizes: list[int]
) -> None:
    tokenizer = byte_fallback() if fallback else byte_level()
    output = [token for name in names for token in tokens_named(tokenizer, name)]
    steps = [*sizes, max(0, len(output) - sum(sizes))]
    how = params(stop=stop, min_tokens=min_tokens, include_stop=include)
    result = generate(tokenizer, output, how, steps=steps)
    expected = by_the_rules(tokenizer, output, how)
    assert (result.text, result.token_ids, result.completion_tokens, result.stop_reason) == expected
    assert result.finish_reason == ("length" if result.stop_reason is None else "stop")
    assert result.logprobs == result.token_ids
    assert all(delta.finish_reason is None for delta in result.deltas[:-1])


def tokens_named(tokenizer: Tokenizer, name: str) -> list[int]:
    if name == "<0xC3>":
        return byte_ids(tokenizer, b"\xc3")
    if name == "<|end|>":
        return ids(tokenizer, "<|end|>" if tokenizer is byte_level() else "</s>")
    if name.isascii():
        return ids(tokenizer, *(name if tokenizer.token_to_id(name) is None else [name]))
    return byte_ids(tokenizer, name.encode())


def by_the_rules(
    tokenizer: Tokenizer, output: list[int], how: SamplingParams
) -> tuple[str, list[int], int, str | None]:
    """Text, tokens, count and stop, from the whole output at once."""
    stream = detokenizer(token_bytes(tokenizer), skip_special_tokens=True)
    pieces = [piece for token in output for piece in stream.push(token)] + stream.flush()
    starts: dict[int, int] = {}
    text = ""
    for index, piece in pieces:
        starts.setdefault(index, len(text))
        before, text = len(text), text + piece
        matches = [
            (end - len(stop), end, stop)
            for stop in how.stop
            for end in range(before + 1, len(text) + 1)
            if index >= how.min_tokens and text[:end].endswith(stop)
        ]
        if matches:
            start, end, stop = min(matches)
            cut = end if how.include_stop else start
            return text[:cut], [output[i] for i, at in starts.items() if at < cut], index + 1, stop
    return text, output, len(output), None


def test_the_output_stage_needs_no_torch() -> None:
    code = (
        "import sys, polygraft_engine.text; print([n for n in ('torch', 'transformers', 'numpy') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
