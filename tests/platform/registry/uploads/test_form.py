"""POST /v1/adapters: what may come in a form, in which order, and what is said of anything else."""

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Message

from polygraft.blobs import BlobStore
from polygraft.errors import ApiError
from polygraft.registry.uploads import body as body_module
from polygraft.registry.uploads import staging as staging_module
from polygraft.registry.uploads.body import Turns
from polygraft.registry.uploads.staging import FLOOR, Staging
from polygraft_adapters.config import MAX_CONFIG_BYTES

from .conftest import LARGEST
from .making import CONFIG, PATH, WEIGHTS, Send, config_of, files, form_of, mlx_files, tar_of, weights_of, zip_of

NAME = ("name", None, b"pirate")
FILE = ("file", "a.zip", zip_of(files()))
PARTS = (("config", CONFIG, config_of()), ("weights", WEIGHTS, weights_of()))


async def sent(client: httpx.AsyncClient, *parts: tuple[str, str | None, bytes]) -> httpx.Response:
    body, headers = form_of(*parts)
    return await client.post(PATH, content=body, headers=headers)


def error(response: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = response.json()["error"]
    return found


@pytest.mark.parametrize(
    ("filename", "pack"), [("a.zip", zip_of), ("a.tar.gz", tar_of), (None, zip_of), ("a.txt", tar_of)]
)
async def test_an_archive_becomes_a_version(client: httpx.AsyncClient, filename: str | None, pack: Any) -> None:
    response = await sent(client, NAME, ("file", filename, pack(files())))
    assert response.status_code == 201, response.text
    told = response.json()
    assert (told["object"], told["name"], told["version"], told["status"]) == ("adapter", "pirate", 1, "ready")
    assert (told["rank"], told["scale"], told["target_modules"]) == (2, 2.0, ["q_proj"])
    assert told["digest"].startswith("sha256:")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1)])
async def test_parts_come_in_any_order(client: httpx.AsyncClient, staged: Callable[[], list[str]], order: Any) -> None:
    parts = [(NAME, *PARTS)[index] for index in order]
    response = await sent(client, *parts)
    assert (response.status_code, response.json()["status"]) == (201, "ready")
    assert staged() == []


@pytest.mark.parametrize("packed", [True, False])
async def test_what_mlx_trained_is_converted(
    client: httpx.AsyncClient, blobs: BlobStore, staged: Callable[[], list[str]], packed: bool
) -> None:
    config, weights = mlx_files().values()
    parts = (("config", CONFIG, config), ("weights", "adapters.safetensors", weights))
    archive = ("file", "a.zip", zip_of(mlx_files()))
    response = await sent(client, NAME, *((archive,) if packed else parts))
    assert response.status_code == 201, response.text
    assert (response.json()["rank"], response.json()["scale"]) == (2, 20.0)
    assert (blobs.adapter_path(response.json()["digest"]) / WEIGHTS).exists()
    assert staged() == []


async def test_the_same_contents_again_are_no_new_version(client: httpx.AsyncClient) -> None:
    first, again = await sent(client, NAME, FILE), await sent(client, NAME, *PARTS)
    assert (first.status_code, again.status_code) == (201, 200)
    assert (again.json()["version"], again.json()["latest"]) == (1, None)
    changed = await sent(client, NAME, PARTS[0], ("weights", WEIGHTS, weights_of(0.25)))
    assert (changed.status_code, changed.json()["version"] > 1) == (201, True)


async def test_a_rejected_one_tells_all_that_is_wrong(
    client: httpx.AsyncClient, staged: Callable[[], list[str]], shown: Callable[[str], Awaitable[Any]]
) -> None:
    config = config_of(r=0, use_rslora="yes")
    response = await sent(client, NAME, ("config", CONFIG, config), ("weights", WEIGHTS, weights_of(float("nan"))))
    assert response.status_code == 422
    assert (error(response)["code"], error(response)["type"]) == ("invalid_adapter", "invalid_request_error")
    assert {found.get("field") for found in error(response)["errors"]} >= {"r", "use_rslora"}
    assert all(found.keys() - {"field", "tensor"} == {"problem", "hint"} for found in error(response)["errors"])
    assert staged() == []
    kept = await shown("pirate")
    assert kept.status == "failed"
    assert "use_rslora" in kept.status_reason


async def test_a_rejected_one_leaves_what_is_served(client: httpx.AsyncClient) -> None:
    await sent(client, NAME, FILE)
    assert (await sent(client, NAME, ("file", "a.zip", b"PK"))).status_code == 422
    assert (await sent(client, NAME, FILE)).json()["version"] == 1


@pytest.mark.parametrize(
    ("parts", "param", "says"),
    [
        ((FILE,), "name", "required"),
        ((NAME,), "file", "either"),
        ((NAME, PARTS[0]), "file", "both"),
        ((NAME, PARTS[1]), "file", "both"),
        ((NAME, FILE, PARTS[0]), "file", "either"),
        ((NAME, FILE, *PARTS), "file", "either"),
        ((NAME, NAME, FILE), "name", "twice"),
        ((NAME, FILE, FILE), "file", "twice"),
        ((NAME, FILE, ("model", None, b"x")), "model", "unknown part"),
        ((("name", None, b"Gro\xc3\x9fe"), FILE), "name", "made of"),
        ((("name", None, b"\xff\xfe"), FILE), "name", "UTF-8"),
        ((("name", None, b"a\0b"), FILE), "name", "made of"),
        ((("name", None, b""), FILE), "name", "made of"),
        ((("name", None, b"n" * 2000), FILE), "name", "larger"),
        ((FILE, ("name", None, b"../x")), "name", "made of"),
        ((NAME, ("base_model", None, b"other"), FILE), "base_model", "not served"),
        ((NAME, FILE, ("sha256", None, b"0" * 64)), "sha256", "damaged"),
        ((NAME, FILE, ("sha256", None, b"zz")), "sha256", "hex"),
        ((), "name", "required"),
    ],
)
async def test_a_form_that_lacks_or_contradicts_something(
    client: httpx.AsyncClient, staged: Callable[[], list[str]], parts: Any, param: str | None, says: str
) -> None:
    response = await sent(client, *parts)
    assert response.status_code == 400, response.text
    assert (error(response)["param"], says in error(response)["message"]) == (param, True), response.text
    assert staged() == []


async def test_a_base_models_name_is_taken(client: httpx.AsyncClient) -> None:
    response = await sent(client, ("name", None, b"base"), FILE)
    assert (response.status_code, error(response)["code"]) == (409, "name_taken")


async def test_a_checksum_is_compared(client: httpx.AsyncClient) -> None:
    digest = hashlib.sha256(FILE[2]).hexdigest().upper().encode()
    assert (await sent(client, NAME, ("sha256", None, digest), FILE)).status_code == 201
    digest = hashlib.sha256(PARTS[1][2]).hexdigest().encode()
    assert (await sent(client, NAME, *PARTS, ("sha256", None, digest))).status_code == 200


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed; boundary=x",
     "multipart/form-data; boundary=" + "b" * 200, "multipart/form-data; boundary=\xff", ";;;=", "application/zip"],
)  # fmt: skip
async def test_another_content_type(client: httpx.AsyncClient, content_type: str) -> None:
    body, _ = form_of(NAME, FILE)
    response = await client.post(PATH, content=body, headers={"Content-Type": content_type.encode("latin-1")})
    assert (response.status_code, "multipart/form-data" in error(response)["message"]) == (400, True)


@pytest.mark.parametrize("cut", [0, 1, 20, 60, 120, -40, -3])
async def test_a_form_that_is_cut_off(client: httpx.AsyncClient, staged: Callable[[], list[str]], cut: int) -> None:
    body, headers = form_of(NAME, FILE)
    response = await client.post(PATH, content=body[:cut], headers=headers)
    assert response.status_code == 400, response.text
    assert staged() == []


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"Content-Disposition: form-data\r\n",
        b"Content-Disposition: attachment; name=file\r\n",
        b"Content-Disposition: form-data; name=\"\xff\"\r\n",
        b"Content-Disposition: form-data; name=file\r\nContent-Transfer-Encoding: base64\r\n",
        b"Content-Disposition: form-data; name=file\r\nX-Long: " + b"x" * 100_000 + b"\r\n",
        b"Content-Disposition: form-data; name=file\r\n" + b"X-Many: 1\r\n" * 1000,
        b"No colon here\r\n",
        b": nameless\r\n",
    ],
)  # fmt: skip
async def test_headers_of_a_part(client: httpx.AsyncClient, staged: Callable[[], list[str]], head: bytes) -> None:
    body = b"--x\r\n" + head + b"\r\ncontent\r\n--x--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    response = await client.post(PATH, content=body, headers=headers)
    assert response.status_code == 400, response.text
    assert staged() == []


async def test_too_many_parts(client: httpx.AsyncClient) -> None:
    assert (await sent(client, *[NAME] * 1000)).status_code == 400


async def test_what_follows_the_form_is_ignored(client: httpx.AsyncClient) -> None:
    body, headers = form_of(NAME, FILE)
    assert (await client.post(PATH, content=body + b"\r\n--frontier\r\n" * 99, headers=headers)).status_code == 201


async def test_an_announced_length_is_refused_before_anything_is_read(app: ASGIApp) -> None:
    answered = await exchange(app, [], length=LARGEST * 20)
    assert (answered.status, answered.reads) == (413, 1)
    assert f"larger than {LARGEST} bytes" in answered.body.decode()


async def test_a_body_of_no_announced_length_is_counted(app: ASGIApp, staged: Callable[[], list[str]]) -> None:
    body, headers = form_of(NAME, ("file", "a.zip", bytes(LARGEST + 1)))
    answered = await exchange(app, [body[at : at + 65536] for at in range(0, len(body), 65536)], headers=headers)
    assert answered.status == 413
    assert staged() == []


@pytest.mark.parametrize(("part", "most"), [("config", MAX_CONFIG_BYTES), ("weights", LARGEST)])
async def test_a_file_that_is_too_large_is_named_with_its_limit(
    client: httpx.AsyncClient, staged: Callable[[], list[str]], part: str, most: int
) -> None:
    contents = {"config": config_of(), "weights": weights_of()} | {part: bytes(most + 1)}
    refused = await sent(client, NAME, *((name, name, content) for name, content in contents.items()))
    assert (refused.status_code, error(refused)["code"], error(refused)["param"]) == (413, "too_large", part)
    assert error(refused)["message"] == f"`{part}` is larger than the {most} bytes that it may have."
    assert staged() == []


async def test_a_client_that_hangs_up_leaves_nothing(app: ASGIApp, staged: Callable[[], list[str]]) -> None:
    body, headers = form_of(NAME, FILE)
    assert (await exchange(app, [body[:150]], headers=headers, hang_up=True)).status == 400
    assert staged() == []


async def test_a_body_that_stops_half_way(
    app: ASGIApp, staged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_module, "BODY_SILENCE", 0.05)
    body, headers = form_of(NAME, FILE)
    answered = await exchange(app, [body[:150]], headers=headers, stall=True)
    assert (answered.status, answered.headers[b"connection"]) == (408, b"close")
    assert staged() == []


async def test_one_byte_at_a_time(app: ASGIApp) -> None:
    body, headers = form_of(NAME, FILE)
    assert (await exchange(app, [body[at : at + 1] for at in range(len(body))], headers=headers)).status == 201


async def test_a_refusal_reads_on_a_little_so_that_the_connection_can_be_used_again(app: ASGIApp) -> None:
    body, headers = form_of(("name", None, b"NO"), FILE)
    answered = await exchange(app, [body, *[bytes(1000)] * 9], headers=headers)
    assert (answered.status, answered.reads, b"connection" in answered.headers) == (400, 10, False)
    answered = await exchange(app, [body, *[bytes(65536)] * 99], headers=headers)
    assert (answered.status, answered.headers[b"connection"]) == (400, b"close")
    assert answered.reads < 30


def test_turns_are_bounded_for_a_tenant_and_for_all() -> None:
    turns = Turns(per_tenant=1, overall=2)
    with turns.take("a"):
        with pytest.raises(ApiError) as mine, turns.take("a"):
            pass
        with turns.take("b"), pytest.raises(ApiError) as all_, turns.take("c"):
            pass
    assert (mine.value.status, mine.value.code, mine.value.headers["Retry-After"]) == (429, "rate_limit_exceeded", "5")
    assert (all_.value.status, "Retry-After" in all_.value.headers) == (503, True)
    with turns.take("a"), turns.take("b"):
        pass


async def test_room_is_what_would_be_left(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=FLOOR + 10))
    await staging.require_room(10)
    with pytest.raises(ApiError) as full:
        await staging.require_room(11)
    assert (full.value.status, full.value.headers) == (503, {"Retry-After": "60"})


async def test_there_must_be_room_before_and_meanwhile(
    client: httpx.AsyncClient, blobs: BlobStore, staged: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    body, headers = form_of(NAME, FILE)

    async def filling(at: int) -> AsyncIterator[bytes]:
        for position in range(len(body)):
            if position == at:
                full.setattr(staging_module, "FLOOR", shutil.disk_usage(blobs.root).total)
            yield body[position : position + 1]

    monkeypatch.setattr(body_module, "LOOK_BYTES", 100)
    for at in (0, 150):
        with monkeypatch.context() as full:
            refused = await client.post(PATH, content=filling(at), headers=headers)
        assert (refused.status_code, error(refused)["code"]) == (503, "overloaded")
        assert staged() == []
    assert (await client.post(PATH, content=body, headers=headers)).status_code == 201


async def test_many_at_once_are_refused_for_a_while(push: Send) -> None:
    answers = await asyncio.gather(*(push(zip_of(files()), name=f"n{index}") for index in range(6)))
    assert sorted(answer.status_code for answer in answers) == [201, 201, 201, 201, 429, 429]
    assert (await push(zip_of(files()))).status_code == 201


class Answered:
    """What came back, and how often the application asked for more of the body."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.reads = 0
        self.body = b""


async def exchange(
    app: ASGIApp,
    pieces: Iterable[bytes],
    *,
    headers: dict[str, str] | None = None,
    length: int | None = None,
    hang_up: bool = False,
    stall: bool = False,
) -> Answered:
    """One request, piece by piece, which no well-behaved client library would send."""
    answered = Answered()
    waiting = iter(pieces)
    following = next(waiting, None)
    fields = {"Content-Type": "multipart/form-data; boundary=x"} if headers is None else dict(headers)
    if length is not None:
        fields["Content-Length"] = str(length)

    async def receive() -> Message:
        nonlocal following
        answered.reads += 1
        if (piece := following) is not None:
            following = next(waiting, None)
            return {"type": "http.request", "body": piece, "more_body": following is not None or hang_up or stall}
        if stall:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"} if hang_up else {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answered.status, answered.headers = message["status"], dict(message["headers"])
        else:
            answered.body += message["body"]

    scope = {
        "type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b"", "root_path": "",
        "scheme": "http", "http_version": "1.1", "server": ("test", 80), "client": ("127.0.0.1", 1),
        "headers": [(name.lower().encode(), value.encode()) for name, value in fields.items()],
    }  # fmt: skip
    await app(scope, receive, send)
    return answered
