"""How commands fail: the exit code, one line for people, and for programs one document in the shape of the API."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.platform.cli.conftest import Run
from tests.platform.cli.fake_server import FakeServer, adapter, refused

FAILED, USAGE = 1, 2
NO_KEYS = {"POLYGRAFT_API_KEY": "", "POLYGRAFT_ADMIN_KEY": ""}


def told(code: int, message: str, type: str, param: str | None = None) -> tuple[int, dict[str, Any]]:
    return code, {"message": message, "type": type, "param": param, "code": None}


@pytest.fixture
def server(fake: FakeServer, tmp_path: Path) -> FakeServer:
    """Refuses in every way that matters; a folder `full` lies where commands run."""
    (tmp_path / "full" / "folder").mkdir(parents=True)
    fake.on("GET /v1/adapters/bad", refused(400, "`name` must be short.", None, param="name"))
    fake.on("GET /v1/adapters/taken", refused(409, "Taken.", "name_taken"))
    problems = [{"field": "r", "problem": "is too large", "hint": "train again"}]
    fake.on("GET /v1/adapters/wrong", refused(422, "One thing is wrong.", "invalid_adapter", errors=problems))
    fake.on("GET /v1/adapters/away", httpx.ConnectError("refused"))
    fake.on("GET /v1/adapters/html", httpx.Response(400, text="<html>"))
    fake.on("GET /v1/adapters/voice", adapter("voice"))
    return fake


CASES = [
    # wrong usage: by the parser, by the values, by a key that is nowhere, by the server
    ("adapter lisst", USAGE),
    ("adapter list --nonsense", USAGE),
    ("adapter show", USAGE),
    ("adapter rollback voice two", USAGE),
    ("adapter alias set voice prod v3=90,v4", USAGE),
    ("adapter list --url localhost", USAGE),
    ("adapter list --key é", USAGE),
    ("audit --limit 0", USAGE),
    ("audit --since soon", USAGE),
    ("key create acme --scope foo", USAGE),
    ("key create acme --expires-in 1y", USAGE),
    ("adapter show bad", USAGE),
    # failures
    ("adapter show taken", FAILED),
    ("adapter show wrong", FAILED),
    ("adapter show away", FAILED),
    ("adapter show html", FAILED),
    ("adapter show nowhere", FAILED),
    ("adapter pull voice full", FAILED),
    ("adapter pull voice@latest new", FAILED),
    ("tenant list --data-dir nowhere", FAILED),
    ("tenant delete acme", FAILED),
]
WITHOUT_KEYS = ["adapter list", "adapter list --tenant acme", "tenant list", "key list acme", "audit"]


@pytest.mark.parametrize(("line", "code"), CASES)
def test_the_exit_code_and_where_it_is_told(run: Run, server: FakeServer, line: str, code: int) -> None:
    for_people = run(*line.split())
    assert (for_people.exit_code, for_people.stdout.strip()) == (code, ""), for_people.output
    assert for_people.stderr
    for_programs = run(*line.split(), "--json")
    assert for_programs.exit_code == code, for_programs.output
    error = json.loads(for_programs.stdout)["error"]
    assert set(error) - {"errors"} == {"message", "type", "param", "code"}
    assert "rror:" not in for_programs.stderr


@pytest.mark.parametrize("line", WITHOUT_KEYS)
def test_a_key_that_is_given_nowhere_is_wrong_usage(run: Run, server: FakeServer, line: str) -> None:
    for_people = run(*line.split(), **NO_KEYS)
    assert (for_people.exit_code, for_people.stdout) == (USAGE, ""), for_people.output
    assert "key" in for_people.stderr
    for_programs = run(*line.split(), "--json", **NO_KEYS)
    assert (for_programs.exit_code, for_programs.stderr) == (USAGE, "")
    assert json.loads(for_programs.stdout)["error"]["type"] == "invalid_request_error"


def test_programs_get_what_the_server_said(run: Run, server: FakeServer) -> None:
    for name in ("bad", "taken", "wrong"):
        answer = server.routes[f"GET /v1/adapters/{name}"][0]
        assert isinstance(answer, httpx.Response)
        assert json.loads(run("adapter", "show", name, "--json").stdout) == answer.json()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("adapter list --nonsense", told(USAGE, "No such option: --nonsense", "invalid_request_error")),
        (
            "audit --since soon",
            told(
                USAGE,
                "Invalid value for '--since': 'soon' is no length of time; write it like 90s, 15m, 12h or 30d",
                "invalid_request_error",
                "--since",
            ),
        ),
        ("adapter show away", told(FAILED, "no server answers at http://127.0.0.1:8000: refused", "failed")),
        ("adapter pull voice full", told(FAILED, "full is there already", "failed")),
        ("tenant delete acme", told(FAILED, "aborted", "failed")),
    ],
)
def test_what_happened_on_this_side_is_told_in_the_same_shape(
    run: Run, server: FakeServer, line: str, expected: tuple[int, dict[str, Any]]
) -> None:
    result = run(*line.split(), "--json")
    assert (result.exit_code, json.loads(result.stdout)["error"]) == expected


def test_an_argument_that_looks_like_the_option_is_none(run: Run, server: FakeServer) -> None:
    result = run("adapter", "show", "--", "--json")
    assert (result.exit_code, result.stdout) == (FAILED, "")
    assert "not_found" in result.stderr


def test_a_process_writes_its_document_before_it_ends() -> None:
    command = [sys.executable, "-m", "polygraft", "adapter", "list", "--url", "http://127.0.0.1:1", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (FAILED, "")
    assert "http://127.0.0.1:1" in json.loads(ended.stdout)["error"]["message"]
