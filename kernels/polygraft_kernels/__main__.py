"""`python -m polygraft_kernels`: which backend `auto` takes here, and why not a faster one."""

from __future__ import annotations

import sys

import torch

from polygraft_kernels.native import runnable
from polygraft_kernels.registry import choose


def main() -> None:
    """Print one line per fact."""
    choice = choose("auto", torch.device("cpu"), torch.bfloat16)
    instructions = f" ({runnable()[-1]})" if choice.backend.name == "native" else ""
    lines = [f"kernels: {choice.backend.name}{instructions}", *(f"passed over {why}" for why in choice.passed_over)]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
