"""Log probabilities in the two shapes that OpenAI's API has for them."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence

from polygraft.openai.wire import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from polygraft_engine.types import TokenLogprob

BytesOf = Callable[[int], bytes]
"""The raw bytes of a token id."""
IsSilent = Callable[[int], bool]
"""Whether a generated token is left out of the text."""


def token_text(raw: bytes) -> str:
    r"""A token's text; one that is no whole characters is spelled `bytes:\xe2\x80`, so that no two look alike."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(entries: Sequence[TokenLogprob], bytes_of: BytesOf) -> ChatLogprobs:
    """`logprobs` of a chat's choice or chunk."""
    content: list[ChatTokenLogprob] = []
    for entry in entries:
        raw = bytes_of(entry.token_id)
        content.append(
            ChatTokenLogprob(
                token_text(raw),
                entry.logprob,
                list(raw),
                [_top(bytes_of(token), logprob) for token, logprob in entry.top],
            )
        )
    return ChatLogprobs(content)


def _top(raw: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(token_text(raw), logprob, list(raw))


class CompletionLogprobsWriter:
    """Writes one choice's logprobs in pieces. `text_offset` counts characters of the choice's text; a token that begins
    within a character has that character's offset.
    """

    def __init__(self, bytes_of: BytesOf, is_silent: IsSilent) -> None:
        self._bytes_of = bytes_of
        self._is_silent = is_silent
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, ids: Sequence[int], entries: Sequence[TokenLogprob], text: str) -> CompletionLogprobs:
        """The echoed prompt: `entries` are its tokens' from the second on.

        Offsets are counted from the end of `text`: what tokens have and the text has not (a BOS, a first space)
        comes first.
        """
        spelled = b"".join(self._bytes_of(token) for token in ids).decode(errors="replace")
        self._offset = len(text) - len(spelled)
        written = CompletionLogprobs([], [], [], [])
        for token, entry in zip(ids, (None, *entries), strict=True):
            self._write(written, token, entry, self._bytes_of(token))
        self._decoder.reset()
        self._offset = len(text)
        return written

    def generated(self, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """The next generated tokens."""
        written = CompletionLogprobs([], [], [], [])
        for entry in entries:
            spelled = b"" if self._is_silent(entry.token_id) else self._bytes_of(entry.token_id)
            self._write(written, entry.token_id, entry, spelled)
        return written

    def _write(self, to: CompletionLogprobs, token: int, entry: TokenLogprob | None, spelled: bytes) -> None:
        """One token, which adds the bytes `spelled` to the text."""
        to.tokens.append(token_text(self._bytes_of(token)))
        to.token_logprobs.append(None if entry is None else entry.logprob)
        to.top_logprobs.append(None if entry is None else self._top(entry))
        to.text_offset.append(max(0, self._offset))
        self._offset += len(self._decoder.decode(spelled))

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the one that was taken if it is none of them. Where two tokens have one text, the
        likelier counts.
        """
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(token_text(self._bytes_of(token)), logprob)
        return top
