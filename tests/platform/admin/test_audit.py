"""/admin/v1/audit over HTTP."""

import time
from typing import Any

import httpx
import pytest

URL = "/admin/v1/audit"


@pytest.fixture
async def history(operator: httpx.AsyncClient) -> dict[str, Any]:
    """Two tenants, a key, and the end of one of them."""
    acme = (await operator.post("/admin/v1/tenants", json={"name": "acme"})).json()
    made = await operator.post("/admin/v1/tenants/acme/keys", json={"name": "ci"})
    await operator.delete(f"/admin/v1/tenants/acme/keys/{made.json()['id']}")
    rival = (await operator.post("/admin/v1/tenants", json={"name": "rival"})).json()
    await operator.delete("/admin/v1/tenants/rival")
    return {"acme": acme, "rival": rival, "key": made.json(), "request": made.headers["x-request-id"]}


async def actions(operator: httpx.AsyncClient, **filters: Any) -> list[str]:
    answer = await operator.get(URL, params=filters)
    assert answer.status_code == 200, answer.text
    return [entry["action"] for entry in answer.json()["data"]]


async def test_it_tells_who_did_what_from_where_and_when(operator: httpx.AsyncClient, history: dict[str, Any]) -> None:
    answer = await operator.get(URL, params={"action": "key.create"})
    (entry,) = answer.json()["data"]
    key = history["key"]
    assert entry == {
        "id": entry["id"], "object": "audit_entry", "at": entry["at"], "tenant_id": history["acme"]["id"],
        "actor": "operator", "key_id": entry["key_id"], "action": "key.create", "object_id": key["id"],
        "detail": {"name": "ci", "scopes": key["scopes"], "models": None, "expires_at": None},
        "address": "192.0.2.7", "request_id": history["request"],
    }  # fmt: skip
    assert abs(entry["at"] - time.time()) < 60
    assert entry["key_id"].startswith("key_")
    assert entry["key_id"] != key["id"]
    assert key["key"] not in answer.text


async def test_filters(operator: httpx.AsyncClient, history: dict[str, Any]) -> None:
    everything = ["tenant.delete", "tenant.create", "key.revoke", "key.create", "tenant.create"]
    assert await actions(operator) == everything
    assert await actions(operator, tenant="acme") == ["key.revoke", "key.create", "tenant.create"]
    assert await actions(operator, tenant=history["rival"]["id"]) == ["tenant.delete", "tenant.create"]
    assert await actions(operator, action="key") == ["key.revoke", "key.create"]
    assert await actions(operator, action="key.creat") == []
    assert await actions(operator, object_id=history["key"]["id"]) == ["key.revoke", "key.create"]
    assert await actions(operator, key_id="key_0") == []
    assert await actions(operator, since=int(time.time()) - 60) == everything
    assert await actions(operator, since="2999-01-01T00:00:00Z") == []
    assert (await operator.get(URL, params={"tenant": "rival"})).status_code == 404


@pytest.mark.parametrize(
    "filters",
    [{"tenant": "a/b"}, {"tenant": "\x00"}, {"action": "key.%"}, {"action": "\x00"}, {"since": "soon"},
     {"since": "-1e400"}, {"after": "x"}, {"after": "aud_"}, {"after": "aud_" + "9" * 40}, {"limit": 0},
     {"key_id": "x"}, {"object_id": "\x00"}],
)  # fmt: skip
async def test_filters_that_can_match_nothing_are_refused(operator: httpx.AsyncClient, filters: dict[str, Any]) -> None:
    refused = await operator.get(URL, params=filters)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == next(iter(filters))


async def test_pages_by_cursor_miss_nothing_while_more_is_written(
    operator: httpx.AsyncClient, history: dict[str, Any]
) -> None:
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        page = (await operator.get(URL, params={"limit": 2, **after})).json()
        seen += [entry["action"] for entry in page["data"]]
        await operator.post("/admin/v1/tenants", json={"name": f"more-{len(seen)}"})
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert seen == ["tenant.delete", "tenant.create", "key.revoke", "key.create", "tenant.create"]


async def test_refused_changes_leave_no_entry(operator: httpx.AsyncClient, history: dict[str, Any]) -> None:
    before = await actions(operator)
    assert (await operator.post("/admin/v1/tenants", json={"name": "acme"})).status_code == 409
    assert (await operator.delete("/admin/v1/tenants/default")).status_code == 409
    assert (await operator.post("/admin/v1/tenants/nope/keys", json={"name": "x"})).status_code == 404
    assert await actions(operator) == before
