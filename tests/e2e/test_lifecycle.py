"""Starting, dying and ending: what an operator sees of `polygraft serve`."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import httpx
import psutil
import pytest
from tests.e2e.conftest import StartServer
from tests.e2e.server import TENANT_KEY, Server

pytestmark = pytest.mark.slow

STORY = {
    "model": "SmolLM2-135M-Instruct",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 40,
    "temperature": 0,
    "stream": True,
    "ignore_eos": True,
}


class Listener(threading.Thread):
    """Reads one stream to its end, whatever happens to the server."""

    def __init__(self, server: Server, body: dict[str, object]) -> None:
        super().__init__()
        self.server, self.body = server, body
        self.lines: list[str] = []

    def run(self) -> None:
        with httpx.stream(
            "POST",
            f"{self.server.url}/v1/chat/completions",
            json=self.body,
            headers=self.server.headers(),
            timeout=120,
        ) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    self.lines.append(line.removeprefix("data: "))


def worker_of(server: Server) -> psutil.Process:
    return next(child for child in server.children() if "worker" in child.cmdline())


def test_sigterm_lets_streams_finish_and_leaves_nothing(start_server: StartServer, demo_model: Path) -> None:
    server = start_server(str(demo_model))
    children = server.children()
    listeners = [Listener(server, STORY) for _ in range(5)]
    for listener in listeners:
        listener.start()
    server.wait(lambda: all(listener.lines for listener in listeners), 60)
    server.process.send_signal(signal.SIGTERM)
    for listener in listeners:
        listener.join(60)
        assert listener.lines[-1] == "[DONE]"
        assert [json.loads(line)["choices"][0]["finish_reason"] for line in listener.lines[:-1]][-1] == "length"
    assert server.process.wait(60) == 0
    assert psutil.wait_procs(children, timeout=5)[1] == []


def test_sigkill_of_the_parent_takes_the_children_along(start_server: StartServer, demo_model: Path) -> None:
    server = start_server(str(demo_model))
    children = server.children()
    assert len(children) >= 3
    server.process.kill()
    assert psutil.wait_procs(children, timeout=10)[1] == []


def test_a_dead_worker_is_restarted_and_its_clients_are_told(start_server: StartServer, demo_model: Path) -> None:
    server = start_server(str(demo_model))
    listener = Listener(server, STORY | {"max_tokens": 2000})
    listener.start()
    server.wait(lambda: len(listener.lines) > 3, 60)
    worker_of(server).kill()
    server.wait(lambda: not server.ready(), 30)
    listener.join(60)
    assert not listener.is_alive()
    assert "error" in json.loads(listener.lines[-1])
    server.wait(server.ready, 120)
    again = Listener(server, STORY)
    again.start()
    again.join(60)
    assert again.lines[-1] == "[DONE]"


def test_probes_are_red_until_a_token_can_be_produced(start_server: StartServer, demo_model: Path) -> None:
    server = start_server(str(demo_model), wait=False)
    server.wait(lambda: listening(server), 60)
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    ready = httpx.get(f"{server.url}/health/ready")
    assert ready.status_code == 503
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=STORY, headers=server.headers(), timeout=10)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    server.wait(server.ready, 120)


def listening(server: Server) -> bool:
    try:
        httpx.get(f"{server.url}/health/live", timeout=5)
    except httpx.TransportError:
        return False
    return True


def test_every_bad_adapter_is_named_and_nothing_is_served(
    start_server: StartServer, demo_model: Path, demo_adapters: dict[str, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text((demo_adapters["json"] / "adapter_config.json").read_text())
    (broken / "adapter_model.safetensors").write_bytes(
        (demo_adapters["json"] / "adapter_model.safetensors").read_bytes()[:5000]
    )
    server = start_server(
        str(demo_model),
        f"--adapter=good={demo_adapters['json']}",
        f"--adapter=cut={broken}",
        f"--adapter=base={demo_model}",
        wait=False,
    )
    assert server.process.wait(120) == 1
    log = server.log.read_text()
    assert "cut" in log
    assert "base" in log


def test_a_model_that_is_an_adapter_is_explained(start_server: StartServer, demo_adapters: dict[str, Path]) -> None:
    server = start_server(str(demo_adapters["json"]), wait=False)
    assert server.process.wait(60) == 1
    assert "--adapter" in server.log.read_text()


def test_keys_are_shown_once_and_the_folder_has_one_owner(
    start_server: StartServer, demo_model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    first = start_server(str(demo_model), data_dir=data, env={})
    shown = first.log.read_text()
    assert "pg-admin-" in shown
    second = start_server(str(demo_model), data_dir=data, wait=False)
    assert second.process.wait(60) == 1
    assert str(data) in second.log.read_text()
    assert first.stop() == 0
    third = start_server(str(demo_model), data_dir=data, env={})
    assert "pg-admin-" not in third.log.read_text()
    key = next(word for word in shown.split() if word.startswith("pg-") and not word.startswith("pg-admin-"))
    third.api_key = key
    assert httpx.get(f"{third.url}/v1/models", headers=third.headers()).status_code == 200
    assert httpx.get(f"{third.url}/v1/models", headers={"Authorization": f"Bearer {TENANT_KEY}"}).status_code == 401


def test_a_stuck_worker_turns_readiness_red(start_server: StartServer, demo_model: Path) -> None:
    server = start_server(str(demo_model))
    worker = worker_of(server)
    worker.suspend()
    try:
        server.wait(lambda: not server.ready(), 30)
    finally:
        worker.resume()
    server.wait(server.ready, 30)
