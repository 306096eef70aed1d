"""What the gateway must not carry."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_the_routes_import_neither_torch_nor_transformers() -> None:
    program = "import json, sys, polygraft.openai.routes; print(json.dumps(sorted(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    modules = set(json.loads(loaded.stdout))
    assert "polygraft.openai.streaming" in modules
    assert not modules & {"torch", "transformers", "polygraft_engine.engine"}
