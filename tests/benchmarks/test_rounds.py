"""Rounds: who goes when, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from benchmarks.peers.errors import PeerError
from benchmarks.peers.loads import Load
from benchmarks.peers.processes import last_object
from benchmarks.peers.results import Sample
from benchmarks.peers.rounds import run_rounds

BASE, LORA = Load("base-1", 1), Load("adapters8-8", 8, adapters=8)


@dataclass
class Fake:
    """Writes down what it is asked for."""

    name: str
    calls: list[tuple[int, str, tuple[str, ...]]] = field(default_factory=list)
    fails: bool = False

    def measure(self, loads: Sequence[Load], number: int) -> Iterator[Sample]:
        self.calls.append((number, self.name, tuple(load.name for load in loads)))
        if self.fails:
            raise PeerError("it does not start")
        for load in loads:
            yield Sample(self.name, load.name, number, 1.0)


def test_the_sides_alternate_and_swap_with_every_round() -> None:
    calls: list[tuple[int, str, tuple[str, ...]]] = []
    run_rounds((Fake("ours", calls), Fake("peer", calls)), [[BASE], [LORA]], 2)
    assert [(number, name, loads[0]) for number, name, loads in calls] == [
        (0, "ours", "base-1"),
        (0, "peer", "base-1"),
        (0, "ours", "adapters8-8"),
        (0, "peer", "adapters8-8"),
        (1, "peer", "base-1"),
        (1, "ours", "base-1"),
        (1, "peer", "adapters8-8"),
        (1, "ours", "adapters8-8"),
    ]


def test_every_side_load_and_round_leaves_one_sample() -> None:
    samples = run_rounds((Fake("ours"), Fake("peer")), [[BASE, LORA]], 3)
    found = {(sample.side, sample.load, sample.round) for sample in samples}
    assert len(samples) == len(found) == 2 * 2 * 3


def test_a_peer_that_does_not_start_ends_the_comparison() -> None:
    with pytest.raises(PeerError, match="does not start"):
        run_rounds((Fake("ours"), Fake("peer", fails=True)), [[BASE]], 3)


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ('{"a": 1}\n', {"a": 1}),
        ('loading…\n{"a": 1}\n', {"a": 1}),
        ('warning\n{\n  "total": {\n    "a": 1\n  }\n}\n', {"total": {"a": 1}}),
        ("no object\n", None),
        ("[1]\n", None),
        ("", None),
    ],
)
def test_a_programs_answer_is_the_object_that_it_prints_last(printed: str, found: dict[str, object] | None) -> None:
    assert last_object(printed) == found
