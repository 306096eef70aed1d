"""What must stand in a worker's environment before torch is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from polygraft.settings import Settings

SPIN_COUNT = "10000"
"""How long OpenMP's threads spin before they sleep: entering a region takes a microsecond on an idle machine, and a
neighbour still gets the core.
"""


def worker_environment(settings: Settings, present: Mapping[str, str], cores: int) -> dict[str, str]:
    """The worker's environment out of the `present` one. `cores` is what this process may use."""
    environment = dict(present)
    # A passive wait would sleep at the end of every region, an active one never give up the core.
    environment.pop("OMP_WAIT_POLICY", None)
    environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if settings.threads is not None:
        environment["OMP_NUM_THREADS"] = str(settings.threads)
    else:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // settings.workers)))
    if Path(settings.model).expanduser().is_dir():
        environment.setdefault("HF_HUB_OFFLINE", "1")
    return environment


def usable_cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    count = os.cpu_count()
    return 1 if count is None else count
