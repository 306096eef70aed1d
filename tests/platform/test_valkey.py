"""A private server: found, started, reached, ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from polygraft.errors import ConfigError
from polygraft.valkey import PrivateValkey, find_server


def test_a_server_on_the_path_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "redis-server"
    installed.write_text("#!/bin/sh\n")
    installed.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == str(installed)


def test_without_one_the_packaged_server_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert Path(find_server()).name == "valkey-server"


def test_without_any_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--redis-url"):
        find_server()


def test_it_is_durable_refuses_eviction_and_opens_no_port(valkey_server: PrivateValkey) -> None:
    with redis.Redis.from_url(valkey_server.url) as client:
        wanted = {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
            "save": "",
            "port": "0",
        }
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
    assert valkey_server.socket.stat().st_mode & 0o077 == 0


def test_what_was_written_outlives_a_restart(tmp_path: Path) -> None:
    server = PrivateValkey(tmp_path)
    for expected in (None, b"1"):
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("kept") == expected
            client.set("kept", 1)
        server.stop()


def test_a_long_path_gets_a_short_socket(tmp_path: Path) -> None:
    server = PrivateValkey(tmp_path / ("long" * 30))
    assert len(os.fsencode(server.socket)) <= 107
    server.start()
    server.stop()
    assert (server.folder / "appendonlydir").is_dir()
    assert not server.socket.parent.exists()


def test_a_socket_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    server = PrivateValkey(tmp_path / ("long" * 30))
    server.socket.parent.mkdir()
    server.socket.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="--data-dir"):
        server.command()
    server.socket.parent.rmdir()


def test_a_server_that_ends_is_reported(tmp_path: Path) -> None:
    server = PrivateValkey(tmp_path, server="/bin/false")
    with pytest.raises(ConfigError, match="exit code 1"):
        server.start()
    server.stop()


def test_a_server_that_never_answers_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        PrivateValkey(tmp_path).wait_ready(timeout=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of other systems has no parent-death signal")
def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from polygraft.valkey import PrivateValkey\n"
        "server = PrivateValkey(Path(sys.argv[1])); server.start(); print('up', flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    client = redis.Redis.from_url(PrivateValkey(tmp_path).url, retry=None)
    assert client.ping()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    gone = False
    deadline = time.monotonic() + 5
    while not gone and time.monotonic() < deadline:
        time.sleep(0.05)
        try:
            client.ping()
        except redis.ConnectionError:
            gone = True
    client.close()
    assert gone
