"""Uploads from the command line: what is sent, broken connections, and what the check found."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path

import httpx
import pytest
from tests.platform.cli.conftest import Run
from tests.platform.cli.fake_server import FakeServer, FakeUpload, adapter, refused

from polygraft.cli import push as push_module
from polygraft.cli import upload as upload_module

UPLOAD = "/v1/adapters/uploads/upl_1"
WEIGHTS = bytes(range(256)) * 100


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of ten kilobytes and no waiting."""
    monkeypatch.setattr(upload_module, "PIECE", 10_000)
    monkeypatch.setattr(upload_module, "FIRST_WAIT", 0.0)
    monkeypatch.setattr(push_module, "SECONDS_BETWEEN_LOOKS", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What PEFT saved, with a file beside it that is nobody's business."""
    folder = tmp_path / "trained"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (folder / "optimizer.pt").write_bytes(b"x" * 5000)
    return folder


@pytest.fixture
def upl(fake: FakeServer) -> FakeUpload:
    return FakeUpload(fake)


def contents(upl: FakeUpload) -> dict[str, bytes]:
    """What arrived, unpacked."""
    with zipfile.ZipFile(io.BytesIO(bytes(upl.received))) as archive:
        assert archive.testzip() is None
        return {info.filename: archive.read(info) for info in archive.infolist()}


SENT = {"adapter_config.json": b'{"r": 8}', "adapter_model.safetensors": WEIGHTS}


def test_a_folder_is_packed_while_it_is_sent(run: Run, upl: FakeUpload, folder: Path) -> None:
    result = run("adapter", "push", folder, "--name", "voice")
    assert (result.exit_code, result.stdout) == (0, "voice@v1  sha256:0123  rank 8  ready\n"), result.output
    assert contents(upl) == SENT
    assert upl.announced == {"name": "voice", "filename": "adapter.zip", "size_bytes": len(upl.received)}
    assert sum(request.method == "PATCH" for request in upl.server.asked) == 3


def test_people_see_how_far_it_is(run: Run, upl: FakeUpload, folder: Path) -> None:
    result = run("adapter", "push", folder, "--name", "voice", "--json", FORCE_COLOR="1", TERM="xterm")
    assert "25.3/25.3 KiB" in re.sub("\x1b[^m]*m", "", result.stderr)
    assert json.loads(result.stdout) == adapter("voice")


def test_weights_of_mlx_are_sent_too(run: Run, upl: FakeUpload, folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapters.safetensors")
    assert run("adapter", "push", folder, "--name", "voice").exit_code == 0
    assert contents(upl) == {"adapter_config.json": b'{"r": 8}', "adapters.safetensors": WEIGHTS}


@pytest.mark.parametrize(
    ("name", "filename"), [("a.zip", "adapter.zip"), ("a.tar.gz", "adapter.tar.gz"), ("A.TGZ", "adapter.tar.gz")]
)
def test_an_archive_is_sent_as_it_is(run: Run, upl: FakeUpload, tmp_path: Path, name: str, filename: str) -> None:
    (tmp_path / name).write_bytes(WEIGHTS)
    assert run("adapter", "push", tmp_path / name, "--name", "voice").exit_code == 0
    assert (bytes(upl.received), upl.announced["filename"]) == (WEIGHTS, filename)


@pytest.mark.parametrize("cut_after", [[5_000], [None, 1, 9_999, 0, 0], [None, None, 5_605]])
def test_a_broken_connection_is_taken_up_where_it_broke(
    run: Run, upl: FakeUpload, folder: Path, cut_after: list[int | None]
) -> None:
    upl.cut_after = list(cut_after)
    result = run("adapter", "push", folder, "--name", "voice")
    assert result.exit_code == 0, result.output
    assert contents(upl) == SENT


def test_servers_that_are_busy_or_away_for_a_moment_are_asked_again(run: Run, upl: FakeUpload, folder: Path) -> None:
    busy = refused(503, "Try again.", "overloaded")
    upl.cut_after = [busy, refused(429, "Slowly.", "rate_limit_exceeded")]
    show, complete = upl.server.routes[f"GET {UPLOAD}"], upl.server.routes[f"POST {UPLOAD}/complete"]
    upl.server.on(f"GET {UPLOAD}", *show, httpx.ConnectError("refused"), busy, *show)
    upl.server.on(f"POST {UPLOAD}/complete", busy, refused(409, "At work.", "upload_in_use"), *complete)
    result = run("adapter", "push", folder, "--name", "voice")
    assert result.exit_code == 0, result.output
    assert contents(upl) == SENT


def test_an_upload_whose_last_answer_was_lost_has_become_a_version(run: Run, upl: FakeUpload, folder: Path) -> None:
    gone = refused(404, "There is no upload.", "not_found")
    upl.server.on(f"POST {UPLOAD}/complete", httpx.ReadError("reset"), gone)
    upl.server.on("GET /v1/adapters/voice", adapter("voice", 3))
    result = run("adapter", "push", folder, "--name", "voice")
    assert (result.exit_code, result.stdout[:9]) == (0, "voice@v3 "), result.output
    upl.server.on(f"POST {UPLOAD}/complete", gone)
    assert run("adapter", "push", folder, "--name", "voice").exit_code == 1


def test_another_idea_of_how_far_it_is_ends_with_the_server_s(run: Run, upl: FakeUpload, folder: Path) -> None:
    def lost_answer(request: httpx.Request) -> httpx.Response:
        upl._patch(request)
        raise httpx.ReadError("reset", request=request)

    upl.server.on(f"PATCH {UPLOAD}", lost_answer, upl._patch)
    assert run("adapter", "push", folder, "--name", "voice").exit_code == 0
    assert contents(upl) == SENT


def test_a_server_that_stays_away_is_given_up_and_gone_on_with_later(run: Run, upl: FakeUpload, folder: Path) -> None:
    upl.cut_after = [None, *[0] * upload_module.ATTEMPTS]
    result = run("adapter", "push", folder, "--name", "voice")
    assert (result.exit_code, result.stdout) == (1, "")
    advice, error = result.stderr.splitlines()
    assert advice == "the same command goes on from here with --resume upl_1"
    assert error.startswith("error: the connection to http://127.0.0.1:8000 failed: Broken pipe")
    assert len(upl.received) == 10_000
    upl.cut_after = []
    before = len(upl.server.asked)
    assert run("adapter", "push", folder, "--name", "voice", *advice.split()[-2:]).exit_code == 0
    assert contents(upl) == SENT
    assert sum(request.method == "PATCH" for request in upl.server.asked[before:]) == 2


def test_an_upload_that_is_stopped_can_go_on(run: Run, upl: FakeUpload, folder: Path) -> None:
    def stop(request: httpx.Request) -> httpx.Response:
        raise KeyboardInterrupt

    upl.server.on(f"PATCH {UPLOAD}", stop)
    result = run("adapter", "push", folder, "--name", "voice")
    assert result.exit_code not in (0, 2)
    assert "--resume upl_1" in result.stderr


def test_only_the_same_archive_goes_on(run: Run, upl: FakeUpload, folder: Path) -> None:
    upl.announced = {"name": "voice", "filename": "adapter.zip", "size_bytes": 77}
    result = run("adapter", "push", folder, "--name", "voice", "--resume", "upl_1")
    assert result.exit_code == 1
    assert "with 77 bytes" in result.stderr


def test_refusals_are_not_tried_again(run: Run, upl: FakeUpload, folder: Path) -> None:
    upl.cut_after = [refused(413, "At most 5 bytes.", "too_large")]
    result = run("adapter", "push", folder, "--name", "voice")
    assert (result.exit_code, result.stderr) == (1, "error: At most 5 bytes. (too_large)\n")


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("adapter_config.json", "has no adapter_config.json"),
        ("adapter_model.safetensors", "has no adapter_model.safetensors"),
    ],
)
def test_a_folder_of_something_else_is_told_before_anything_is_sent(
    run: Run, fake: FakeServer, folder: Path, missing: str, says: str
) -> None:
    (folder / missing).unlink()
    result = run("adapter", "push", folder, "--name", "voice")
    assert (result.exit_code, fake.asked) == (1, [])
    assert says in result.stderr


@pytest.mark.parametrize("path", ["nowhere", "trained/optimizer.pt"])
def test_a_path_to_something_else_is_told(run: Run, fake: FakeServer, folder: Path, path: str) -> None:
    result = run("adapter", "push", path, "--name", "voice")
    assert (result.exit_code, fake.asked) == (1, [])
    assert result.stderr.startswith(f"error: {path} ")


def test_all_that_is_wrong_is_a_table_above_the_error(run: Run, upl: FakeUpload, folder: Path) -> None:
    problems = [
        {"tensor": "layers.0.q\x1b[31m", "problem": "is 3x4, not 4x4", "hint": "train it on this model"},
        {"field": "r", "problem": "is 512; at most 64", "hint": ""},
    ]
    told = refused(422, "2 things are wrong.", "invalid_adapter", errors=problems)
    upl.server.on(f"POST {UPLOAD}/complete", told)
    result = run("adapter", "push", folder, "--name", "voice")
    assert (result.exit_code, result.stdout) == (1, "")
    *table, error = result.stderr.splitlines()
    assert error == "error: 2 things are wrong. (invalid_adapter)"
    for said in ("is 3x4, not 4x4", "train it on this model", "is 512; at most 64"):
        assert any(said in line for line in table)
    assert "\x1b" not in result.stderr


def test_the_check_is_waited_for(run: Run, upl: FakeUpload, folder: Path) -> None:
    checking = adapter("voice", 2, "validating")
    upl.server.on(f"POST {UPLOAD}/complete", checking)
    upl.server.on("GET /v1/adapters/voice/versions/2", checking, checking, adapter("voice", 2, warnings=["odd"]))
    result = run("adapter", "push", folder, "--name", "voice")
    assert (result.exit_code, result.stderr) == (0, "warning: odd\n")
    assert result.stdout == "voice@v2  sha256:0123  rank 8  ready\n"
    result = run("adapter", "push", folder, "--name", "voice", "--no-wait")
    assert result.stdout == "voice@v2 is being checked\n"


def test_a_check_that_fails_later_is_told_all_the_same(run: Run, upl: FakeUpload, folder: Path) -> None:
    problem = {"tensor": "t", "problem": "is not finite", "hint": "train again"}
    upl.server.on(f"POST {UPLOAD}/complete", adapter("voice", 2, "validating"))
    failed = adapter("voice", 2, "failed", status_reason="1 thing is wrong.", errors=[problem])
    upl.server.on("GET /v1/adapters/voice/versions/2", failed)
    result = run("adapter", "push", folder, "--name", "voice")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is not finite" in result.stderr
    assert result.stderr.endswith("error: 1 thing is wrong. (invalid_adapter)\n")


def test_a_new_version_is_waited_for_while_the_old_one_is_served(run: Run, upl: FakeUpload, folder: Path) -> None:
    checking = adapter("voice", 2, "validating")
    upl.server.on(f"POST {UPLOAD}/complete", adapter("voice", 1, latest=checking))
    upl.server.on("GET /v1/adapters/voice/versions/2", checking, adapter("voice", 2))
    assert run("adapter", "push", folder, "--name", "voice").stdout.startswith("voice@v2  ")


def test_contents_that_the_name_had_before_are_the_old_version(run: Run, upl: FakeUpload, folder: Path) -> None:
    upl.server.on(f"POST {UPLOAD}/complete", adapter("voice", 2, latest=adapter("voice", 3, "validating")))
    upl.server.on("GET /v1/adapters/voice/versions/3", refused(404, "There is no version.", "not_found"))
    upl.server.on("GET /v1/adapters/voice", adapter("voice", 1))
    assert run("adapter", "push", folder, "--name", "voice").stdout.startswith("voice@v1  ")
    upl.server.on(f"POST {UPLOAD}/complete", adapter("voice", 1, latest=adapter("voice", 3, "failed")))
    assert run("adapter", "push", folder, "--name", "voice").stdout.startswith("voice@v1  ")


def test_waiting_ends(run: Run, upl: FakeUpload, folder: Path) -> None:
    upl.server.on(f"POST {UPLOAD}/complete", adapter("voice", 2, "validating"))
    result = run("adapter", "push", folder, "--name", "voice", "--timeout", "0")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "still being checked" in result.stderr


def test_json_is_one_document(run: Run, upl: FakeUpload, folder: Path) -> None:
    result = run("adapter", "push", folder, "--name", "voice", "--json")
    assert json.loads(result.stdout) == adapter("voice")
    assert result.stderr == ""


def test_an_operator_pushes_for_a_tenant(run: Run, fake: FakeServer, folder: Path) -> None:
    upl = FakeUpload(fake, root="/admin/v1/tenants/acme/adapters")
    result = run("adapter", "push", folder, "--name", "voice", "--tenant", "acme")
    assert result.exit_code == 0, result.output
    assert contents(upl) == SENT


def test_the_base_model_is_told_where_it_must_be(run: Run, upl: FakeUpload, folder: Path) -> None:
    assert run("adapter", "push", folder, "--name", "voice", "--base-model", "base").exit_code == 0
    assert upl.announced["base_model"] == "base"


def test_an_import_is_waited_for(run: Run, fake: FakeServer) -> None:
    fake.on("POST /v1/adapters/import", httpx.Response(202, json=adapter("voice", 1, "validating")))
    fake.on("GET /v1/adapters/voice/versions/1", adapter("voice"))
    result = run("adapter", "import", "hf://org/repo@main", "--name", "voice")
    assert (result.exit_code, result.stdout) == (0, "voice@v1  sha256:0123  rank 8  ready\n")
    assert fake.bodies("POST /v1/adapters/import") == [{"name": "voice", "source": "hf://org/repo@main"}]
