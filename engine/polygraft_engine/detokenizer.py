"""Token ids to bytes and to text, one token at a time, as the tokenizer's own decoder would decode all of them at once.

Two families are known: byte-level BPE (Llama 3, Qwen, SmolLM2), whose tokens are runs of bytes, and SentencePiece's
(Llama 2, Mistral), whose tokens are text with "▁" for the space and `<0xE4>` for single bytes.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from polygraft_engine.types import EngineError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenBytes:
    """The raw bytes of every token of one tokenizer: `token_bytes(tokenizer)(42) == b" the"`.

    Added and special tokens are their text. An id that the tokenizer does not have (padding of the model's
    vocabulary) is no bytes. Raises EngineError for a tokenizer of another family.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._cache: dict[int, bytes] = {}
        self.byte_level = False
        self.byte_fallback = False
        self.strip = ("", 0)
        """A character, and how many of it the decoder removes from the beginning of a text."""
        self.metaspace = ""
        """The stand-in for the space which the decoder drops from a text's first token; "" where it drops none."""
        self._spaces: list[tuple[str, str]] = []
        for step in _decoder_steps(tokenizer):
            self._add_step(step)

    def __call__(self, token_id: int) -> bytes:
        """The token's bytes; a leading space is there even where a text that begins with the token loses it."""
        known = self._cache.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id)
            known = self._cache[token_id] = b"" if token is None else self._bytes(token)
        return known

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id that it does not have."""
        spelled: str | None = self._tokenizer.id_to_token(token_id)
        return spelled

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def is_byte(self, token_id: int) -> bool:
        """Whether the token stands for one byte of a character that the vocabulary lacks."""
        if not self.byte_fallback:
            return False
        token = self.token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def _bytes(self, token: str) -> bytes:
        if self.byte_level:
            # A token with characters from outside the alphabet (an added one) stands for itself.
            values = [_BYTE_OF.get(char, -1) for char in token]
            return token.encode() if -1 in values else bytes(values)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte.group(1), 16)])
        for stand_in, char in self._spaces:
            token = token.replace(stand_in, char)
        return token.encode()

    def _add_step(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self.byte_level = True
            case {"type": "ByteFallback"}:
                self.byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(stand_in)}, "content": str(char)} if len(stand_in) == 1:
                self._spaces.append((stand_in, char))
            case {"type": "Metaspace", "replacement": str(stand_in), "prepend_scheme": scheme}:
                self._spaces.append((stand_in, " "))
                self.metaspace = "" if scheme == "never" else stand_in
            case {"type": "Strip", "content": str(char), "start": int(count), "stop": 0}:
                self.strip = (char, count)
            case _:
                raise EngineError(f"this tokenizer's decoder has a step that is not supported: {json.dumps(step)}")


@lru_cache(maxsize=16)
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """The TokenBytes of a tokenizer, made once: every request of a model shares it."""
    return TokenBytes(tokenizer)


class Piece(NamedTuple):
    """Text, and the token (counted from 0) that completed it."""

    token: int
    text: str


class Detokenizer(ABC):
    """Turns one sequence's output tokens into text as they come.

    Every token yields one Piece, in order, sooner or later; `flush` yields what is still held back. Joined, they are
    `tokenizer.decode(output, skip_special_tokens=...)`, but that the space before the first word stays where the
    output continues a prompt's text. A character that the prompt left unfinished is not completed.
    """

    def __init__(self, tokens: TokenBytes, skip_special_tokens: bool) -> None:
        self._tokens = tokens
        self._skip_special_tokens = skip_special_tokens
        self._count = 0

    def push(self, token_id: int) -> list[Piece]:
        """The next token; the pieces that it settles."""
        index = self._count
        self._count += 1
        return self._settle(index, token_id)

    @abstractmethod
    def flush(self) -> list[Piece]:
        """Nothing more comes: what was held back, unfinished characters as U+FFFD."""

    @abstractmethod
    def _settle(self, index: int, token_id: int) -> list[Piece]: ...

    def _is_silent(self, token_id: int) -> bool:
        """Whether decoding leaves the token out."""
        if self._tokens.is_special(token_id):
            return self._skip_special_tokens
        return self._tokens.token(token_id) is None


def detokenizer(tokens: TokenBytes, prompt: Iterable[int] = (), *, skip_special_tokens: bool = True) -> Detokenizer:
    """A Detokenizer for the output that follows `prompt`."""
    if tokens.byte_level:
        return _ByteLevelDetokenizer(tokens, skip_special_tokens)
    return _PieceDetokenizer(tokens, prompt, skip_special_tokens)


class _ByteLevelDetokenizer(Detokenizer):
    """The tokens' bytes form one stream; a character appears with its last byte."""

    def __init__(self, tokens: TokenBytes, skip_special_tokens: bool) -> None:
        super().__init__(tokens, skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def _settle(self, index: int, token_id: int) -> list[Piece]:
        raw = b"" if self._is_silent(token_id) else self._tokens(token_id)
        return [Piece(index, self._utf8.decode(raw))]

    def flush(self) -> list[Piece]:
        tail = self._utf8.decode(b"", final=True)
        return [Piece(self._count - 1, tail)] if tail else []


class _PieceDetokenizer(Detokenizer):
    """Tokens are text, but for runs of byte tokens.

    The decoder turns a run into text as a whole, or into one U+FFFD per byte if any of it is no UTF-8, so that a run
    is held back until a token of text ends it.
    """

    def __init__(self, tokens: TokenBytes, prompt: Iterable[int], skip_special_tokens: bool) -> None:
        super().__init__(tokens, skip_special_tokens)
        begins_text = not self._has_text(prompt)
        self._strip_char, self._strip_left = tokens.strip if begins_text else ("", 0)
        self._drop_from_first = tokens.metaspace if begins_text else ""
        self._run: list[tuple[int, int | None]] = []  # index, token id; None for a silent token within the run

    def _settle(self, index: int, token_id: int) -> list[Piece]:
        if self._is_silent(token_id):
            if not self._run:
                return [Piece(index, "")]
            self._run.append((index, None))
            return []
        if self._tokens.is_byte(token_id):
            self._run.append((index, token_id))
            return []
        return [*self.flush(), Piece(index, self._strip(self._text(token_id)))]

    def flush(self) -> list[Piece]:
        run, self._run = self._run, []
        texts = _run_texts([None if token_id is None else self._tokens(token_id) for _, token_id in run])
        if run:
            self._drop_from_first = ""
        return [Piece(index, self._strip(text)) for (index, _), text in zip(run, texts, strict=True)]

    def _text(self, token_id: int) -> str:
        stand_in, self._drop_from_first = self._drop_from_first, ""
        if stand_in:
            token = self._tokens.token(token_id)
            assert token is not None, "silent tokens have no text"
            return token.replace(stand_in, "")
        return self._tokens(token_id).decode()

    def _strip(self, text: str) -> str:
        while self._strip_left > 0 and text:
            if text[0] != self._strip_char:
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = text[1:]
        return text

    def _has_text(self, prompt: Iterable[int]) -> bool:
        return any(not self._is_silent(token_id) and self._tokens(token_id) for token_id in prompt)


def _run_texts(run: Sequence[bytes | None]) -> list[str]:
    """What each byte of a run adds to the text, and "" for a silent token."""
    strict = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        texts = ["" if byte is None else strict.decode(byte) for byte in run]
        strict.decode(b"", final=True)
    except UnicodeDecodeError:
        return ["" if byte is None else _REPLACEMENT for byte in run]
    return texts


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The decoder's own description, sequences flattened."""
    if tokenizer.decoder is None:
        raise EngineError("this tokenizer has no decoder, so its tokens cannot be joined to text")
    return _flatten(json.loads(tokenizer.decoder.__getstate__()))


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flatten(part)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(0x100) if byte not in printable)
    return {**{chr(byte): byte for byte in printable}, **{chr(0x100 + rank): byte for rank, byte in enumerate(others)}}


_BYTE_OF = _byte_alphabet()
