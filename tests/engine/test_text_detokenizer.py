"""Deltas joined are what the tokenizer decodes at once, for any tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.text_harness import byte_fallback, byte_ids, byte_level, ids, metaspace
from tokenizers import Tokenizer, decoders, models

from polygraft_engine.text import TokenBytes, detokenizer, token_bytes
from polygraft_engine.types import EngineError

TOKENIZERS = {
    "byte level": byte_level(),
    "byte fallback": byte_fallback(),
    "byte fallback, nothing stripped": byte_fallback(strip=0),
    "byte fallback, three stripped": byte_fallback(strip=3),
    "metaspace": metaspace(),
    "metaspace, never": metaspace("never"),
}
BEYOND = max(tokenizer.get_vocab_size() for tokenizer in TOKENIZERS.values()) + 5
kinds = st.sampled_from(sorted(TOKENIZERS))
token_ids = st.lists(st.integers(0, BEYOND), max_size=30)


def deltas(tokenizer: Tokenizer, output: list[int], prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    """The text after each token, and after the end."""
    texts = [""] * (len(output) + 1)
    stream = detokenizer(token_bytes(tokenizer), prompt or [], skip_special_tokens=skip)
    seen = []
    for index, token in enumerate(output):
        pieces = stream.push(token)
        texts[index] = "".join(piece.text for piece in pieces)
        seen += [piece.token for piece in pieces]
    pieces = stream.flush()
    texts[-1] = "".join(piece.text for piece in pieces)
    seen += [piece.token for piece in pieces]
    assert seen == sorted(seen)
    assert set(seen) == set(range(len(output)))
    assert stream.flush() == []
    return texts


@given(kinds, token_ids, st.booleans())
@settings(deadline=None, max_examples=150)
def test_any_tokens_give_what_decode_gives(kind: str, output: list[int], skip: bool) -> None:
    tokenizer = TOKENIZERS[kind]
    assert "".join(deltas(tokenizer, output, skip=skip)) == tokenizer.decode(output, skip_special_tokens=skip)


@given(kinds, st.lists(st.binary(max_size=6) | st.text(max_size=4).map(str.encode), max_size=6))
@settings(deadline=None, max_examples=100)
def test_any_bytes_between_words_give_what_decode_gives(kind: str, runs: list[bytes]) -> None:
    tokenizer = TOKENIZERS[kind]
    word = ids(tokenizer, "a")
    output = [token for run in runs for token in [*byte_ids(tokenizer, run), *word]]
    assert "".join(deltas(tokenizer, output)) == tokenizer.decode(output)


@given(st.text(max_size=40))
@settings(deadline=None)
def test_any_text_comes_back(text: str) -> None:
    output = byte_level().encode(text).ids
    assert "".join(deltas(byte_level(), output)) == text


@given(
    st.sampled_from(["byte fallback", "metaspace"]),
    st.lists(st.sampled_from(["▁the", "▁quick", "a", "</s>"])),
    token_ids,
)
@settings(deadline=None)
def test_output_continues_the_prompt(kind: str, names: list[str], output: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]
    prompt = ids(tokenizer, "<s>", *names)
    before = tokenizer.decode(prompt)
    assert before + "".join(deltas(tokenizer, output, prompt)) == tokenizer.decode([*prompt, *output])


def test_the_first_space_stays_only_behind_a_text() -> None:
    for tokenizer in (byte_fallback(), metaspace()):
        output = ids(tokenizer, "▁the", "▁quick")
        assert deltas(tokenizer, output) == ["the", " quick", ""]
        assert deltas(tokenizer, output, ids(tokenizer, "<s>")) == ["the", " quick", ""]
        assert deltas(tokenizer, output, ids(tokenizer, "<s>", "a")) == [" the", " quick", ""]
        assert deltas(tokenizer, output, ids(tokenizer, "<s>"), skip=False) == [" the", " quick", ""]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("😀".encode(), ["", "", "", "😀", ""]),
        ("é".encode(), ["", "é", ""]),
        ("👩‍🚀".encode(), ["", "", "", "👩", "", "", "\u200d", "", "", "", "🚀", ""]),
        ("😀".encode()[:3], ["", "", "", "\ufffd"]),
        ("aé".encode()[:2], ["a", "", "\ufffd"]),
        (b"\xe4a", ["", "\ufffda", ""]),
        (b"\xff\xfe", ["\ufffd", "\ufffd", ""]),
        (b"\xed\xa0\x80", ["", "", "\ufffd\ufffd\ufffd", ""]),
        (b"\xed\xa0", ["", "", "\ufffd\ufffd"]),
        (b"\xed\xa0a", ["", "", "\ufffd\ufffda", ""]),
    ],
)
def test_a_byte_level_character_comes_with_its_last_byte(raw: bytes, expected: list[str]) -> None:
    output = byte_ids(byte_level(), raw)
    assert deltas(byte_level(), output) == expected
    assert "".join(expected) == raw.decode(errors="replace")


def multibyte_tokenizer(pieces: list[bytes]) -> Tokenizer:
    """A byte-level tokenizer whose tokens 0, 1, ... are these bytes."""
    spell = {raw: [byte_level().id_to_token(id) for id in byte_ids(byte_level(), raw)] for raw in pieces}
    tokenizer = Tokenizer(models.BPE({"".join(spell[raw]): id for id, raw in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"\xf0\x9f", b"\x98\x80"], ["", "😀", ""]),
        ([b"\xf0", b"\x9f\x98\x80"], ["", "😀", ""]),
        ([b"\xf0\x9f\x98", b"\x80!"], ["", "😀!", ""]),
        ([b"x\xe4\xbd", b"\xa0\xe5\xa5\xbd"], ["x", "你好", ""]),
        ([b"x\xe4\xbd", b"\xa0\xe5", b"\xa5"], ["x", "你", "", "\ufffd"]),
        ([b"\xe4\xbd", b"\xa0\xe5\xa5", b"y"], ["", "你", "\ufffdy", ""]),
    ],
)
def test_characters_split_anyhow_between_tokens(pieces: list[bytes], expected: list[str]) -> None:
    assert deltas(multibyte_tokenizer(pieces), list(range(len(pieces)))) == expected


def test_a_skipped_token_does_not_break_a_character() -> None:
    for tokenizer, special in ((byte_level(), "<|end|>"), (byte_fallback(), "</s>")):
        first, *rest = byte_ids(tokenizer, "你".encode())
        output = [first, *ids(tokenizer, special), *rest]
        assert "".join(deltas(tokenizer, output)) == "你"
        shown = "".join(deltas(tokenizer, output, skip=False))
        assert shown == tokenizer.decode(output, skip_special_tokens=False)
        assert special in shown


def test_a_run_of_byte_tokens_comes_as_a_whole() -> None:
    tokenizer = byte_fallback()
    run, word = byte_ids(tokenizer, "é世".encode()), ids(tokenizer, "▁fo", "x")
    assert deltas(tokenizer, [*run, *word]) == ["", "", "", "", "", "é世 fo", "x", ""]
    assert deltas(tokenizer, run) == ["", "", "", "", "", "é世"]
    assert deltas(tokenizer, run[:-1]) == ["", "", "", "", "\ufffd" * 4]
    stream = detokenizer(token_bytes(tokenizer))
    assert [piece for token in run for piece in stream.push(token)] == []
    assert [(piece.token, piece.text) for piece in stream.flush()] == [(0, ""), (1, "é"), (2, ""), (3, ""), (4, "世")]


def test_no_output_is_no_text() -> None:
    for tokenizer in TOKENIZERS.values():
        assert deltas(tokenizer, []) == [""]


def test_bytes_of_tokens() -> None:
    tokens = token_bytes(byte_level())
    assert [tokens(id) for id in byte_ids(byte_level(), "é ".encode())] == [b"\xc3", b"\xa9", b" "]
    assert b"".join(tokens(id) for id in byte_level().encode("the fox 你").ids) == "the fox 你".encode()
    for name in ("<|end|>", "<tool call>", "｜x▁y｜"):
        assert [tokens(id) for id in ids(byte_level(), name)] == [name.encode()]
    assert tokens(10**6) == b""

    tokens = token_bytes(byte_fallback())
    named = ids(byte_fallback(), "<0xE4>", "▁the", "你", "</s>", "<tool>", "▁▁")
    assert [tokens(id) for id in named] == [b"\xe4", b" the", "你".encode(), b"</s>", b"<tool>", b"  "]
    assert [tokens.is_byte(id) for id in named] == [True, False, False, False, False, False]
    assert [tokens.is_special(id) for id in named] == [False, False, False, True, False, False]


def test_the_bytes_of_a_tokenizer_are_made_once() -> None:
    assert token_bytes(byte_level()) is token_bytes(byte_level())


def test_a_nested_decoder_is_understood() -> None:
    tokenizer = metaspace()
    nested = Tokenizer.from_str(tokenizer.to_str())
    nested.decoder = decoders.Sequence(
        [decoders.Sequence([decoders.ByteFallback()]), decoders.Metaspace("▁", "always")]
    )
    output = ids(nested, "▁the", "<0xC3>", "<0xA9>", "▁fo")
    assert "".join(deltas(nested, output)) == "theé fo"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), decoders.Replace("ab", "c"), None])
def test_another_family_of_tokenizers_is_refused_by_name(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(EngineError, match="decoder"):
        TokenBytes(tokenizer)
