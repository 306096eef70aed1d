"""Every route of the whole application: who may call it, before a body is read, and what the document says of it."""

import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import BaseRoute

from polygraft.assembly import open_gateway
from polygraft.db import sqlite_url
from polygraft.settings import Settings
from polygraft.tenancy.access import OPEN_PATHS, scopes_for
from polygraft.tenancy.principal import TENANT_SCOPES
from polygraft_migrations import upgrade

TENANT_KEY, ADMIN_KEY = "the-tenants-key", "the-admins-key"


@pytest.fixture
async def app(tmp_path: Path, valkey: str) -> AsyncIterator[FastAPI]:
    """What a gateway serves, over a database and a queue of its own."""
    upgrade(sqlite_url(tmp_path / "registry.db"))
    settings = Settings(
        data_dir=tmp_path,
        redis_url=valkey,
        served_model_name="base",
        bootstrap_admin_key=ADMIN_KEY,
        bootstrap_tenant_key=TENANT_KEY,
    )
    async with open_gateway(settings) as gateway:
        yield gateway.app


def walk(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Every (method, path) of a route table, through included routers."""
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            yield from walk(included.routes)
        if getattr(route, "path", None) is not None:
            yield from ((method, route.path) for method in route.methods or ())  # type: ignore[attr-defined]


def every_route(app: FastAPI) -> set[tuple[str, str]]:
    listed = set(walk(app.routes))
    documented = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    assert {(method, re.sub(r":path\}", "}", path)) for method, path in listed} >= documented
    return {(method, re.sub(r"\{.*?\}", "x", path)) for method, path in listed}


async def answer(app: FastAPI, method: str, path: str, key: str | None) -> tuple[int, str | None]:
    """Status and code of what a request gets whose body must not be read."""
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        pytest.fail(f"the body of {method} {path} was read")

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"2000000000")]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    scope = {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": headers, "http_version": "1.1", "scheme": "http",
    }  # fmt: skip
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        yield client


async def key_with(client: httpx.AsyncClient, scopes: list[str]) -> str:
    made = await client.post(
        "/admin/v1/tenants/default/keys", json={"name": "walk", "scopes": scopes}, headers=bearer(ADMIN_KEY)
    )
    assert made.status_code == 201, made.text
    key: str = made.json()["key"]
    return key


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_every_route_is_closed_to_all_but_the_keys_that_it_wants(app: FastAPI, client: httpx.AsyncClient) -> None:
    routes = every_route(app)
    assert {path for _, path in routes} >= OPEN_PATHS
    assert len(routes) > 40
    lacking = {}
    for needed in {scopes_for(method, path) for method, path in routes if path not in OPEN_PATHS}:
        rest = sorted(TENANT_SCOPES - needed)
        assert rest
        lacking[needed] = await key_with(client, rest)
    for method, path in sorted(routes):
        if path in OPEN_PATHS:
            assert (await client.request(method, path)).status_code in (200, 503), path
            continue
        needed = scopes_for(method, path)
        assert needed, f"{method} {path} has no rule, so nobody can call it"
        where = f"{method} {path}"
        assert await answer(app, method, path, None) == (401, "invalid_api_key"), where
        assert await answer(app, method, path, "pg-wrong") == (401, "invalid_api_key"), where
        assert await answer(app, method, path, lacking[needed]) == (403, "insufficient_scope"), where
        other_kind = TENANT_KEY if "admin" in needed else ADMIN_KEY
        assert await answer(app, method, path, other_kind) == (403, "insufficient_scope"), where
        right = await client.request(method, path, headers=bearer(ADMIN_KEY if "admin" in needed else TENANT_KEY))
        assert right.status_code not in (401, 403), where


async def test_a_wrong_method_is_answered_with_those_that_the_path_takes(
    app: FastAPI, client: httpx.AsyncClient
) -> None:
    methods = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
    for path in sorted({path for _, path in every_route(app)}):
        headers = bearer(ADMIN_KEY if "admin" in scopes_for("GET", path) else TENANT_KEY)
        refused = await client.request("TRACE", path, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (405, "method_not_allowed"), path
        taken = [
            method for method in methods if (await client.request(method, path, headers=headers)).status_code != 405
        ]
        assert refused.headers["allow"].split(", ") == taken, path
        assert ", ".join(taken) in refused.json()["error"]["message"]


def operations(app: FastAPI) -> Iterator[tuple[str, str, dict[str, Any], dict[str, str]]]:
    """Method, path, description and the right key of every documented route that wants one."""
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            if path not in OPEN_PATHS:
                where = re.sub(r"\{.*?\}", "x", path)
                key = ADMIN_KEY if "admin" in scopes_for(method.upper(), where) else TENANT_KEY
                yield method.upper(), where, operation, bearer(key)


async def test_a_query_parameter_that_a_route_does_not_have_is_named(app: FastAPI, client: httpx.AsyncClient) -> None:
    refused = 0
    for method, path, operation, headers in operations(app):
        answer = await client.request(method, path, params={"limt": "1"}, headers=headers)
        error = answer.json().get("error", {"param": None})
        if not path.startswith(("/v1/adapters", "/admin/v1")):
            assert error["param"] != "limt", (method, path)
            continue
        refused += 1
        assert (answer.status_code, error["param"]) == (400, "limt"), (method, path, answer.text)
        known = sorted(one["name"] for one in operation.get("parameters", ()) if one["in"] == "query")
        told = ", ".join(f"`{name}`" for name in known) if known else "none"
        assert error["message"].endswith(f"; it takes {told}."), (method, path)
    assert refused > 30


@pytest.mark.parametrize("query", ["?limit=2&after=", "?limit=2", ""])
async def test_a_query_parameter_that_a_route_has_is_none_of_those(client: httpx.AsyncClient, query: str) -> None:
    for path, key in (("/v1/adapters", TENANT_KEY), ("/admin/v1/tenants/default/adapters", ADMIN_KEY)):
        answer = await client.get(f"{path}{query}", headers=bearer(key))
        assert answer.status_code == 200 or "`limit`" not in answer.text, answer.text
        assert "no query parameter" not in answer.text


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"name": }', "at line 1 column 10."),
        (b'{"name":\n "a"', "at line 2 column "),
        (b'{"name": "\xff"}', ""),
        (b"[" * 100_000, ""),
    ],
    ids=["value", "end", "encoding", "depth"],
)
async def test_a_body_that_does_not_decode_names_the_place_and_no_field(
    app: FastAPI, client: httpx.AsyncClient, body: bytes, why: str
) -> None:
    seen = 0
    for method, path, operation, headers in operations(app):
        if "application/json" not in operation.get("requestBody", {"content": {}})["content"]:
            continue
        seen += 1
        where = path.replace("/tenants/x", "/tenants/default")
        answer = await client.request(
            method, where, content=body, headers=headers | {"content-type": "application/json"}
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, None, None), (method, path, error)
        assert error["message"].startswith("The body is not valid JSON: "), (method, path, error)
        assert why in error["message"], (method, path, error)
        answer = await client.request(method, where, content=b"{}", headers=headers | {"content-type": "text/plain"})
        assert answer.json()["error"]["message"] == "The header Content-Type must be application/json.", (method, path)
    assert seen > 12


async def test_a_number_that_is_too_long_is_told(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"} | bearer(ADMIN_KEY)
    answer = await client.post("/admin/v1/tenants", content=b'{"name": ' + b"1" * 5000 + b"}", headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, None)
    assert "too many digits" in error["message"]


@pytest.mark.slow
async def test_no_input_that_is_no_input_makes_a_route_fail(app: FastAPI, client: httpx.AsyncClient) -> None:
    bodies = [b"", b"null", b"[]", b"{", b'{"name": 1e400}', b'{"name": "\\ud800"}', b'{"name": "a\\u0000"}', b"\xff"]
    for method, path in sorted(every_route(app)):
        if path in OPEN_PATHS or method == "GET":
            continue
        key = ADMIN_KEY if "admin" in scopes_for(method, path) else TENANT_KEY
        for body in bodies:
            for media_type in ("application/json", "text/plain", ""):
                headers = {"content-type": media_type, **bearer(key)}
                got = await client.request(method, path, content=body, headers=headers)
                assert got.status_code < 500 or got.status_code == 503, (method, path, body, got.text)
                assert "error" in got.json() or got.status_code < 300


@pytest.mark.slow
async def test_no_name_makes_a_route_fail(app: FastAPI, client: httpx.AsyncClient) -> None:
    names = ["%00", "%ED%A0%80", "%F0%9F%A6%99", "%2e%2e%2fx", "%0a", "x" * 3000, "%27--"]
    for (method, path), name in itertools.product(sorted(every_route(app)), names):
        if path in OPEN_PATHS or "/x" not in path:
            continue
        key = ADMIN_KEY if "admin" in scopes_for(method, path) else TENANT_KEY
        got = await client.request(method, path.replace("/x", f"/{name}"), headers=bearer(key))
        assert 400 <= got.status_code < 500 or got.status_code == 503, (method, path, got.text)


async def test_no_body_but_an_upload_is_read_beyond_its_limit(
    app: FastAPI, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polygraft.bodylimit.MAX_BODY", 1000)
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 500
            yield b" " * 500

    for method, path in sorted(every_route(app)):
        if path in OPEN_PATHS or method in ("GET", "DELETE") or re.search("adapters(/uploads/x)?$", path):
            continue
        headers = {"content-type": "application/json"} | bearer(
            ADMIN_KEY if "admin" in scopes_for(method, path) else TENANT_KEY
        )
        announced = await client.request(method, path, content=b" " * 1001, headers=headers)
        assert (announced.status_code, announced.json()["error"]["code"]) == (413, "too_large"), (method, path)
        sent = 0
        chunked = await client.request(method, path, content=pieces(), headers=headers)
        assert 400 <= chunked.status_code < 500, (method, path)
        assert chunked.json()["error"]["code"] == "too_large" or sent <= 1000, (method, path)
        assert sent < 3000


async def test_the_document_names_keys_and_errors(app: FastAPI) -> None:
    document = app.openapi()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if path not in OPEN_PATHS:
                assert operation["security"] == [{"key": []}], (method, path)
            assert operation["responses"]["4XX"]["content"]["application/json"]["schema"], (method, path)
            assert "422" not in operation["responses"], (method, path)
            named = set(re.findall(r"\{(\w+)\}", path))
            described = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
            assert named == described, (method, path)
