"""What the conformance suite leaves out of the reference: float16, and where the package's command leads."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from polygraft_kernels.reference import create


def test_float16_is_accumulated_in_float32() -> None:
    backend = create(torch.device("cpu"), torch.float16)
    x = torch.full((1, 4096), 16.0, dtype=torch.float16)
    y = backend.linear(x, backend.pack_linear(torch.full((2, 4096), 0.5, dtype=torch.float16)))
    assert y.tolist() == [[32768.0, 32768.0]]
    norm = backend.rms_norm(torch.full((1, 8), 300.0, dtype=torch.float16), torch.ones(8, dtype=torch.float16), 1e-6)
    assert norm.tolist() == [[1.0] * 8]


@pytest.mark.slow
def test_the_command_names_the_backend() -> None:
    done = subprocess.run([sys.executable, "-m", "polygraft_kernels"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kernels: ")
