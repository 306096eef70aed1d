"""`python -m polygraft_kernels`: which backend `auto` takes here, and why not a faster one."""

from __future__ import annotations

import sys

import torch

from polygraft_kernels.registry import choose


def main() -> None:
    """Print one line for the choice and one for each backend passed over."""
    choice = choose("auto", torch.device("cpu"), torch.bfloat16)
    sys.stdout.write(f"kernels: {choice.backend.name}\n")
    for reason in choice.passed_over:
        sys.stdout.write(f"kernels: not {reason}\n")


if __name__ == "__main__":
    main()
