"""The benchmark runs and its figures make sense."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_it_prints_figures_as_json(root: Path) -> None:
    command = [sys.executable, "benchmarks/kernels.py", "--json", "--seconds", "0.01", "--rows", "2", "--linears", "o"]
    command += ["--only", "linear", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    report = json.loads(done.stdout)
    assert report["ceilings"]["gflops"] > 0
    assert [figure["rows"] for figure in report["figures"]] == [2]
