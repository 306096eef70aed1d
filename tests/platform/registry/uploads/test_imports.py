"""Imports: from folders, buckets and the Hub, each only where the operator allows it."""

import errno
import json
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import structlog
from huggingface_hub import constants
from moto.server import ThreadedMotoServer

from polygraft.errors import ApiError
from polygraft.registry.uploads.sources import Sources
from polygraft.registry.uploads.staging import FLOOR

from .making import CONFIG, PATH, WEIGHTS, eventually, files

Shown = Callable[[str], Awaitable[Any]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The only folder that may be imported from."""
    root = tmp_path / "root"
    put(root / "pirate", files())
    put(tmp_path / "secret", files())
    return root


@pytest.fixture
def sources(root: Path) -> dict[str, Any]:
    return {"adapter_roots": (str(root),), "import_sources": ("s3://allowed", "hf://org/", "s3://other/public")}


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of the bucket `allowed`, empty."""
    httpx.post(f"{s3_server}/moto-api/reset").raise_for_status()
    httpx.put(f"{s3_server}/allowed").raise_for_status()
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return f"{s3_server}/allowed"


def put(folder: Path, contents: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def store(bucket: str, prefix: str, contents: dict[str, bytes]) -> None:
    """Put objects into a bucket."""
    for name, content in contents.items():
        httpx.put(f"{bucket}/{prefix}/{name}" if prefix else f"{bucket}/{name}", content=content).raise_for_status()


async def imported(client: httpx.AsyncClient, source: str, name: str = "pirate") -> httpx.Response:
    return await client.post(f"{PATH}/import", json={"name": name, "source": source})


async def ended(client: httpx.AsyncClient, shown: Shown, source: str) -> Any:
    """The adapter after its import."""
    response = await imported(client, source)
    assert response.status_code == 202, response.text
    assert (response.json()["object"], response.json()["name"]) == ("adapter", "pirate")

    async def has_ended() -> bool:
        return bool((await shown("pirate")).status != "validating")

    await eventually(has_ended)
    return await shown("pirate")


async def removed(staged: Callable[[], list[str]]) -> None:
    """Nothing is left in the staging folder, a moment after the end is told."""

    async def is_empty() -> bool:
        return staged() == []

    await eventually(is_empty)


async def test_a_folder(client: httpx.AsyncClient, shown: Shown, root: Path, staged: Callable[[], list[str]]) -> None:
    found = await ended(client, shown, f"file://{root}/pirate")
    assert (found.status, found.version, found.rank) == ("ready", 1, 2)
    await removed(staged)


async def test_a_folder_whose_files_are_links_within_the_root(
    client: httpx.AsyncClient, shown: Shown, root: Path
) -> None:
    """As in the Hub's own cache."""
    put(root / "blobs", {"1": files()[CONFIG], "2": files()[WEIGHTS]})
    (root / "snapshot").mkdir()
    (root / "snapshot" / CONFIG).symlink_to("../blobs/1")
    (root / "snapshot" / WEIGHTS).symlink_to("../blobs/2")
    (root / "link").symlink_to("snapshot")
    assert (await ended(client, shown, f"file://{root}/link")).status == "ready"


async def test_files_that_lead_out_of_the_root(client: httpx.AsyncClient, shown: Shown, root: Path) -> None:
    put(root / "sly", {CONFIG: files()[CONFIG]})
    (root / "sly" / WEIGHTS).symlink_to(root.parent / "secret" / WEIGHTS)
    found = await ended(client, shown, f"file://{root}/sly")
    assert found.status == "failed"
    assert "leads out" in found.status_reason
    assert "secret" not in found.status_reason


async def test_a_pipe_is_no_file(client: httpx.AsyncClient, shown: Shown, root: Path) -> None:
    put(root / "pipe", {CONFIG: files()[CONFIG]})
    os.mkfifo(root / "pipe" / WEIGHTS)
    assert "no regular file" in (await ended(client, shown, f"file://{root}/pipe")).status_reason


async def test_what_is_outside_and_what_is_not_there_are_told_alike(client: httpx.AsyncClient, root: Path) -> None:
    (root / "out").symlink_to(root.parent / "secret")
    (root / "loop").symlink_to("loop")
    answers = [
        await imported(client, source)
        for source in (
            f"file://{root}/nothing", f"file://{root}/out", f"file://{root}/loop", f"file://{root}/../secret",
            f"file://{root.parent}/secret", f"file://{root}/%2e%2e/secret", "file:///etc", f"file://{root}/a%00b",
            f"file://{root}-evil",
        )
    ]  # fmt: skip
    assert {answer.status_code for answer in answers} == {403}
    assert len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize("name", ["adapter.zip", WEIGHTS])
async def test_a_file_is_no_folder(client: httpx.AsyncClient, shown: Shown, root: Path, name: str) -> None:
    (root / name).write_text("x")
    told = (await ended(client, shown, f"file://{root}/{name}")).status_reason
    assert "is a file; an adapter is a folder with adapter_config.json and adapter_model.safetensors" in told


async def test_a_folder_that_holds_something_else(client: httpx.AsyncClient, shown: Shown, root: Path) -> None:
    put(root / "model", {"config.json": b"{}", "model.safetensors": b""})
    put(root / "model" / "checkpoint-5", files())
    told = (await ended(client, shown, f"file://{root}/model")).status_reason
    assert "adapter_config.json: not there; what is there: checkpoint-5/, config.json, model.safetensors" in told
    assert "the folder that save_pretrained() wrote" in told
    (root / "empty").mkdir()
    assert "not there: nothing is" in (await ended(client, shown, f"file://{root}/empty")).status_reason


@pytest.mark.parametrize(
    "source",
    ["", "x", "/etc", "http://169.254.169.254/latest", "s3://", "s3:///x", "hf://", "hf://org", "hf://a/b/c",
     "hf://org/repo@", "gs://b/p", "s3://Bucket/x", "hf://org/re po", "s3://allowed/a\0b", "S3://allowed/x",
     "file://", "file://./pirate", "file://host/etc", "file:///etc?x", "file:etc"],
)  # fmt: skip
async def test_what_is_no_source(client: httpx.AsyncClient, source: str) -> None:
    response = await imported(client, source)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "source"), response.text


@pytest.mark.parametrize(
    "source",
    ["hf://org/repo@../../x", "hf://evil/repo", "s3://allowed-evil/x", "s3://allowed/../x", "s3://other/publicly/x",
     "s3://other/private", "hf://../x", "hf://org/.."],
)  # fmt: skip
async def test_what_is_not_allowed(client: httpx.AsyncClient, source: str) -> None:
    response = await imported(client, source)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "source_not_allowed"), response.text


async def test_nothing_is_allowed_unless_the_operator_says_so(root: Path) -> None:
    async def room(size: int) -> None:
        pass

    sources = Sources((), (), 1 << 20, room)
    for source in (f"file://{root}/pirate", "hf://org/repo", "s3://allowed/x"):
        with pytest.raises(ApiError):
            await sources.admit(source)


async def test_bad_names_are_refused_before_anything_is_fetched(client: httpx.AsyncClient, root: Path) -> None:
    assert (await imported(client, f"file://{root}/pirate", "No")).status_code == 400
    assert (await imported(client, f"file://{root}/pirate", "base")).status_code == 409


@pytest.mark.parametrize("prefix", ["", "models/pirate", "models/pirate/"])
async def test_a_bucket(client: httpx.AsyncClient, shown: Shown, s3: str, prefix: str) -> None:
    store(s3, prefix.rstrip("/"), files())
    found = await ended(client, shown, f"s3://allowed/{prefix}")
    assert (found.status, found.status_reason) == ("ready", None)


async def test_a_bucket_without_an_adapter(client: httpx.AsyncClient, shown: Shown, s3: str) -> None:
    store(s3, "x", {"adapter_model.bin": b"\x80"})
    found = await ended(client, shown, "s3://allowed/x")
    assert found.status == "failed"
    assert "only adapter_model.bin" in found.status_reason


async def test_a_bucket_that_does_not_answer(
    client: httpx.AsyncClient, shown: Shown, s3: str, staged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.replace("allowed", "nowhere"))
    found = await ended(client, shown, "s3://allowed/x")
    assert (found.status, "127.0.0.1" in found.status_reason) == ("failed", False)
    await removed(staged)


async def test_more_than_an_adapter_may_have(client: httpx.AsyncClient, shown: Shown, s3: str, root: Path) -> None:
    store(s3, "big", {CONFIG: b"{}", WEIGHTS: bytes(2 << 20)})
    assert "more than 1048576 bytes" in (await ended(client, shown, "s3://allowed/big")).status_reason
    put(root / "big", {CONFIG: b"{}", WEIGHTS: bytes(2 << 20)})
    assert "more than 1048576 bytes" in (await ended(client, shown, f"file://{root}/big")).status_reason


async def test_a_folder_with_more_files_than_an_adapter_has(
    client: httpx.AsyncClient, shown: Shown, root: Path
) -> None:
    put(root / "many", files() | {f"{number}": b"" for number in range(999)})
    assert "more than 1000 files" in (await ended(client, shown, f"file://{root}/many")).status_reason


async def without_room(
    client: httpx.AsyncClient, shown: Shown, source: str, staged: Callable[[], list[str]], monkeypatch: Any
) -> None:
    """It is begun while there is room for nothing, and fails as soon as something comes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=FLOOR))
    found = await ended(client, shown, source)
    assert found.status == "failed"
    assert "There is no room for uploads just now." in found.status_reason
    await removed(staged)


async def test_a_folder_that_there_is_no_room_for(
    client: httpx.AsyncClient, shown: Shown, root: Path, staged: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    await without_room(client, shown, f"file://{root}/pirate", staged, monkeypatch)


async def test_a_bucket_that_there_is_no_room_for(
    client: httpx.AsyncClient, shown: Shown, s3: str, staged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store(s3, "x", files())
    await without_room(client, shown, "s3://allowed/x", staged, monkeypatch)


@pytest.mark.usefixtures("hub")
async def test_a_repository_that_there_is_no_room_for(
    client: httpx.AsyncClient, shown: Shown, staged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    await without_room(client, shown, "hf://org/pirate@v1", staged, monkeypatch)


async def test_a_disk_that_fills_up_in_the_middle(
    client: httpx.AsyncClient, shown: Shown, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    found = await ended(client, shown, f"file://{root}/pirate")
    assert (found.status, "There is no room for uploads just now." in found.status_reason) == ("failed", True)


async def test_without_room_nothing_is_begun(
    client: httpx.AsyncClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=FLOOR - 1))
    refused = await imported(client, f"file://{root}/pirate")
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "There is no room for uploads just now.")


class FakeHub(BaseHTTPRequestHandler):
    """The few answers of the Hub that are needed."""

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/models/org/pirate/tree/v1?"):
            listed = [{"type": "file", "path": each, "size": 1, "oid": "0"} for each in [*files(), "README.md"]]
            self._answer(200, json.dumps(listed).encode(), "application/json")
        elif self.path.startswith("/api/models/org/moved/tree/main?"):
            listed = [{"type": "file", "path": each, "size": 1, "oid": "0"} for each in files()]
            self._answer(200, json.dumps(listed).encode(), "application/json")
        elif self.path.startswith("/org/moved/resolve/main/"):
            self.send_response(302)
            self.send_header("Location", "/elsewhere?X-Signature=secret")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path.startswith("/org/pirate/resolve/v1/"):
            self._answer(200, (files() | {"README.md": b"# pirate"})[name], "application/octet-stream")
        else:
            self._answer(404, b"{}", "application/json")

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hub that has org/pirate@v1, and may be reached."""
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr("polygraft.registry.uploads.remote.HfApi.endpoint", url, raising=False)
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("hub")
async def test_the_hub(client: httpx.AsyncClient, shown: Shown) -> None:
    found = await ended(client, shown, "hf://org/pirate@v1")
    assert (found.status, found.status_reason) == ("ready", None)


@pytest.mark.usefixtures("hub")
async def test_what_the_hub_does_not_have(client: httpx.AsyncClient, shown: Shown) -> None:
    found = await ended(client, shown, "hf://org/other")
    assert found.status == "failed"
    assert "hf://org/other@main: does not exist" in found.status_reason


@pytest.mark.usefixtures("hub")
async def test_the_signed_address_of_a_redirection_is_told_to_nobody(client: httpx.AsyncClient, shown: Shown) -> None:
    with structlog.testing.capture_logs() as logged:
        found = await ended(client, shown, "hf://org/moved")
    assert found.status == "failed"
    [entry] = [entry for entry in logged if entry["event"] == "import_failed"]
    assert (entry["kind"], entry["error"]) == ("HTTPStatusError", "404 from 127.0.0.1")
    assert "Signature" not in f"{logged} {found}"


async def test_a_server_without_network_says_so(client: httpx.AsyncClient, shown: Shown) -> None:
    found = await ended(client, shown, "hf://org/pirate@v1")
    assert (found.status, "offline (HF_HUB_OFFLINE)" in found.status_reason) == ("failed", True)
