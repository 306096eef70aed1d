"""The kernels on host memory: a process that interprets them holds them to the conformance suite and to `running/`.

Some cases are left out, for the interpreter runs about 500 iterations of a loop a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SLOW = (
    "test_any_mix_of_chunks",
    "test_contexts_that_are_cut",
    "test_deep_and_many_rows",
    "test_shapes_of_a_model",
)
"""Whose kernels see the same kinds of work in other tests."""


def interpreted(root: Path, *arguments: str) -> None:
    """Run pytest in a process that interprets kernels; fails with what it says."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow", *arguments]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("room", ["attention", "layer", "linear", "lora", "lora_affine", "pointwise", "sample"])
def test_conformance(root: Path, room: str) -> None:
    kinds = "triton" if room in {"linear", "lora", "lora_affine"} else "triton and not invariant"
    wanted = " and not ".join((kinds, *SLOW))
    interpreted(root, f"tests/conformance/test_{room}.py", "-k", wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bank", "engine", "graphs", "invariance", "linear", "tables"])
def test_what_only_these_kernels_promise(root: Path, name: str) -> None:
    interpreted(root, f"tests/kernels/triton/running/test_{name}.py")
