"""The worker's output stage: an engine's tokens in, text out, cut at the first stop string. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Tokenizer

from polygraft_engine.detokenizer import Detokenizer, Piece, TokenBytes, detokenizer, token_bytes
from polygraft_engine.types import FinishReason, SamplingParams, StepOutput, TokenLogprob

__all__ = [
    "Detokenizer",
    "OutputStage",
    "StopFinder",
    "StopMatch",
    "TextDelta",
    "TokenBytes",
    "detokenizer",
    "token_bytes",
]


class StopMatch(NamedTuple):
    """A stop string in the output: characters start:end, counted from the output's beginning."""

    start: int
    end: int
    stop: str


class StopFinder:
    """Finds the first stop string in a text that comes in pieces, one per token.

    The piece in which any stop is completed ends the text. If it completes several, the one that begins first wins,
    whatever the order of the list, and of those the shortest. `held` characters at the end of the text are the longest
    suffix that may still grow into a stop; everything before them is safe to send.

    Knuth, Morris and Pratt: per stop, the length of its longest prefix that the text ends with. Time is linear.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "a request with an empty stop string has been refused before"
        self._stops = tuple(stops)
        self._borders = tuple(_borders(stop) for stop in stops)
        self._matched = [0] * len(stops)
        self._length = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop."""
        return max(self._matched, default=0)

    def push(self, text: str, may_stop: bool = True) -> StopMatch | None:
        """Append a piece; the match that it completes. With `may_stop` false, stops that end in it do not count."""
        matches = []
        for which, stop in enumerate(self._stops):
            end = self._advance(which, text)
            if end is not None and may_stop:
                matches.append(StopMatch(end - len(stop), end, stop))
        self._length += len(text)
        return min(matches, default=None)

    def _advance(self, which: int, text: str) -> int | None:
        """Where the stop ends first within the piece, if it does."""
        stop, borders, matched = self._stops[which], self._borders[which], self._matched[which]
        end = None
        for position, char in enumerate(text, self._length + 1):
            while matched > 0 and stop[matched] != char:
                matched = borders[matched]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                matched = borders[matched]
                if end is None:
                    end = position
        self._matched[which] = matched
        return end


def _borders(stop: str) -> list[int]:
    """borders[n]: the longest proper prefix of stop[:n] that is also its suffix."""
    borders = [0] * (len(stop) + 1)
    matched = 0
    for length in range(1, len(stop)):
        while matched > 0 and stop[matched] != stop[length]:
            matched = borders[matched]
        if stop[matched] == stop[length]:
            matched += 1
        borders[length + 1] = matched
    return borders


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What one step adds to a choice.

    `token_ids`, `offsets` and `logprobs` (if asked for) belong together, one entry per token. A token is released
    with the text that it begins. When the output is cut at a stop, the tokens that begin at or behind the cut never
    appear, so that with `include_stop` the stop's own tokens do and without it they do not.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    """At which character of the output each token's text begins."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    """In exactly one delta, the last with any content."""
    stop_reason: str | int | None = None
    """The stop string, or the id of stop_token_ids, that ended the output; None for end-of-sequence and the rest."""
    completion_tokens: int = 0
    """Tokens generated so far; in the last delta, up to and including the one that completed the stop."""


class _Entry(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None
    offset: int


class OutputStage:
    """One choice's way from tokens to text. Tokens are taken one at a time, so that the result does not depend on how
    many of them a step brings.

    A stop string counts if it ends in the text of a token after the first `min_tokens`. The text of a stop token or
    end-of-sequence token is left out unless `include_stop`; special tokens never show with `skip_special_tokens`.

    The engine does not know stop strings: when a delta says it has finished and the engine's output did not, the
    caller cancels the sequence. What the engine still says afterwards changes nothing.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        self._detokenizer = detokenizer(token_bytes(tokenizer), prompt, skip_special_tokens=params.skip_special_tokens)
        self._finder = StopFinder(params.stop)
        self._generated = 0
        self._finished = False
        self._unsettled: deque[tuple[int, TokenLogprob | None]] = deque()
        self._settled = 0
        self._entries: deque[_Entry] = deque()  # settled, but their text is still held back
        self._text = ""  # settled and held back
        self._released = 0

    def push(self, output: StepOutput) -> TextDelta:
        """What one step's output adds; after the end, nothing any more."""
        if self._finished:
            return TextDelta(completion_tokens=self._generated)
        silent = output.stop_token is not None and not self._params.include_stop
        for index, token_id in enumerate(output.token_ids):
            self._generated += 1
            if silent and index == len(output.token_ids) - 1:
                break
            self._unsettled.append((token_id, output.logprobs[index] if output.logprobs else None))
            match = self._take(self._detokenizer.push(token_id))
            if match is not None:
                return self._stop(match)
        if output.finish_reason is None:
            return self._release(self._released + len(self._text) - self._finder.held)
        match = self._take(self._detokenizer.flush())
        return self._finish(output, output.finish_reason) if match is None else self._stop(match)

    def _take(self, pieces: Sequence[Piece]) -> StopMatch | None:
        """Settle tokens; the match at which the output ends, after which nothing more is taken."""
        for piece in pieces:
            if piece.token == self._settled:
                self._entries.append(_Entry(*self._unsettled.popleft(), self._released + len(self._text)))
                self._settled += 1
            self._text += piece.text
            match = self._finder.push(piece.text, may_stop=piece.token >= self._params.min_tokens)
            if match is not None:
                self._generated = piece.token + 1
                return match
        return None

    def _stop(self, match: StopMatch) -> TextDelta:
        self._finished = True
        cut = match.end if self._params.include_stop else match.start
        return self._release(cut, finish_reason="stop", stop_reason=match.stop)

    def _finish(self, output: StepOutput, reason: FinishReason) -> TextDelta:
        self._finished = True
        stop_reason = output.stop_token if output.stop_token in self._params.stop_token_ids else None
        end = self._released + len(self._text)
        return self._release(end, finish_reason=reason, stop_reason=stop_reason, and_empty=True)

    def _release(
        self,
        end: int,
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        and_empty: bool = False,
    ) -> TextDelta:
        """Let go of the text before character `end` and of the tokens that begin before it (`and_empty`: of those
        that begin at the very end, too, for they have no text).
        """
        text, self._text = self._text[: end - self._released], self._text[end - self._released :]
        self._released = end
        entries = []
        while self._entries and (self._entries[0].offset < end or and_empty):
            entries.append(self._entries.popleft())
        return TextDelta(
            text=text,
            token_ids=tuple(entry.token_id for entry in entries),
            offsets=tuple(entry.offset for entry in entries),
            logprobs=tuple(entry.logprob for entry in entries if entry.logprob is not None),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            completion_tokens=self._generated,
        )
