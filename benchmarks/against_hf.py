"""Polygraft against transformers and PEFT on this machine: `python benchmarks/against_hf.py [--quick] [--loads ...]`.

transformers generates in whole batches, greedily, within one process and without HTTP; PEFT gives each row of a
batch one of eight adapters (`adapter_names=`). Ours is the ordinary server under the same prompts (126 tokens, all
different), as many at a time, 64 new tokens each, streamed over HTTP. Prints medians over the rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from peers import rounds
from peers.adapters import random_adapters
from peers.http import polygraft, seed
from peers.loads import Load
from peers.options import parse
from peers.processes import ask
from peers.results import Sample

LOADS = (
    Load("base-1", 1),
    Load("base-8", 8),
    Load("base-16", 16),
    Load("adapter1-16", 16, adapters=1),
    Load("adapters8-16", 16, adapters=8),
)


@dataclass(frozen=True)
class Transformers:
    """One process for each load."""

    name: str
    model: Path
    adapters: Mapping[str, Path]
    logs: Path
    per_stream: int
    dtype: str

    def measure(self, loads: Sequence[Load], number: int) -> Iterator[Sample]:
        """See rounds.Side."""
        for load in loads:
            command = [sys.executable, "-m", "peers.transformers_load", str(self.model), "--streams", str(load.streams)]
            command += ["--dtype", self.dtype]
            command += ["--requests", str(load.requests(self.per_stream)), "--seed", str(seed(load, number))]
            for folder in list(self.adapters.values())[: load.adapters]:
                command += ["--adapter", str(folder)]
            found = ask(
                command, self.logs / f"{number}-{self.name}-{load.name}.log", {"PYTHONPATH": str(Path(__file__).parent)}
            )
            yield Sample(
                side=self.name,
                load=load.name,
                round=number,
                tokens_per_second=found["tokens_per_second"],
                requests=found["requests"],
                prompt_tokens=found["prompt_tokens"],
            )


def main() -> int:
    """Compare and print; the exit code."""
    options = parse(__doc__, LOADS)

    def prepare(logs: Path) -> rounds.Plan:
        adapters = random_adapters(options.model, max(load.adapters for load in options.loads))
        peer = Transformers("transformers", options.model, adapters, logs, options.per_stream, options.peer_dtype)
        versions = " and ".join(f"{name} {version(name)}" for name in ("transformers", "peft"))
        notes = (
            f"{versions} in {options.peer_dtype}: whole batches in one process, no HTTP",
            "ours: the ordinary server, streaming over HTTP",
        )
        return rounds.Plan((polygraft(options.model, adapters, logs, options.per_stream), peer), [options.loads], notes)

    return rounds.main(options, "transformers", prepare)


if __name__ == "__main__":
    sys.exit(main())
