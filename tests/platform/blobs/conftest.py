"""Adapters as folders, and an S3 server of this process's own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from moto.server import ThreadedMotoServer


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A folder with an adapter's two files and one more."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("not ours to keep")
    return folder


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The URL of a server that speaks S3."""
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


_numbers = itertools.count()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a place in an empty bucket, and an environment that leads there."""
    bucket = f"blobs-{next(_numbers)}"
    httpx.put(f"{s3_server}/{bucket}").raise_for_status()
    environment = {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{bucket}/some/where"


MakeAdapter = Callable[[str, bytes], Path]


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeAdapter:
    """make(name, weights) -> folder"""

    def make(name: str, weights: bytes) -> Path:
        folder = tmp_path / "made" / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(weights)
        return folder

    return make
