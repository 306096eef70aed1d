"""Three hundred uploads that are meant to hurt: each is refused, quickly, and leaves nothing behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest
from tests.e2e.conftest import StartServer
from tests.e2e.hostile import uploads
from tests.e2e.server import Server
from tests.e2e.tenants import Operator, Tenant, zipped

pytestmark = pytest.mark.slow

MEBIBYTE = 1 << 20


def files_below(folder: Path) -> set[str]:
    return {os.path.join(at, name) for at, _, names in os.walk(folder) for name in names}


def memory(server: Server) -> int:
    """Of all processes but the workers, which hold the model."""
    children = [psutil.Process(server.process.pid), *server.children()]
    return sum(child.memory_info().rss for child in children if "worker" not in child.cmdline())


@pytest.fixture(scope="module")
def attacked(
    start_server: StartServer, demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Server, Path]:
    folder = tmp_path_factory.mktemp("attacked")
    return start_server(str(demo_model), "--max-model-len", "512", data_dir=folder), folder


def test_three_hundred_hostile_uploads(attacked: tuple[Server, Path], demo_adapters: dict[str, Path]) -> None:
    server, folder = attacked
    tenant = Operator(server).tenant("target")
    tenant.pushed("good", demo_adapters["json"])
    blobs, before, slowest = files_below(folder / "blobs"), memory(server), 0.0
    wrong: list[str] = []
    for kind, filename, content in uploads(demo_adapters["json"], 300):
        started = time.monotonic()
        answer = tenant.push("bad", content, filename)
        took = time.monotonic() - started
        slowest = max(slowest, took)
        if not 400 <= answer.status_code < 500 or took > 2.0 or "message" not in answer.json()["error"]:
            wrong.append(f"{kind}: {answer.status_code} in {took:.1f} s: {answer.text[:200]}")
    assert wrong == []
    assert files_below(folder / "blobs") == blobs
    assert memory(server) < before + 150 * MEBIBYTE
    assert tenant.chat("good", max_tokens=4).status_code == 200


def test_names_in_every_script_are_refused_in_words(
    attacked: tuple[Server, Path], demo_adapters: dict[str, Path]
) -> None:
    server, _ = attacked
    tenant: Tenant = Operator(server).tenant("names")
    content = zipped(demo_adapters["json"])
    for name in (
        "Große",
        "模型",
        "модель",
        "مرحبا",
        "a/b",
        "../x",
        "a\x00b",
        "",
        " ",
        "x" * 65,
        "SmolLM2-135M-Instruct",
        "a@v1",
        "🦙",
    ):
        answer = tenant.push(name, content)
        assert 400 <= answer.status_code < 500, (name, answer.text)
        assert answer.json()["error"]["message"]
