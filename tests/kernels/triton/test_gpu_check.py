"""The script for machines with a GPU, as far as it can be run without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def check(root: Path, interpreted: bool, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": str(int(interpreted)),
    }
    command = [sys.executable, "-W", "ignore", "scripts/gpu_check.py", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_without_a_gpu_it_says_so(root: Path) -> None:
    done = check(root, False)
    assert done.returncode == 2
    assert "no GPU" in done.stdout
    smoke = check(root, False, "--smoke")
    assert smoke.returncode == 2
    assert "TRITON_INTERPRET=1" in smoke.stdout


@pytest.mark.slow
def test_every_section_at_tiny_shapes(root: Path, tmp_path: Path) -> None:
    done = check(root, True, "--smoke", "--json", str(tmp_path / "figures.json"))
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert {each["section"] for each in figures} == {"operations", "adapters", "engine"}
    assert {each["name"] for each in figures if each["section"] == "adapters"} == {
        "identical",
        "uniform",
        "zipf",
        "distinct",
    }
    assert all(each["value"] > 0 for each in figures)
    assert all(each["floor"] > 0 for each in figures if each["section"] == "operations")
    assert all(each["against"] > 0 for each in figures if each["section"] == "adapters")
