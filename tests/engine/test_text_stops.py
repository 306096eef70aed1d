"""The stop finder against a finder that looks at all of the text again and again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polygraft_engine.text import StopFinder, StopMatch

Pieces = list[tuple[str, bool]]


def find(stops: list[str], pieces: Pieces) -> tuple[StopMatch | None, list[int]]:
    """The match, and how much was held back after each piece before it."""
    finder = StopFinder(stops)
    held = []
    for text, may_stop in pieces:
        match = finder.push(text, may_stop)
        if match is not None:
            return match, held
        held.append(finder.held)
    return None, held


def naive(stops: list[str], pieces: Pieces) -> tuple[StopMatch | None, list[int]]:
    """The same by the rule's own words."""
    text, held = "", []
    for piece, may_stop in pieces:
        before, text = len(text), text + piece
        if may_stop:
            ends = range(before + 1, len(text) + 1)
            matches = [
                StopMatch(end - len(stop), end, stop) for stop in stops for end in ends if text[:end].endswith(stop)
            ]
            if matches:
                return min(matches), held
        suffixes = [text[start:] for start in range(len(text))]
        held.append(
            max(
                (len(end) for end in suffixes if any(end != stop and stop.startswith(end) for stop in stops)), default=0
            )
        )
    return None, held


few = st.text(alphabet="ab", min_size=1, max_size=5)
three = st.text(alphabet="abc", min_size=1, max_size=4)


@given(
    st.lists(few | three, max_size=4),
    st.lists(st.tuples(st.text(alphabet="abc", max_size=4), st.booleans()), max_size=12),
)
@settings(deadline=None, max_examples=200)
def test_agrees_with_the_naive_finder(stops: list[str], pieces: Pieces) -> None:
    assert find(stops, pieces) == naive(stops, pieces)


@given(st.lists(three, min_size=1, max_size=3), st.text(alphabet="abc", max_size=20))
@settings(deadline=None)
def test_one_character_at_a_time_no_stop_survives_in_the_text(stops: list[str], text: str) -> None:
    match, _ = find(stops, [(char, True) for char in text])
    before = text if match is None else text[: match.end - 1]
    assert not any(stop in before for stop in stops)
    if match is not None:
        assert text[match.start : match.end] == match.stop


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (["own fox"], ["the quick br", "own", " ", "fox jumps"], (12, "own fox")),
        (["ab", "abc"], ["xabc"], (1, "ab")),
        (["abc", "ab"], ["xabc"], (1, "ab")),
        (["aab"], ["aaab"], (1, "aab")),
        (["aab"], ["a", "a", "a", "b"], (1, "aab")),
        (["fox", "quick"], ["the quick brown fox"], (4, "quick")),
        (["c", "bcd"], ["abcd"], (1, "bcd")),
        (["c", "bcd"], ["a", "b", "c", "d"], (2, "c")),
        (["\n\n"], ["a\n", "\nb"], (1, "\n\n")),
        (["😀"], ["a😀"], (1, "😀")),
        (["abab"], ["ab", "aab", "ab"], (3, "abab")),
    ],
)
def test_finds_the_earliest(stops: list[str], pieces: list[str], expected: tuple[int, str]) -> None:
    match, _ = find(stops, [(piece, True) for piece in pieces])
    assert match is not None
    assert (match.start, match.stop) == expected


def test_holds_back_only_what_may_become_a_stop() -> None:
    finder = StopFinder(["aab", "xyz!"])
    held = []
    for piece in ["q", "a", "a", "a", "x", "y", "z", "z"]:
        assert finder.push(piece) is None
        held.append(finder.held)
    assert held == [0, 1, 2, 2, 1, 2, 3, 0]


def test_without_stops_nothing_is_held_back() -> None:
    finder = StopFinder([])
    assert finder.push("anything") is None
    assert finder.held == 0
