"""The gateway reads adapters without torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["polygraft_adapters", "polygraft_adapters.header", "polygraft_adapters.inspection"])
def test_reading_an_adapter_needs_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
