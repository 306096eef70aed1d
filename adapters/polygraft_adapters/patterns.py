"""PEFT's rank_pattern and alpha_pattern: regular expressions that come with an adapter, so from a stranger.

PEFT takes the first key for which `re.match(rf"(.*\\.)?({key})$", module_name)` holds. The same is done here, after
each key has been shown to be cheap: Python's matcher has no time limit, and a hostile key could run for years.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value", int, float)

MAX_PATTERNS = 4096
MAX_PATTERN_CHARS = 512
_NAME_CHARS = 64
"""Longer than any module name: what an unbounded quantifier may try."""
_MAX_PATHS = 300_000
"""Ways to match that all keys of a field may offer together: seconds of matching for the largest model, at worst.
A literal name offers one, `layers.(0|1|2).*proj` about 200.
"""


@dataclass(frozen=True, slots=True)
class Patterns(Generic[Value]):
    """What a pattern field says, in the order of the file: the first matching key decides."""

    items: tuple[tuple[str, Value], ...]
    compiled: tuple[re.Pattern[str], ...]

    def value(self, module: str, default: Value) -> Value:
        """The value for a module's dotted name within the base model, or the default where no key matches it."""
        for (_, value), pattern in zip(self.items, self.compiled, strict=True):
            if pattern.match(module):
                return value
        return default


def compile_patterns(values: Mapping[str, Value]) -> Patterns[Value]:
    """Raises ValueError, in words for the adapter's owner, for too many keys or one that is no (cheap) expression."""
    if len(values) > MAX_PATTERNS:
        raise ValueError(f"has {len(values)} keys, more than {MAX_PATTERNS}")
    compiled, paths = [], 0
    for key in values:
        if len(key) > MAX_PATTERN_CHARS:
            raise ValueError(f"has a key of {len(key)} characters, more than {MAX_PATTERN_CHARS}")
        try:
            re.compile(key)  # alone first: `a)|(b` would be an expression only between PEFT's own parentheses
            compiled.append(re.compile(rf"(.*\.)?({key})$"))
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"has a key that is not a regular expression: {key!r} ({error})") from error
        paths += _paths(key)
        if paths > _MAX_PATHS:
            raise ValueError(f"could take too long to match, from this key on: {key!r}")
    return Patterns(tuple(values.items()), tuple(compiled))


_HARD = re.compile(r"\\[1-9]|\(\?P=|\(\?#|\(\?[aiLmsu-]*x")
"""References to groups, and comments and the verbose syntax, which may hide what is repeated."""
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_QUANTIFIER = re.compile(r"(?:[*+?]|\{[0-9]*,?[0-9]*\})[?+]?")


def _paths(key: str) -> int:
    """An upper bound for the ways in which a backtracking matcher can try an expression on a module name.

    A sequence multiplies the ways of its parts, alternatives add them, an unbounded quantifier over one character
    offers as many as a name has characters. A repeated group counts as too many.
    """
    too_many = _MAX_PATHS + 1
    stack: list[list[int]] = [[0, 1]]  # per open group: ways of the finished alternatives, ways of the current one
    position = 0
    while position < len(key):
        if _HARD.match(key, position):
            return too_many
        atom = _ATOM.match(key, position)
        assert atom is not None, "any character is an atom"
        position = atom.end()
        text = atom.group()
        if text == "(":
            stack.append([0, 1])
            continue
        if text == "|":
            stack[-1][0] += stack[-1][1]
            stack[-1][1] = 1
            continue
        ways, is_group = 1, text == ")"
        if is_group:
            if len(stack) == 1:
                return too_many
            finished, current = stack.pop()
            ways = finished + current
        quantifier = _QUANTIFIER.match(key, position)
        if quantifier is not None:
            position = quantifier.end()
            if quantifier.group()[0] == "?":
                ways += 1
            elif is_group:
                return too_many
            else:
                ways = _NAME_CHARS
        stack[-1][1] = min(stack[-1][1] * ways, too_many)
    return min(sum(stack[0]), too_many)
