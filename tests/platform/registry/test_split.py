"""Weighted splits stick, and are as heavy as they say."""

import subprocess
import sys
from collections import Counter

from polygraft.registry.split import choose

SPLIT = [{"version": 3, "weight": 90}, {"version": 4, "weight": 10}, {"version": 5, "weight": 0}]


def test_shares_follow_the_weights() -> None:
    counts = Counter(choose(SPLIT, "salt", f"user-{number}") for number in range(10_000))
    assert counts[5] == 0
    assert 850 < counts[4] < 1150


def test_the_same_conversation_gets_the_same_version_in_every_process() -> None:
    program = (
        "from polygraft.registry.split import choose; import sys; print([choose(%r, 's', str(n)) for n in range(50)])"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", program % SPLIT], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert elsewhere.stdout.strip() == str([choose(SPLIT, "s", str(number)) for number in range(50)])


def test_splits_of_different_aliases_are_independent() -> None:
    half = [{"version": 1, "weight": 1}, {"version": 2, "weight": 1}]
    same = sum(choose(half, "one", str(number)) == choose(half, "two", str(number)) for number in range(1000))
    assert 400 < same < 600


def test_a_split_of_one_is_that_one() -> None:
    assert {choose([{"version": 7, "weight": 1}], "s", text) for text in ("", "a", "\ud800", "b" * 100)} == {7}
