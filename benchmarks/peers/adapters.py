"""The adapters that both sides serve."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .environments import PEERS, ROOT
from .errors import PeerError
from .loads import RANKS


def random_adapters(model: Path, count: int) -> dict[str, Path]:
    """`count` PEFT folders over all seven modules by name, ranks in turn; made once for a model."""
    if count == 0:
        return {}
    out = PEERS / "adapters" / model.name
    ranks = ",".join(str(rank) for rank in RANKS)
    names = [f"r{RANKS[number % len(RANKS)]}-{number}" for number in range(count)]
    if not all((out / name / "adapter_config.json").exists() for name in names):
        script = str(ROOT / "benchmarks" / "random_adapters.py")
        command = [sys.executable, script, str(model), str(out), "--ranks", ranks, "--count", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PeerError(f"random_adapters.py failed:\n{done.stderr[-2000:]}")
    return {name: out / name for name in names}
