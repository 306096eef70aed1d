"""What a tenant does with its adapters from the command line."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import httpx
import pytest
from tests.platform.cli.conftest import Run
from tests.platform.cli.fake_server import FakeServer, adapter, refused, streamed

CONFIG, WEIGHTS = b'{"r": 8}', bytes(range(256)) * 4000


def test_a_listing_has_a_line_for_each(run: Run, fake: FakeServer) -> None:
    split = {"split": [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]}
    fake.on_list(
        "GET /v1/adapters",
        adapter("voice", 2, aliases={"prod": {"version": 1}, "try": split}),
        adapter("tone", 1, "validating"),
        adapter("late", 1, latest=adapter("late", 2, "failed")),
    )
    result = run("adapter", "list")
    assert result.exit_code == 0, result.output
    voice, tone, late = (line for line in result.stdout.splitlines() if "base" in line and "name" not in line)
    for said in ("voice", "v2", "ready", "1.4 MiB", "prod → v1; try → v1=90,v2=10"):
        assert said in voice
    assert "validating" in tone
    assert "v2 failed" in late
    assert [one["name"] for one in json.loads(run("adapter", "list", "--json").stdout)] == ["voice", "tone", "late"]


def test_a_listing_is_read_to_its_end(run: Run, fake: FakeServer) -> None:
    fake.on_list("GET /v1/adapters", *(adapter(f"a{number}") for number in range(250)))
    assert len(json.loads(run("adapter", "list", "--json").stdout)) == 250
    assert [request.url.params.get("after") for request in fake.asked] == [None, "adp_a99", "adp_a199"]


def test_an_empty_listing_says_so_beside_the_output(run: Run, fake: FakeServer) -> None:
    fake.on_list("GET /v1/adapters")
    result = run("adapter", "list")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "There are none.\n")
    assert json.loads(run("adapter", "list", "--json").stdout) == []


def test_other_people_s_words_do_not_steer_the_terminal(run: Run, fake: FakeServer) -> None:
    fake.on("GET /v1/adapters/voice", adapter("voice", warnings=["\x1b]0;owned\x07 [red]bold[/red]\nnext"]))
    result = run("adapter", "show", "voice")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout
    assert "[red]bold[/red]\\nnext" in result.stdout


def test_one_adapter_and_one_version(run: Run, fake: FakeServer) -> None:
    fake.on("GET /v1/adapters/voice", adapter("voice", 2))
    fake.on("GET /v1/adapters/voice/versions/1", adapter("voice", 1))
    assert json.loads(run("adapter", "show", "voice", "--json").stdout) == adapter("voice", 2)
    shown = run("adapter", "show", "voice", "--version", "v1").stdout.splitlines()
    assert shown[0].split() == ["name", "voice"]
    assert shown[1].split() == ["version", "v1"]


def test_versions_are_listed(run: Run, fake: FakeServer) -> None:
    failed = adapter("voice", 2, "failed", status_reason="3 things are wrong.", id="adv_2")
    fake.on_list("GET /v1/adapters/voice/versions", failed, adapter("voice", 1, id="adv_1"))
    result = run("adapter", "versions", "voice")
    assert "3 things are wrong." in result.stdout
    assert "sha256:0123" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "route", "body"),
    [
        ("rollback voice v2", "POST /v1/adapters/voice/rollback", {"version": 2}),
        ("rollback voice 2", "POST /v1/adapters/voice/rollback", {"version": 2}),
        ("abandon upl_1", "DELETE /v1/adapters/uploads/upl_1", None),
        ("delete voice", "DELETE /v1/adapters/voice", None),
        ("restore voice", "POST /v1/adapters/voice/restore", None),
        ("share voice rival", "PUT /v1/adapters/voice/shares/rival", {}),
        ("share voice rival --share-prefix", "PUT /v1/adapters/voice/shares/rival", {"share_prefix": True}),
        ("unshare voice rival", "DELETE /v1/adapters/voice/shares/rival", None),
        ("alias set voice prod v3", "PUT /v1/adapters/voice/aliases/prod", {"version": 3}),
        (
            "alias set voice prod v3=90,v4=10",
            "PUT /v1/adapters/voice/aliases/prod",
            {"split": [{"version": 3, "weight": 90}, {"version": 4, "weight": 10}]},
        ),
        ("alias remove voice prod", "DELETE /v1/adapters/voice/aliases/prod", None),
        ("delete a/b", "DELETE /v1/adapters/a%2Fb", None),
    ],
)
def test_changes_are_one_call(run: Run, fake: FakeServer, arguments: str, route: str, body: object) -> None:
    fake.on(route, adapter())
    result = run("adapter", *arguments.split())
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()
    (asked,) = fake.asked
    assert (json.loads(asked.content) if asked.content else None) == body
    assert json.loads(run("adapter", *arguments.split(), "--json").stdout) == adapter()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["rollback", "voice", "two"], "write it like v3"),
        (["rollback", "voice", "v0"], "write it like v3"),
        (["alias", "set", "voice", "prod", "v3=90,v4"], "v3=90,v4=10"),
        (["alias", "set", "voice", "prod", "latest"], "write it like v3"),
        (["push", "x"], "--name"),
        (["list", "--tenant", "acme"], "operator's key"),
    ],
)
def test_wrong_usage_is_2_and_asks_nobody(run: Run, fake: FakeServer, arguments: list[str], says: str) -> None:
    result = run("adapter", *arguments, POLYGRAFT_ADMIN_KEY="")
    assert (result.exit_code, fake.asked) == (2, []), result.output
    assert says in result.stderr


def packed(*files: tuple[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


CONTENT = packed(
    ("adapter_config.json", CONFIG), ("../../evil", b"x"), ("other", b"x"), ("adapter_model.safetensors", WEIGHTS)
)


@pytest.fixture
def voice(fake: FakeServer) -> FakeServer:
    """An adapter of two versions, of which the second is served."""
    split = {"split": [{"version": 1, "weight": 1}, {"version": 2, "weight": 1}]}
    fake.on("GET /v1/adapters/voice", adapter("voice", 2, aliases={"prod": {"version": 1}, "try": split}))
    for version in (1, 2):
        fake.on(f"GET /v1/adapters/voice/versions/{version}", adapter("voice", version))
        fake.on(f"GET /v1/adapters/voice/versions/{version}/content", streamed(CONTENT))
    return fake


@pytest.mark.parametrize(("source", "version"), [("voice", 2), ("voice@v1", 1), ("voice@prod", 1)])
def test_an_adapter_becomes_a_folder(run: Run, voice: FakeServer, tmp_path: Path, source: str, version: int) -> None:
    result = run("adapter", "pull", source, "deep/down")
    assert (result.exit_code, result.stdout) == (0, f"voice@v{version}  sha256:0123  deep/down\n"), result.output
    assert str(voice.asked[-1].url.path) == f"/v1/adapters/voice/versions/{version}/content"
    down = tmp_path / "deep" / "down"
    assert {file.name: file.read_bytes() for file in down.iterdir()} == {
        "adapter_config.json": CONFIG,
        "adapter_model.safetensors": WEIGHTS,
    }
    assert [path.name for path in down.parent.iterdir()] == ["down"]


@pytest.mark.parametrize(
    "content",
    [
        CONTENT[:-5],
        CONTENT[: len(CONTENT) // 2],
        b"",
        b"hello",
        gzip.compress(b"hello" * 1000),
        CONTENT[:-8] + bytes(8),
        packed(("adapter_config.json", CONFIG)),
        packed(("adapter_config.json", CONFIG), ("adapter_config.json", CONFIG)),
    ],
    ids=["no-end", "half", "nothing", "text", "no-tar", "checksum", "no-weights", "twice"],
)
def test_what_is_not_whole_leaves_nothing(run: Run, voice: FakeServer, tmp_path: Path, content: bytes) -> None:
    voice.on("GET /v1/adapters/voice/versions/2/content", streamed(content))
    result = run("adapter", "pull", "voice", "down")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1), result.output
    assert list(tmp_path.iterdir()) == []


def test_folders_that_hold_something_are_left_alone(run: Run, voice: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert run("adapter", "pull", "voice", "empty").exit_code == 0
    result = run("adapter", "pull", "voice", "empty")
    assert (result.exit_code, result.stderr) == (1, "error: empty is there already\n")


def test_an_alias_of_several_versions_cannot_be_pulled(run: Run, voice: FakeServer) -> None:
    result = run("adapter", "pull", "voice@try", "down")
    assert result.exit_code == 1
    assert "v1=1,v2=1" in result.stderr


def test_a_version_that_is_neither_number_nor_alias_is_told(run: Run, voice: FakeServer) -> None:
    result = run("adapter", "pull", "voice@latest", "down")
    assert (result.exit_code, result.stderr) == (1, "error: voice has no version and no alias 'latest'\n")


def test_an_operator_works_on_a_tenant_s_adapters(run: Run, fake: FakeServer) -> None:
    fake.key = "pg-admin-key"
    fake.on_list("GET /admin/v1/tenants/acme/adapters", adapter("voice"))
    result = run("adapter", "list", "--tenant", "acme", POLYGRAFT_API_KEY="pg-other")
    assert (result.exit_code, "voice" in result.stdout) == (0, True), result.output


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (refused(404, "There is no adapter `voice`.", "not_found"), "There is no adapter `voice`. (not_found)"),
        (refused(409, "Taken.", "name_taken"), "Taken. (name_taken)"),
        (refused(403, "Lacks a scope.", "insufficient_scope"), "Lacks a scope. (insufficient_scope)"),
        (refused(500, "internal\nerror\x1b[1m"), "internal\\nerror\\x1b[1m"),
        (httpx.Response(502, text="<html>"), "the server answered 502"),
        (httpx.Response(200, text="<html>"), "http://127.0.0.1:8000 is not a Polygraft server: it answers otherwise"),
        (httpx.Response(200, json=[]), "http://127.0.0.1:8000 is not a Polygraft server: it answers otherwise"),
        (httpx.ReadTimeout("slow"), "http://127.0.0.1:8000 does not answer in time"),
        (httpx.ConnectError("[Errno 111] refused"), "no server answers at http://127.0.0.1:8000: [Errno 111] refused"),
    ],
)
def test_errors_are_one_line(run: Run, fake: FakeServer, answer: httpx.Response | Exception, line: str) -> None:
    fake.on("GET /v1/adapters/voice", answer)
    result = run("adapter", "show", "voice")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", f"error: {line}\n")


def test_a_wrong_key_is_told_in_the_server_s_words(run: Run) -> None:
    result = run("adapter", "list", "--key", "pg-wrong")
    assert (result.exit_code, result.stderr) == (1, "error: Incorrect API key provided. (invalid_api_key)\n")


@pytest.mark.parametrize("key", ["pg-é", "pg-a\nb", "pg a", ""])
def test_a_key_that_cannot_be_one_is_not_sent(run: Run, fake: FakeServer, key: str) -> None:
    result = run("adapter", "list", "--key", key)
    assert (result.exit_code, fake.asked) == (2, [])
    assert "no key has" in result.stderr


@pytest.mark.parametrize("url", ["localhost", "ftp://host", "http://", "http://host:port"])
def test_an_address_that_cannot_be_one_is_told(run: Run, fake: FakeServer, url: str) -> None:
    result = run("adapter", "list", "--url", url)
    assert (result.exit_code, fake.asked, result.stderr.count("\n")) == (2, [], 1)
    assert "is no address" in result.stderr


def test_the_address_may_be_the_one_that_clients_are_given(run: Run, fake: FakeServer) -> None:
    fake.on_list("GET /v1/adapters")
    assert run("adapter", "list", POLYGRAFT_URL="http://server/v1/").exit_code == 0
    assert str(fake.asked[0].url.copy_with(query=None)) == "http://server/v1/adapters"
