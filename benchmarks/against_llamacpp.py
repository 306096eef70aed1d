"""Polygraft's decode steps against llama.cpp's: `python benchmarks/against_llamacpp.py [--quick] [--loads ...]`.

Builds llama.cpp for this processor (PyPI's `llama-cpp-python`, from source: ten minutes on two idle cores, once),
writes the model and one adapter as bfloat16 GGUF files, and times decode steps alone, after 126-token prompts, on one
stream and on many; with an adapter, every row has the same one, for llama.cpp knows no other way. Neither side speaks
HTTP. Ours counts whole engine steps, scheduling and sampling included; llama.cpp's only `llama_decode`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers import rounds
from peers.adapters import random_adapters
from peers.environments import PEERS, environment, python
from peers.gguf_files import write_adapter, write_model
from peers.http import seed
from peers.loads import OUTPUT_TOKENS, PROMPT_TOKENS, Load
from peers.options import parse
from peers.processes import ask
from peers.results import OURS, Sample

VERSION = "0.3.36"
PACKAGES = (f"llama-cpp-python=={VERSION}", "numpy>=2,<3")
BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF"}
HERE = Path(__file__).parent
LOADS = (
    Load("base-1", 1),
    Load("base-8", 8),
    Load("base-16", 16),
    Load("adapter1-1", 1, adapters=1),
    Load("adapter1-8", 8, adapters=1),
    Load("adapter1-16", 16, adapters=1),
)
ADAPTER = 2
"""Which of the random adapters: the one of rank 16."""


@dataclass(frozen=True)
class Decode:
    """One process for each load, which runs `program` on files of its own kind."""

    name: str
    program: tuple[str, ...]
    adapter: Path
    logs: Path
    repeats: int

    def measure(self, loads: Sequence[Load], number: int) -> Iterator[Sample]:
        """See rounds.Side."""
        for load in loads:
            command = [*self.program, "--streams", str(load.streams), "--prompt", str(PROMPT_TOKENS)]
            command += ["--tokens", str(OUTPUT_TOKENS), "--repeats", str(self.repeats)]
            command += ["--seed", str(seed(load, number))]
            command += ["--adapter", str(self.adapter)] if load.adapters else []
            found = ask(command, self.logs / f"{number}-{self.name}-{load.name}.log", {"PYTHONPATH": str(HERE)})
            yield Sample(self.name, load.name, number, found["tokens_per_second"])


def gguf_files(model: Path, adapter: Path) -> tuple[Path, Path]:
    """The model's and the adapter's GGUF, made once."""
    folder = PEERS / "gguf"
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / f"{model.name}.gguf", folder / f"{model.name}-{adapter.name}.gguf"
    if not files[0].exists():
        write_model(model, files[0])
    if not files[1].exists():
        write_adapter(model, adapter, files[1])
    return files


def main() -> int:
    """Compare and print; the exit code."""
    options = parse(__doc__, LOADS)

    def prepare(logs: Path) -> rounds.Plan:
        home = environment("llamacpp", PACKAGES, variables=BUILD)
        adapter = list(random_adapters(options.model, ADAPTER + 1).values())[ADAPTER]
        model_file, adapter_file = gguf_files(options.model, adapter)
        threads = str(len(os.sched_getaffinity(0)))
        program = str(HERE / "peers" / "llamacpp_decode.py")
        theirs = (str(python(home)), program, str(model_file), "--threads", threads)
        ours = (sys.executable, "-m", "peers.engine_decode", str(options.model))
        repeats = options.per_stream
        sides = Decode(OURS, ours, adapter, logs, repeats), Decode("llama.cpp", theirs, adapter_file, logs, repeats)
        notes = (
            f"decode steps only, {OUTPUT_TOKENS} after prompts of {PROMPT_TOKENS} tokens; {adapter.name} for all rows",
            f"llama.cpp of llama-cpp-python {VERSION}, built here, bfloat16 weights; its sampling is not counted",
        )
        return rounds.Plan(sides, [options.loads], notes)

    return rounds.main(options, "llama.cpp", prepare)


if __name__ == "__main__":
    sys.exit(main())
