"""What parallel regions cost: `python benchmarks/regions.py MODEL [--rows 16] [--adapters 8] [--beside "COMMAND"]`.

Decode steps of one engine take turns: the whole step as one region, a region for each layer, one for each operation.
With `--beside`, the same again while a command runs: `polygraft bench` against a server on this machine, say, so that
gateway, queue and client take the cores from time to time. Prints the medians of the forward pass in milliseconds.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice

import granular
from filled import Work, filled_engine
from granular import GRAINS, Grain, GranularBackend
from rich.console import Console
from rich.table import Table

from polygraft_engine.engine import Engine
from polygraft_engine.options import EngineOptions
from polygraft_kernels.registry import BACKENDS

_SETTLE_SECONDS = 5.0
"""For the command beside to come to its load."""


def decoding(model: str, work: Work) -> tuple[Engine, GranularBackend]:
    """An engine in the midst of decoding, and what it computes on."""
    BACKENDS["granular"] = granular.__name__
    engine = filled_engine(EngineOptions(model=model, kernels="granular"), work)
    while engine.stats().scheduler.waiting or engine.stats().sampled_tokens < work.rows:
        engine.step()
    backend = granular.create.latest
    assert backend is not None, "the engine was built with it"
    return engine, backend


def measure(engine: Engine, backend: GranularBackend, rounds: int) -> dict[Grain, list[float]]:
    """Seconds of forward passes, each grain in turn."""
    found: dict[Grain, list[float]] = defaultdict(list)
    for grain in islice(cycle(GRAINS), rounds * len(GRAINS)):
        backend.grain = grain
        engine.step()
        found[grain].append(engine.stats().last_step.forward)
    if engine.stats().failed_steps:
        raise SystemExit("steps failed; what was measured means nothing")
    return found


@contextmanager
def running(command: str) -> Iterator[None]:
    """The command beside, ended with the block."""
    process = subprocess.Popen(shlex.split(command), stdout=subprocess.DEVNULL)
    time.sleep(_SETTLE_SECONDS)
    if process.poll() is not None:
        raise SystemExit(f"{command!r} ended with {process.returncode} before anything was measured beside it")
    try:
        yield
        if process.poll() is not None:
            raise SystemExit(f"{command!r} ended with {process.returncode} while its neighbours were measured")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=40, help="steps of each kind")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--beside", metavar="COMMAND", help="what to run as a neighbour in a second series")
    arguments = parser.parse_args()

    tokens = arguments.rounds * len(GRAINS) * 2 + 50
    work = Work(arguments.rows, arguments.context, tokens, arguments.adapters, arguments.rank)
    engine, backend = decoding(arguments.model, work)
    series = {"alone": measure(engine, backend, arguments.rounds)}
    if arguments.beside is not None:
        with running(arguments.beside):
            series["beside"] = measure(engine, backend, arguments.rounds)
    table = Table(title=f"forward pass of {arguments.rows} rows by regions, median ms")
    table.add_column("")
    for grain in GRAINS:
        table.add_column(f"one a {grain}" if grain != "operation" else "one an operation", justify="right")
    for name, found in series.items():
        table.add_row(name, *(f"{statistics.median(found[grain]) * 1e3:.2f}" for grain in GRAINS))
    Console().print(table)


if __name__ == "__main__":
    main()
