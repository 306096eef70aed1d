"""An upload of two gibibytes goes through a real gateway to disk, and costs it no memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from tests.e2e.server import Server
from tests.e2e.tenants import Operator

pytestmark = pytest.mark.slow

MEBIBYTE = 1 << 20
SIZE = 2048 * MEBIBYTE
BOUNDARY = "frontier"


class Growth:
    """How many bytes of memory a process has taken on, at most, since this was made."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._before = process.memory_info().rss
        self.most = 0
        self.looks = 0

    def look(self) -> None:
        self.looks += 1
        self.most = max(self.most, self._process.memory_info().rss - self._before)


@contextmanager
def watching(process: psutil.Process) -> Iterator[Growth]:
    """Look at the process's memory again and again while the block runs."""
    growth, done = Growth(process), threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            growth.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield growth
    finally:
        done.set()
        thread.join()


def form(name: str) -> tuple[Iterator[bytes], int]:
    """A form whose `weights` are SIZE zeros, in pieces, and its length."""
    head = "".join(
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{part}"\r\n\r\n{content}'
        for part, content in (("name", f"{name}\r\n"), ("config", '{"peft_type": "LORA"}\r\n'), ("weights", ""))
    ).encode()
    tail = f"\r\n--{BOUNDARY}--\r\n".encode()

    def pieces() -> Iterator[bytes]:
        yield head
        zeros = bytes(MEBIBYTE)
        for _ in range(SIZE // MEBIBYTE):
            yield zeros
        yield tail

    return pieces(), len(head) + SIZE + len(tail)


def test_two_gibibytes_cost_the_gateway_no_memory(server: Server) -> None:
    tenant = Operator(server).tenant("large")
    # What the first upload of all makes the gateway load is not what is measured.
    assert tenant.push("large", b"PK").status_code == 422
    (gateway,) = [child for child in server.children() if "gateway" in child.cmdline()]
    pieces, length = form("large")
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", "Content-Length": str(length)}
    with watching(gateway) as growth:
        answer = tenant.call("POST", "/v1/adapters", content=pieces, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_adapter"), answer.text
    assert "adapter_model.safetensors" in answer.json()["error"]["message"], "it was taken in whole, and looked at"
    assert growth.looks > 10
    assert growth.most < 64 * MEBIBYTE
    staging = server.log.parent / "data" / "blobs" / "staging"
    server.wait(lambda: list(staging.iterdir()) == [])
