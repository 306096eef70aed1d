"""The README's examples, run as they stand against a server started as `make demo` starts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.conftest import StartServer
from tests.e2e.server import ADMIN_KEY, Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def open_server(start_server: StartServer, demo_model: Path, demo_adapters: dict[str, Path]) -> Server:
    options = [f"--adapter={name}={path}" for name, path in demo_adapters.items()]
    return start_server(str(demo_model), "--auth", "none", *options)


def blocks(root: Path, language: str) -> list[str]:
    """The README's code blocks in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (root / "README.md").read_text(), re.DOTALL)


def here(example: str, server: Server) -> str:
    """The example, sent to the test's port instead of the demo's."""
    assert "http://127.0.0.1:8000" in example
    return example.replace("http://127.0.0.1:8000", server.url)


def test_curl(open_server: Server, root: Path) -> None:
    (example,) = [block for block in blocks(root, "sh") if "curl" in block]
    done = subprocess.run(here(example, open_server), shell=True, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_openai_client(open_server: Server, root: Path) -> None:
    (example,) = blocks(root, "python")
    done = subprocess.run(
        [sys.executable, "-c", here(example, open_server)], check=True, capture_output=True, text=True
    )
    answers = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    assert {"SmolLM2-135M-Instruct", "json", "pirate", "french"} <= set(answers)


def test_commands_for_tenants_keys_and_adapters(server: Server, root: Path, tmp_path: Path) -> None:
    (example,) = [block for block in blocks(root, "sh") if "polygraft tenant" in block]
    # Other tests make tenants too, and nothing shall be left in the tree.
    example = example.replace("acme", "reader").replace("voice-copy", str(tmp_path / "copy"))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "POLYGRAFT_URL": server.url,
        "POLYGRAFT_ADMIN_KEY": ADMIN_KEY,
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", example],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for said in ("reader", "voice@v1  sha256:", "voice@v2  sha256:", "canary", "adapter.rollback"):
        assert said in done.stdout
    pulled = (tmp_path / "copy" / "adapter_model.safetensors").read_bytes()
    assert pulled == (root / "examples/adapters/french/adapter_model.safetensors").read_bytes()


def test_make_targets_exist(root: Path) -> None:
    targets = re.findall(r"^make (\w+)", (root / "README.md").read_text(), re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=root, check=True, capture_output=True)
