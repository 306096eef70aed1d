"""Commands against a real gateway with a real queue server; a worker has told of its model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from polygraft.blobs import BlobStore
from polygraft.card import ModelCard
from polygraft.cli import app
from polygraft.db import sqlite_url
from polygraft.listener import Listeners, listen, port_of
from polygraft.lock import locked
from polygraft.queue.messages import WorkerStatus
from polygraft.queue.worker import WorkerQueue
from polygraft.valkey import PrivateValkey
from polygraft_adapters.types import ModuleShapes
from polygraft_migrations import upgrade

pytestmark = pytest.mark.slow

ADMIN_KEY = "pg-admin-" + "A" * 40
LAYERS, WIDTH, RANK = 8, 512, 32


@dataclass
class Proxy:
    """Passes bytes on to a server, and breaks the connection once `cut_after` bytes have come from clients."""

    target: int
    cut_after: int | None = None
    passed: int = 0
    cuts: int = 0
    _listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    def __post_init__(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self.target))
            for source, sink, counted in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass_on, args=(source, sink, counted), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        try:
            # An error is the other direction's end.
            with suppress(OSError):
                while data := source.recv(65536):
                    if counted:
                        self.passed += len(data)
                        if self.cut_after is not None and self.passed > self.cut_after:
                            self.cut_after, self.cuts = None, self.cuts + 1
                            break
                    sink.sendall(data)
        finally:
            for end in (source, sink):
                # The other direction's thread waits on the same two sockets; closing them alone would tell nobody.
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


@dataclass
class Shell:
    """Runs command lines in this process: starting one for each would be most of the test's time."""

    environment: dict[str, str]

    def __call__(self, *arguments: str | Path, code: int = 0, **environment: str) -> Result:
        done = CliRunner().invoke(app, [str(one) for one in arguments], env={**self.environment, **environment})
        assert done.exit_code == code, (arguments, done.output)
        return done

    def json(self, *arguments: str | Path, **environment: str) -> Any:
        return json.loads(self(*arguments, "--json", **environment).stdout)


def save_adapter(folder: Path, seed: int, *, width: int = WIDTH) -> Path:
    """A LoRA for every layer, as PEFT saves it."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "base",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = numpy.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        place = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{place}.lora_A.weight"] = random.standard_normal((RANK, width), dtype=numpy.float32)
        tensors[f"{place}.lora_B.weight"] = random.standard_normal((width, RANK), dtype=numpy.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def registered(tmp_path: Path, card: ModelCard) -> Iterator[PrivateValkey]:
    """A queue in which a worker with the model `base` is alive."""
    valkey = PrivateValkey(tmp_path / "valkey")
    valkey.start()
    shapes = ModuleShapes(layers=LAYERS, shapes={"q_proj": (WIDTH, WIDTH)}, base_model="base")
    digest = BlobStore(tmp_path / "data" / "blobs").put_bytes(b"{}")
    card = msgspec.structs.replace(card, modules=shapes, max_lora_rank=RANK, tokenizer=digest)
    queue = WorkerQueue(valkey.url, "worker-1", "base")
    stop = threading.Event()

    def status() -> WorkerStatus:
        return WorkerStatus(
            id="worker-1", pid=1, host="h", model="base", state="ready", running=0, waiting=0, kv_blocks_total=4,
            kv_blocks_free=4, resident_adapters=(), last_seen=time.time(), stalled_seconds=0.0,
        )  # fmt: skip

    def beat() -> None:
        while not stop.wait(0.5):
            queue.heartbeat(status())

    queue.register(card, status())
    heart = threading.Thread(target=beat)
    heart.start()
    yield valkey
    stop.set()
    heart.join()
    queue.close()
    valkey.stop()


@pytest.fixture
def port(tmp_path: Path, registered: PrivateValkey) -> Iterator[int]:
    """The port of a gateway that is ready."""
    upgrade(sqlite_url(tmp_path / "data" / "registry.db"))
    listeners = Listeners(listen("127.0.0.1", 0, "--port"), listen("127.0.0.1", 0, "--metrics-port"))
    fds = (listeners.http.fileno(), listeners.metrics.fileno())
    command = ["gateway", "--listen-fd", str(fds[0]), "--metrics-fd", str(fds[1]), "--redis-url", registered.url]
    log = tmp_path / "log.txt"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "polygraft", *command, "--data-dir", str(tmp_path / "data")],
            pass_fds=fds,
            env={**os.environ, "POLYGRAFT_BOOTSTRAP_ADMIN_KEY": ADMIN_KEY, "POLYGRAFT_DRAIN_TIMEOUT": "1"},
            stdout=sink,
            stderr=sink,
        )
    try:
        port = port_of(listeners.http)
        deadline = time.monotonic() + 60
        while not ready(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(20)
        listeners.http.close()
        listeners.metrics.close()


def ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_a_key_that_is_revoked_on_the_database_is_refused_by_the_gateway_soon(port: int, tmp_path: Path) -> None:
    beside = Shell({"COLUMNS": "200"})
    where = ("--data-dir", tmp_path / "data")
    with locked(tmp_path / "data" / "lock"):
        key = beside("key", "create", "default", "--name", "ci", *where).stdout.strip()
        headers = {"Authorization": f"Bearer {key}"}
        models = f"http://127.0.0.1:{port}/v1/models"
        assert httpx.get(models, headers=headers).status_code == 200
        (made,) = (one for one in beside.json("key", "list", "default", *where) if one["name"] == "ci")
        revoked = beside("key", "revoke", "default", made["id"], *where)
    assert "hear of changes within 2 seconds" in revoked.stderr
    time.sleep(2.0)
    assert httpx.get(models, headers=headers).status_code == 401


def test_a_tenant_from_its_first_key_to_its_end(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(port)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    width = {"COLUMNS": "200", "TERMINAL_WIDTH": "200"}
    shell = Shell({"POLYGRAFT_URL": proxy.url, "POLYGRAFT_ADMIN_KEY": ADMIN_KEY, **width})

    # an operator makes two tenants and a key for each
    for name in ("acme", "rival"):
        shell("tenant", "create", name)
        shell.environment[f"{name}_key"] = shell("key", "create", name, "--name", "laptop").stdout.strip()
    acme = {"POLYGRAFT_API_KEY": shell.environment.pop("acme_key")}
    rival = {"POLYGRAFT_API_KEY": shell.environment.pop("rival_key")}

    # the first upload breaks half-way and goes on by itself
    first, second = save_adapter(work / "first", 1), save_adapter(work / "second", 2)
    proxy.cut_after = proxy.passed + 600_000
    pushed = shell("adapter", "push", first, "--name", "voice", **acme)
    assert pushed.stdout.startswith("voice@v1  sha256:")
    assert f"rank {RANK}  ready" in pushed.stdout
    assert proxy.cuts == 1
    size = (first / "adapter_model.safetensors").stat().st_size
    assert proxy.passed < 2 * size, "what had arrived was sent again"
    assert shell("adapter", "push", second, "--name", "voice", **acme).stdout.startswith("voice@v2  ")
    assert shell("adapter", "push", first, "--name", "voice", **acme).stdout.startswith("voice@v1  ")

    # what is wrong with an adapter is told in full
    odd = save_adapter(work / "odd", 3, width=WIDTH // 2)
    refused = shell("adapter", "push", odd, "--name", "voice", code=1, **acme)
    assert "layers.0.self_attn.q_proj.lora_A" in refused.stderr
    assert "layers.7.self_attn.q_proj.lora_B" in refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("error: ")
    assert refused.stderr.splitlines()[-1].endswith("(invalid_adapter)")
    assert refused.stdout == ""

    # versions, aliases, sharing
    assert "ready" in shell("adapter", "rollback", "voice", "v2", **acme).stdout
    shell("adapter", "alias", "set", "voice", "prod", "v1", **acme)
    shell("adapter", "alias", "set", "voice", "try", "v1=90,v2=10", **acme)
    listing = shell("adapter", "list", **acme).stdout
    assert "prod → v1; try → v1=90,v2=10" in listing
    assert shell.json("adapter", "list", "--tenant", "acme") == shell.json("adapter", "list", **acme)
    statuses = [one["status"] for one in shell.json("adapter", "versions", "voice", **acme)]
    assert statuses[-2:] == ["ready", "ready"]
    shell("adapter", "share", "voice", "rival", **acme)
    shell("adapter", "unshare", "voice", "rival", **acme)
    hidden = shell("adapter", "show", "voice", code=1, **rival)
    assert hidden.stderr == "error: There is no adapter `voice`. (not_found)\n"

    # what was pushed comes back
    for source, original in (("voice", second), ("voice@v1", first), ("voice@prod", first)):
        shell("adapter", "pull", source, source, **acme)
        theirs = load_file(original / "adapter_model.safetensors")
        mine = load_file(work / source / "adapter_model.safetensors")
        assert theirs.keys() == mine.keys()
        assert all((theirs[name] == mine[name]).all() for name in theirs)
    shell("adapter", "pull", "voice@try", "several", code=1, **acme)
    shell("adapter", "alias", "remove", "voice", "try", **acme)

    # deletion, restoration, and an upload that is given up
    shell("adapter", "delete", "voice", **acme)
    assert shell.json("adapter", "list", **acme) == []
    shell("adapter", "restore", "voice", **acme)
    assert [one["name"] for one in shell.json("adapter", "list", **acme)] == ["voice"]

    # the operator looks at what was done, and ends it
    actions = {entry["action"] for entry in shell.json("audit", "--tenant", "acme", "--limit", "100")}
    assert {"tenant.create", "key.create", "adapter.rollback", "adapter.delete", "adapter.restore"} <= actions
    (key,) = shell.json("key", "list", "acme")
    shell("key", "rotate", "acme", key["id"])
    shell("tenant", "disable", "acme")
    time.sleep(2.5)
    assert "invalid_api_key" in shell("adapter", "list", code=1, **acme).stderr
    shell("tenant", "delete", "acme", "--yes")
    assert [one["name"] for one in shell.json("tenant", "list")] == ["rival", "default"]
    proxy.close()
