"""A handle on one real `polygraft serve` process."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

ADMIN_KEY = "pg-admin-" + "A" * 40
TENANT_KEY = "pg-" + "B" * 40
START_SECONDS = 240.0


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """One running `polygraft serve` and the ways to look at it."""

    process: subprocess.Popen[bytes]
    port: int
    metrics_port: int
    log: Path
    api_key: str = TENANT_KEY
    clients: list[OpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, api_key: str | None = None, **options: object) -> OpenAI:
        """A client that does not retry, so that tests see every answer."""
        key = self.api_key if api_key is None else api_key
        client = OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120, **options)  # type: ignore[arg-type]
        self.clients.append(client)
        return client

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels; there must be one."""
        text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text
        values = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert values, f"no metric {name} {labels}"
        return sum(values)

    def wait(self, condition: Callable[[], bool], seconds: float = 15.0) -> None:
        """Poll until the condition holds, or fail with the server's log."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"condition not met in {seconds} s; log:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.1)

    def ready(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(f"serve ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200
        return False

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        """SIGTERM and wait; the exit code."""
        for client in self.clients:
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)
