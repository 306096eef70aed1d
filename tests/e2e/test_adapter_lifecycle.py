"""Adapters that come, change and go while requests run, and a server that is killed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from tests.e2e.conftest import StartServer
from tests.e2e.server import Server
from tests.e2e.tenants import Operator, Tenant, served, zipped

pytestmark = pytest.mark.slow

CYCLES = 200
RATE = 20.0
"""Requests a second."""


@pytest.fixture(scope="module")
def tenant(server: Server) -> Tenant:
    return Operator(server).tenant("lifecycle")


def test_replacing_under_load_loses_nothing_and_mixes_nothing(tenant: Tenant, demo_adapters: dict[str, Path]) -> None:
    contents = [zipped(demo_adapters["json"]), zipped(demo_adapters["pirate"])]
    assert tenant.push("swap", contents[0]).status_code == 201
    stop = threading.Event()
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(tenant.chat("swap", max_tokens=4))

    def load(pool: ThreadPoolExecutor) -> None:
        while not stop.wait(1 / RATE):
            pool.submit(ask)

    with ThreadPoolExecutor(64) as pool:
        loader = threading.Thread(target=load, args=(pool,))
        loader.start()
        for number in range(1, 6):
            time.sleep(1.0)
            assert tenant.push("swap", contents[number % 2]).status_code in (200, 201)
        time.sleep(1.0)
        stop.set()
        loader.join()
    assert len(answers) > 5 * RATE
    texts: dict[str, set[str]] = {}
    for answer in answers:
        text, version = served(answer)
        texts.setdefault(version, set()).add(text)
    assert len(texts) == 2
    assert all(len(each) == 1 for each in texts.values()), f"a version speaks with one voice: {texts}"
    first, second = texts.values()
    assert first != second


def test_parallel_deletions_and_uploads_leave_no_ghosts(tenant: Tenant, demo_adapters: dict[str, Path]) -> None:
    content = zipped(demo_adapters["pirate"])
    with ThreadPoolExecutor(8) as pool:
        pushed = [answer.status_code for answer in pool.map(lambda _: tenant.push("ghost", content), range(4))]
        assert sorted(set(pushed)) in ([200, 201], [201])
        gone = list(pool.map(lambda _: tenant.call("DELETE", "/v1/adapters/ghost"), range(4)))
    assert sorted(answer.status_code for answer in gone) == [200, 404, 404, 404]
    assert "ghost" not in tenant.models()
    assert tenant.chat("ghost").status_code == 404


def test_two_hundred_cycles_leave_memory_flat(server: Server, tenant: Tenant, demo_adapters: dict[str, Path]) -> None:
    contents = [zipped(folder) for folder in demo_adapters.values()]
    processes = [child for child in server.children() if child.name() != "valkey-server"]

    def memory() -> int:
        return sum(process.memory_info().rss for process in processes)

    def cycle(number: int) -> None:
        name = f"cycle-{number % 7}"
        assert tenant.push(name, contents[number % len(contents)]).status_code in (200, 201)
        assert tenant.chat(name, max_tokens=1).status_code == 200
        assert tenant.call("DELETE", f"/v1/adapters/{name}").status_code == 200

    for number in range(30):
        cycle(number)
    before = memory()
    for number in range(30, CYCLES):
        cycle(number)
    assert memory() < before + (64 << 20)


def test_everything_ready_is_served_again_after_everything_was_killed(
    start_server: StartServer, demo_model: Path, demo_adapters: dict[str, Path], tmp_path: Path
) -> None:
    options = (str(demo_model), "--max-model-len", "512")
    first = start_server(*options, data_dir=tmp_path)
    tenant = Operator(first).tenant("durable")
    tenant.pushed("mine", demo_adapters["json"])
    tenant.pushed("mine", demo_adapters["pirate"])
    before = served(tenant.chat("mine@v1")), served(tenant.chat("mine"))
    for process in [psutil.Process(first.process.pid), *first.children()]:
        with suppress(psutil.NoSuchProcess):  # children die with their parent
            process.kill()
    first.process.wait(30)
    again = start_server(*options, data_dir=tmp_path)
    survivor = Tenant(again, tenant.id, tenant.name, tenant.key)
    assert "mine" in survivor.models()
    assert (served(survivor.chat("mine@v1")), served(survivor.chat("mine"))) == before
