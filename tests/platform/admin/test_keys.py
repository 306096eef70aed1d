"""/admin/v1/tenants/{tenant}/keys over HTTP, and what the keys can do."""

import re
import time
from typing import Any

import httpx
import pytest

TENANTS = "/admin/v1/tenants"
URL = f"{TENANTS}/acme/keys"
SCOPES = ["adapters:read", "adapters:write", "inference", "usage:read"]


@pytest.fixture(autouse=True)
async def acme(operator: httpx.AsyncClient) -> None:
    await operator.post(TENANTS, json={"name": "acme"})


async def make(operator: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    made = await operator.post(URL, json={"name": "ci", **fields})
    assert made.status_code == 201, made.text
    body: dict[str, Any] = made.json()
    return body


async def tried(operator: httpx.AsyncClient, key: str) -> tuple[int, str]:
    """What a tenant's key gets on an operator's route: known and refused for its scope, or refused as it is."""
    answer = await operator.get(TENANTS, headers={"Authorization": f"Bearer {key}"})
    assert key not in answer.text
    return answer.status_code, answer.json()["error"]["code"]


WORKS = (403, "insufficient_scope")
UNKNOWN = (401, "invalid_api_key")


async def test_a_key_is_shown_once(operator: httpx.AsyncClient) -> None:
    made = await make(operator)
    secret = made.pop("key")
    assert re.fullmatch(r"pg-[0-9A-Za-z]{40}", secret)
    assert made == {
        "id": made["id"], "object": "api_key", "name": "ci", "prefix": secret[:8], "status": "active", "scopes": SCOPES,
        "models": None, "created_at": made["created_at"], "expires_at": None, "revoked_at": None,
    }  # fmt: skip
    assert await tried(operator, secret) == WORKS
    listed = await operator.get(URL)
    assert listed.json()["data"] == [made]
    assert secret not in listed.text


@pytest.mark.parametrize("form", ["seconds", "text"])
async def test_a_key_may_be_given_less(operator: httpx.AsyncClient, form: str) -> None:
    soon = int(time.time()) + 3600
    spelled = soon if form == "seconds" else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(soon))
    made = await make(operator, scopes=["usage:read"], expires_at=spelled, models=["voice", "acme/tone"])
    assert (made["scopes"], made["models"]) == (["usage:read"], ["acme/tone", "voice"])
    assert made["expires_at"] == soon


async def test_rotation_with_and_without_grace(operator: httpx.AsyncClient) -> None:
    first = await make(operator, scopes=["inference"])
    second = (await operator.post(f"{URL}/{first['id']}/rotate", json={"grace_seconds": 60})).json()
    assert (second["scopes"], second["name"]) == (["inference"], "ci")
    assert [await tried(operator, each["key"]) for each in (first, second)] == [WORKS, WORKS]
    third = await operator.post(f"{URL}/{second['id']}/rotate", json={"grace_seconds": 0})
    assert third.status_code == 201
    assert [await tried(operator, each["key"]) for each in (second, third.json())] == [UNKNOWN, WORKS]
    again = await operator.post(f"{URL}/{second['id']}/rotate", json={})
    assert (again.status_code, again.json()["error"]["code"]) == (409, "key_inactive")
    states = {row["id"]: row["status"] for row in (await operator.get(URL)).json()["data"]}
    assert [states[each["id"]] for each in (first, second, third.json())] == ["active", "revoked", "active"]


async def test_revoked_keys_and_disabled_and_deleted_tenants_are_refused_at_once(operator: httpx.AsyncClient) -> None:
    made, other = await make(operator), await make(operator)
    for key in (made, other):
        assert await tried(operator, key["key"]) == WORKS
    gone = await operator.delete(f"{URL}/{made['id']}")
    assert (gone.status_code, gone.json()) == (200, {"id": made["id"], "object": "api_key", "deleted": True})
    assert await tried(operator, made["key"]) == UNKNOWN
    await operator.patch(f"{TENANTS}/acme", json={"status": "disabled"})
    assert await tried(operator, other["key"]) == (403, "tenant_disabled")
    await operator.patch(f"{TENANTS}/acme", json={"status": "active"})
    assert await tried(operator, other["key"]) == WORKS
    await operator.delete(f"{TENANTS}/acme")
    assert await tried(operator, other["key"]) == UNKNOWN


@pytest.mark.parametrize(
    "fields",
    [{"name": ""}, {"name": "x" * 65}, {"name": "a\n"}, {"name": None}, {"scopes": []}, {"scopes": ["admin"]},
     {"scopes": "inference"}, {"expires_at": 1}, {"expires_at": "soon"}, {"expires_at": 10**400},
     {"expires_at": "2030-01-01"}, {"models": "base"}, {"models": [1]}, {"models": ["\u0000"]},
     {"models": ["a"] * 101}, {"key": "pg-mine"}],
)  # fmt: skip
async def test_bodies_are_taken_strictly(operator: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    refused = await operator.post(URL, json={"name": "ci"} | fields)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert (await operator.get(URL)).json()["data"] == []


@pytest.mark.parametrize("grace", [-1, 30 * 24 * 3600 + 1, 1.5, "60", None, 10**30])
async def test_grace_is_seconds_within_a_month(operator: httpx.AsyncClient, grace: Any) -> None:
    made = await make(operator)
    refused = await operator.post(f"{URL}/{made['id']}/rotate", json={"grace_seconds": grace})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "grace_seconds")


async def test_a_tenants_keys_are_its_own(operator: httpx.AsyncClient) -> None:
    made = await make(operator)
    there, nowhere = f"{TENANTS}/default/keys/{made['id']}", f"{TENANTS}/default/keys/key_{'0' * 24}"
    for method, path in (("DELETE", ""), ("POST", "/rotate")):
        hidden = await operator.request(method, there + path, json={})
        unknown = await operator.request(method, nowhere + path, json={})
        assert hidden.status_code == unknown.status_code == 404
        assert hidden.text.replace(made["id"], f"key_{'0' * 24}") == unknown.text
    assert await tried(operator, made["key"]) == WORKS
    assert (await operator.post(f"{TENANTS}/nope/keys", json={"name": "ci"})).status_code == 404
    assert (await operator.get(f"{TENANTS}/nope/keys")).status_code == 404
