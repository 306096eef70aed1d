"""A real `polygraft serve` on the demo model and its adapters, started and ended by the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.server import ADMIN_KEY, START_SECONDS, TENANT_KEY, Server, free_port

StartServer = Callable[..., Server]


@contextmanager
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start servers with these command-line options; all are ended with the block."""
    servers: list[Server] = []

    def start(
        *options: str, data_dir: Path | None = None, wait: bool = True, env: dict[str, str] | None = None
    ) -> Server:
        folder = tmp_path_factory.mktemp("serve")
        port, metrics_port = free_port(), free_port()
        log = folder / "log.txt"
        keys = {"POLYGRAFT_BOOTSTRAP_ADMIN_KEY": ADMIN_KEY, "POLYGRAFT_BOOTSTRAP_TENANT_KEY": TENANT_KEY}
        command = [sys.executable, "-m", "polygraft", "serve", *options]
        command += ["--port", str(port), "--metrics-port", str(metrics_port)]
        command += ["--data-dir", str(folder / "data" if data_dir is None else data_dir)]
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=os.environ | (keys if env is None else env)
            )
        server = Server(process, port, metrics_port, log)
        servers.append(server)
        if wait:
            server.wait(server.ready, START_SECONDS)
        return server

    try:
        yield start
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start a server with these command-line options; all are ended when the module's tests are done."""
    with starting(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_model: Path, demo_adapters: dict[str, Path]
) -> Iterator[Server]:
    """The demo, as `make demo` serves it but with keys on, for all modules."""
    options = [f"--adapter={name}={path}" for name, path in demo_adapters.items()]
    with starting(tmp_path_factory) as start:
        yield start(str(demo_model), "--max-model-len", "2048", *options)
