"""Commands set up logging for their whole process, which here is the tests' own; and a server for them to call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.platform.cli.fake_server import FakeServer
from typer.testing import CliRunner, Result

from polygraft.cli import app, remote

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def no_traces(logging_as_it_was: None) -> None:
    """Every test of a command leaves logging as it was."""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeServer:
    """Whatever address a command calls, this answers; the working folder is an empty one."""
    server = FakeServer()
    real = httpx.Client

    def client(**options: Any) -> httpx.Client:
        # Commands that work on a database bring a transport of their own.
        transport = options.pop("transport")
        return real(**options, transport=httpx.MockTransport(server) if transport is None else transport)

    monkeypatch.setattr(remote.httpx, "Client", client)
    monkeypatch.chdir(tmp_path)
    return server


@pytest.fixture
def run(fake: FakeServer) -> Run:
    """Run a command line with the fake server's key in the environment."""

    def command(*arguments: str | Path, columns: int = 200, **environment: str) -> Result:
        keys = {"POLYGRAFT_API_KEY": fake.key, "POLYGRAFT_ADMIN_KEY": fake.key}
        width = {"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)}
        return CliRunner().invoke(app, [str(one) for one in arguments], env={**width, **keys, **environment})

    return command
