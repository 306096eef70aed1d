"""/admin/v1/tenants over HTTP."""

import time
from typing import Any

import httpx
import pytest

URL = "/admin/v1/tenants"


def told(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    """Status, code and param of an error."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"], error["param"]


async def test_a_tenant_is_made_shown_changed_and_deleted(operator: httpx.AsyncClient) -> None:
    made = await operator.post(URL, json={"name": "acme"})
    assert made.status_code == 201
    tenant = made.json()
    assert tenant == {
        "id": tenant["id"], "object": "tenant", "name": "acme", "status": "active", "created_at": tenant["created_at"],
    }  # fmt: skip
    assert tenant["id"].startswith("ten_")
    assert abs(tenant["created_at"] - time.time()) < 60
    for reference in ("acme", tenant["id"]):
        assert (await operator.get(f"{URL}/{reference}")).json() == tenant
    changed = await operator.patch(f"{URL}/acme", json={"name": "acme-2", "status": "disabled"})
    assert changed.json() == tenant | {"name": "acme-2", "status": "disabled"}
    gone = await operator.delete(f"{URL}/{tenant['id']}")
    assert (gone.status_code, gone.json()) == (200, {"id": tenant["id"], "object": "tenant", "deleted": True})
    assert told(await operator.get(f"{URL}/acme-2")) == (404, "not_found", None)


async def test_a_name_that_is_taken_is_409(operator: httpx.AsyncClient) -> None:
    await operator.post(URL, json={"name": "acme"})
    assert told(await operator.post(URL, json={"name": "acme"})) == (409, "name_taken", "name")
    assert told(await operator.patch(f"{URL}/acme", json={"name": "default"})) == (409, "name_taken", "name")


async def test_the_default_tenant_says_why_it_stays(operator: httpx.AsyncClient) -> None:
    for refused in (
        await operator.delete(f"{URL}/default"),
        await operator.patch(f"{URL}/default", json={"status": "disabled"}),
        await operator.patch(f"{URL}/default", json={"name": "other"}),
    ):
        assert told(refused) == (409, "tenant_in_use", None)
    assert "--auth none" in (await operator.patch(f"{URL}/default", json={"status": "disabled"})).text


@pytest.mark.parametrize(
    "body",
    [{}, {"name": ""}, {"name": "A"}, {"name": "a/b"}, {"name": "ten_x"}, {"name": None}, {"name": 1}, {"name": ["a"]},
     {"name": "a", "status": "active"}, {"name": "a", "id": "ten_1"}, {"name": "x" * 65}, {"name": "a\u0000"}, [],
     "a", 1],
)  # fmt: skip
async def test_bodies_are_taken_strictly(operator: httpx.AsyncClient, body: Any) -> None:
    assert told(await operator.post(URL, json=body))[0] == 400


@pytest.mark.parametrize(
    "body", [{}, {"status": "gone"}, {"status": 1}, {"name": None, "status": None}, {"name": "ten_x"}]
)
async def test_changes_are_taken_strictly(operator: httpx.AsyncClient, body: Any) -> None:
    await operator.post(URL, json={"name": "acme"})
    assert told(await operator.patch(f"{URL}/acme", json=body))[0] == 400


async def test_listings_are_pages_by_cursor(operator: httpx.AsyncClient) -> None:
    for number in range(4):
        await operator.post(URL, json={"name": f"tenant-{number}"})
    first = (await operator.get(f"{URL}?limit=3")).json()
    assert (first["object"], first["has_more"]) == ("list", True)
    assert [row["name"] for row in first["data"]] == ["tenant-3", "tenant-2", "tenant-1"]
    assert (first["first_id"], first["last_id"]) == (first["data"][0]["id"], first["data"][2]["id"])
    rest = (await operator.get(f"{URL}?limit=3&after={first['last_id']}")).json()
    assert ([row["name"] for row in rest["data"]], rest["has_more"]) == (["tenant-0", "default"], False)
    empty = (await operator.get(f"{URL}?after={rest['last_id']}")).json()
    assert empty == {"object": "list", "data": [], "has_more": False, "first_id": None, "last_id": None}
    for query in ("limit=0", "limit=101", "limit=x", "after=nope", "after=%00", f"after={'x' * 200}"):
        assert told(await operator.get(f"{URL}?{query}"))[0] == 400
