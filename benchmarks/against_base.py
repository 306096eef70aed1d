"""What adapters cost a server: `python benchmarks/against_base.py [--quick] [--loads adapter1-16,...]`.

Polygraft against its own base model: the ordinary server, one load after the other, the base among them, with the same
streaming client. Prints medians over the rounds, each load beside the base of the same run, and the worker's peak
memory beside the bytes of its model and of the adapters that were asked for. About ten minutes on two cores.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil
from peers.adapters import random_adapters
from peers.errors import PeerError
from peers.http import polygraft
from peers.loads import Load
from peers.options import Options, parse
from peers.results import Sample
from peers.rounds import machine
from rich.console import Console
from rich.table import Table

BASE = Load("base-16", 16)
LOADS = (
    BASE,
    Load("adapter1-16", 16, adapters=1),
    Load("adapters8-16", 16, adapters=8),
    Load("zipf64-16", 16, adapters=64, popularity="zipf"),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes."""

    peak: int
    model: int
    adapters: int
    """All of those that were asked for, as their files hold them."""


def worker_peak() -> int:
    """The most resident memory, in bytes, that the running worker has had."""
    workers = [child for child in psutil.Process().children(recursive=True) if "worker" in child.cmdline()]
    if len(workers) != 1:
        raise PeerError(f"there are {len(workers)} workers below this process; one was expected")
    lines = Path(f"/proc/{workers[0].pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def weights(folder: Path) -> int:
    """Bytes of a folder's tensors."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def measure(options: Options, console: Console) -> tuple[list[Sample], Memory]:
    """All rounds, each with a server of its own."""
    adapters = random_adapters(options.model, max(load.adapters for load in options.loads))
    samples: list[Sample] = []
    peak = 0
    for number in range(options.rounds):
        # Who comes first changes, so that nobody always has the cooler machine.
        loads = options.loads if number % 2 == 0 else options.loads[::-1]
        logs = Path(tempfile.mkdtemp(prefix="polygraft-base-"))
        for sample in polygraft(options.model, adapters, logs, options.per_stream).measure(loads, number):
            samples.append(sample)
            console.print(f"round {number + 1}  {sample.load:<14} {sample.tokens_per_second:8.1f} tok/s")
            peak = max(peak, worker_peak())
    held = sum(weights(folder) for folder in adapters.values())
    return samples, Memory(peak, weights(options.model), held)


def main() -> int:
    """Compare and print; the exit code: 1 where a request failed or the prefix cache answered."""
    options = parse(__doc__, LOADS)
    console = Console(stderr=True, highlight=False)
    console.print(machine())
    try:
        samples, memory = measure(options, console)
    except PeerError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    by_load: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        by_load[sample.load].append(sample.tokens_per_second)
    medians = {name: statistics.median(rates) for name, rates in by_load.items()}
    base = medians.get(BASE.name)
    ratios = {name: rate / base for name, rate in medians.items()} if base is not None else {}
    wrong = [sample for sample in samples if sample.failures or sample.cached_prompt_tokens]
    if options.json:
        found = {"tokens_per_second": medians, "beside_base": ratios, "rounds": by_load, "machine": machine()}
        memory_found = {"peak": memory.peak, "model": memory.model, "adapters": memory.adapters}
        print(json.dumps(found | {"memory_bytes": memory_found, "void": len(wrong)}, indent=2))
    else:
        table = Table("load", "tok/s", "beside the base", title="Polygraft against its own base")
        for name, rate in medians.items():
            table.add_row(name, f"{rate:.1f}", f"{ratios[name]:.2f}" if name in ratios else "")
        out = Console(highlight=False)
        out.print(table)
        mebibytes = (f"{size / (1 << 20):.0f}" for size in (memory.peak, memory.model, memory.adapters))
        out.print("worker's peak {} MiB; model {} MiB, adapters on disk {} MiB".format(*mebibytes))
        for sample in wrong:
            out.print(f"void: {sample.load}: {sample.failures} failures, {sample.cached_prompt_tokens} tokens cached")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
