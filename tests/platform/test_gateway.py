"""The gateway process with a real queue server, and a worker whose part the test plays."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel

from polygraft.blobs import BlobStore
from polygraft.card import ModelCard
from polygraft.db import sqlite_url
from polygraft.listener import Listeners, listen, port_of
from polygraft.queue.messages import ChoiceDelta, JobEvent, Usage, WorkerState, WorkerStatus
from polygraft.queue.worker import Emission, WorkerQueue
from polygraft.supervisor import CONFIG_EXIT_CODE
from polygraft.valkey import PrivateValkey
from polygraft_migrations import upgrade

pytestmark = pytest.mark.slow

KEY = "the-tenants-key"
WORDS = ("hello", "world", "again", "unknown")


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@dataclass
class Gateway:
    """A gateway process and how to reach it."""

    process: subprocess.Popen[str]
    http: httpx.Client

    def says(self, path: str) -> int:
        """The status; 0 if there is no answer. Fails when the process is gone."""
        assert self.process.poll() is None, self.process.communicate()
        try:
            return self.http.get(path).status_code
        except httpx.TransportError:
            return 0

    def complete(self, **body: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "base", "prompt": "hello", **body})


@dataclass
class Deployment:
    """A queue, a database and a blob store in one folder."""

    folder: Path
    valkey: PrivateValkey
    listeners: list[Listeners] = field(default_factory=list)
    gateways: list[Gateway] = field(default_factory=list)

    def gateway(self, *options: str, drain: float = 5.0) -> Gateway:
        """Start one, the way `serve` does."""
        made = Listeners(listen("127.0.0.1", 0, "--port"), listen("127.0.0.1", 0, "--metrics-port"))
        self.listeners.append(made)
        fds = (made.http.fileno(), made.metrics.fileno())
        places = ("--data-dir", str(self.folder), "--redis-url", self.valkey.url, "--drain-timeout", str(drain))
        command = ("--listen-fd", str(fds[0]), "--metrics-fd", str(fds[1]), "--served-model-name", "base")
        process = subprocess.Popen(
            [sys.executable, "-m", "polygraft", "gateway", *command, *places, *options],
            pass_fds=fds,
            env={**os.environ, "POLYGRAFT_BOOTSTRAP_TENANT_KEY": KEY},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        url = f"http://127.0.0.1:{port_of(made.http)}"
        http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=20.0)
        self.gateways.append(Gateway(process, http))
        return self.gateways[-1]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    valkey = PrivateValkey(tmp_path / "valkey")
    valkey.start()
    upgrade(sqlite_url(tmp_path / "registry.db"))
    made = Deployment(tmp_path, valkey)
    yield made
    for gateway in made.gateways:
        gateway.http.close()
        gateway.process.kill()
        gateway.process.communicate()
    for one in made.listeners:
        one.http.close()
        one.metrics.close()
    valkey.stop()


class Worker:
    """Registers the model, keeps its heart beating, and answers each job with `words`, or leaves it open."""

    def __init__(self, deployment: Deployment, card: ModelCard) -> None:
        tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="unknown"))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = ByteLevelDecoder()
        digest = BlobStore(deployment.folder / "blobs").put_bytes(tokenizer.to_str().encode())
        self.card = msgspec.structs.replace(card, tokenizer=digest, vocab_size=len(WORDS))
        self.state: WorkerState = "loading"
        self.words = ("world", "again")
        self.finishes = True
        self._queue = WorkerQueue(deployment.valkey.url, "worker-1", "base")
        self._stop = threading.Event()
        self._queue.register(self.card, self._status())
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _status(self) -> WorkerStatus:
        return WorkerStatus(
            id="worker-1", pid=1, host="h", model="base", state=self.state, running=0, waiting=0, kv_blocks_total=4,
            kv_blocks_free=4, resident_adapters=(), last_seen=time.time(), stalled_seconds=0.0,
        )  # fmt: skip

    def _work(self) -> None:
        turn = 0
        while not self._stop.wait(0.02):
            self._queue.heartbeat(self._status())
            turn += 1
            for claimed in self._queue.claim(4, f"nonce-{turn}"):
                events = [
                    JobEvent(job=claimed.job.id, seq=number, deltas=(ChoiceDelta(index=0, text=word, token_ids=(1,)),))
                    for number, word in enumerate(self.words)
                ]
                if self.finishes:
                    usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=len(self.words))
                    end = ChoiceDelta(index=0, finish_reason="stop")
                    events.append(JobEvent(job=claimed.job.id, seq=len(events), deltas=(end,), usage=usage))
                for event in events:
                    self._queue.publish(time.time(), [Emission(claimed.job.id, claimed.attempt, event)])

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._queue.close()


@pytest.fixture
def worker(deployment: Deployment, card: ModelCard) -> Iterator[Worker]:
    worker = Worker(deployment, card)
    yield worker
    worker.stop()


def frames(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def test_a_gateway_is_ready_when_its_worker_is_and_answers_what_it_says(deployment: Deployment, worker: Worker) -> None:
    gateway = deployment.gateway()
    eventually(lambda: gateway.says("/health/live") == 200)
    assert gateway.says("/health/ready") == 503
    refused = gateway.complete()
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    worker.state = "ready"
    eventually(lambda: gateway.says("/health/ready") == 200)
    whole = gateway.complete()
    assert whole.status_code == 200, whole.text
    assert whole.json()["choices"][0]["text"] == "worldagain"
    streamed = frames(gateway.complete(stream=True).text)
    assert streamed[-1] == "[DONE]"
    assert "".join(choice["text"] for frame in streamed[:-1] for choice in json.loads(frame)["choices"]) == "worldagain"
    worker.state = "draining"
    eventually(lambda: gateway.says("/health/ready") == 503)
    gateway.process.send_signal(signal.SIGTERM)
    out, log = gateway.process.communicate(timeout=20)
    assert gateway.process.returncode == 0
    assert out.count("pg-admin-") == 1
    assert KEY not in out + log


def test_sigterm_lets_streams_end_and_ends_those_that_do_not(deployment: Deployment, worker: Worker) -> None:
    worker.state, worker.finishes = "ready", False
    gateway = deployment.gateway(drain=1.0)
    eventually(lambda: gateway.says("/health/ready") == 200)
    body = {"model": "base", "prompt": "hello", "stream": True}
    with gateway.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"] == "world"
        gateway.process.send_signal(signal.SIGTERM)
        last = frames("\n".join(lines))[-1]
    assert json.loads(last)["error"]["type"] == "service_unavailable_error"
    gateway.process.communicate(timeout=20)
    assert gateway.process.returncode == 0


def test_bad_adapters_end_the_gateway_with_all_of_their_names(deployment: Deployment, worker: Worker) -> None:
    for name in ("empty", "merged"):
        (deployment.folder / name).mkdir()
    (deployment.folder / "merged" / "config.json").write_text("{}")
    options = [f"--adapter={name}={deployment.folder / name}" for name in ("empty", "merged")]
    gateway = deployment.gateway(*options)
    _, log = gateway.process.communicate(timeout=60)
    assert gateway.process.returncode == CONFIG_EXIT_CODE
    for name in ("empty", "merged"):
        assert f"the adapter {name!r} in {deployment.folder / name} cannot be served:" in log
