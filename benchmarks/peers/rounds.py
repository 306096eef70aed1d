"""Alternating rounds over two sides, with progress, and what is printed in the end."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .errors import PeerError
from .loads import Load
from .options import Options
from .results import Comparison, Sample, compare, counts, faults, table, to_json


class Side(Protocol):
    """A system under measurement."""

    @property
    def name(self) -> str:
        """In the results."""

    def measure(self, loads: Sequence[Load], number: int) -> Iterator[Sample]:
        """One round: start what is needed, yield one sample per load, end what was started. Raises PeerError."""


def order(sides: tuple[Side, Side], number: int) -> tuple[Side, ...]:
    """Who comes first changes with every round, so that neither always has the cooler machine."""
    return sides if number % 2 == 0 else sides[::-1]


def run_rounds(sides: tuple[Side, Side], groups: Sequence[Sequence[Load]], rounds: int) -> list[Sample]:
    """Both sides take every group of loads in every round. Each group is one start of each side."""
    samples: list[Sample] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=1) as bars:
        task = bars.add_task("starting", total=rounds * 2 * sum(len(group) for group in groups))
        for number in range(rounds):
            for group in groups:
                for side in order(sides, number):
                    bars.update(task, description=f"round {number + 1}: {side.name}: {group[0].name}")
                    for sample, load in zip(side.measure(group, number), group, strict=True):
                        samples.append(sample)
                        bars.console.print(
                            f"round {number + 1}  {side.name:<12} {load.name:<14} "
                            f"{sample.tokens_per_second:8.1f} tok/s  load average {os.getloadavg()[0]:.1f}",
                            highlight=False,
                        )
                        bars.advance(task)
    return samples


def machine() -> str:
    """Processor, cores that this process may use, and how busy they are."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}"


def show(
    comparisons: Sequence[Comparison], samples: Sequence[Sample], options: Options, peer: str, notes: Sequence[str]
) -> int:
    """Print the results; the exit code: 1 where a request failed or a cache answered."""
    wrong = faults(comparisons)
    if options.json:
        print(json.dumps(to_json(comparisons, samples, peer) | {"machine": machine(), "notes": list(notes)}, indent=2))
    else:
        console = Console(highlight=False)
        console.print(table(comparisons, peer))
        if any(sample.requests for sample in samples):
            console.print(counts(comparisons, peer))
        for note in notes:
            console.print(note)
        for line in wrong:
            console.print(f"[red]void:[/red] {line}")
        for error in sorted({error for sample in samples for error in sample.errors}):
            console.print(f"[red]failed:[/red] {error}", markup=True)
    return 1 if wrong else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Who is measured on what."""

    sides: tuple[Side, Side]
    groups: Sequence[Sequence[Load]]
    """Loads that one start of a side takes; empty ones are passed over."""
    notes: tuple[str, ...] = ()
    """What a reader of the figures must know."""


def main(options: Options, peer: str, prepare: Callable[[Path], Plan]) -> int:
    """Prepare both sides with a folder for their logs, run the rounds, print. Errors are printed; the exit code."""
    signal.signal(signal.SIGTERM, _leave)
    logs = Path(tempfile.mkdtemp(prefix="polygraft-peers-"))
    console = Console(stderr=True, highlight=False)
    console.print(f"{machine()}; logs in {logs}")
    try:
        plan = prepare(logs)
        samples = run_rounds(plan.sides, [group for group in plan.groups if group], options.rounds)
    except PeerError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    comparisons = compare(options.loads, samples, peer)
    return show(comparisons, samples, options, peer, [*plan.notes, f"{machine()} at the end; logs in {logs}"])


def _leave(_signal: int, _frame: FrameType | None) -> None:
    """Unwind, so that whatever was started is ended."""
    sys.exit(143)
