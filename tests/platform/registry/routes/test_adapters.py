"""The routes of adapters: what they answer, what they change, and what they tell the audit log."""

import asyncio
import time
from typing import Any

import httpx
from fastapi import FastAPI
from tests.platform.registry.fakes import Audited, Push

from polygraft.db import Adapter, AdapterVersion, AuditEntry, Database
from polygraft.tenancy.request import Owner

from .calling import LIST, error


async def test_an_adapter_is_shown_as_the_contract_has_it(acme: httpx.AsyncClient, push: Push) -> None:
    await push("acme", "pirate", "a")
    shown = (await acme.get("/pirate")).json()
    assert shown.pop("id").startswith("adp_")
    assert abs(shown.pop("created_at") - time.time()) < 60
    assert shown == {
        "object": "adapter",
        "name": "pirate",
        "version": 1,
        "digest": "sha256:a",
        "status": "ready",
        "status_reason": None,
        "base_model": "base",
        "rank": 8,
        "scale": 2.0,
        "target_modules": ["q_proj", "v_proj"],
        "size_bytes": 100,
        "owned_by": "acme",
        "aliases": {},
        "latest": None,
        "warnings": [],
    }


async def test_listings_are_pages_newest_first_of_the_tenants_own(
    acme: httpx.AsyncClient, other: httpx.AsyncClient, push: Push
) -> None:
    for name in ("a", "b", "c", "gone"):
        await push("acme", name, name)
    await push("other", "x", "x")
    await acme.delete("/gone")
    first = (await acme.get(LIST, params={"limit": 2})).json()
    assert [adapter["name"] for adapter in first["data"]] == ["c", "b"]
    assert (first["object"], first["has_more"]) == ("list", True)
    assert (first["first_id"], first["last_id"]) == (first["data"][0]["id"], first["data"][1]["id"])
    # What comes and goes meanwhile moves nothing.
    await push("acme", "d", "d")
    await acme.delete("/b")
    second = (await acme.get(LIST, params={"limit": 2, "after": first["last_id"]})).json()
    assert ([adapter["name"] for adapter in second["data"]], second["has_more"]) == (["a"], False)
    assert [adapter["name"] for adapter in (await other.get(LIST)).json()["data"]] == ["x"]
    for after in ("nothing", "a\0", (await other.get(LIST)).json()["first_id"]):
        assert error(await acme.get(LIST, params={"after": after})) == (400, None, "after")


async def test_a_page_of_a_thousand_adapters_comes_at_once(
    acme: httpx.AsyncClient, database: Database, owners: dict[str, Owner]
) -> None:
    async with database.transaction() as session:
        for number in range(1000):
            adapter = Adapter(tenant_id=owners["acme"].tenant_id, name=f"a{number}", served_version=1, next_version=2)
            fields: dict[str, Any] = {"source": "upload", "base_model": "base", "digest": f"sha256:{number}"}
            adapter.versions = [AdapterVersion(version=1, rank=4, scale=1.0, size_bytes=1, **fields)]
            session.add(adapter)
    names: list[str] = []
    # The processor's time: what else this machine does is not the listing's.
    times: list[float] = []
    after: dict[str, str] = {}
    while True:
        started = time.process_time()
        page = (await acme.get(LIST, params={"limit": "100"} | after)).json()
        times.append(time.process_time() - started)
        names += [adapter["name"] for adapter in page["data"]]
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert len(set(names)) == len(names) == 1000
    assert sorted(times)[len(times) // 2] < 0.05


async def test_versions_are_listed_and_shown(acme: httpx.AsyncClient, push: Push) -> None:
    for content in "abc":
        await push("acme", "pirate", content)
    first = (await acme.get("/pirate/versions", params={"limit": 2})).json()
    assert ([version["version"] for version in first["data"]], first["has_more"]) == ([3, 2], True)
    rest = (await acme.get("/pirate/versions", params={"after": first["last_id"]})).json()
    assert ([version["version"] for version in rest["data"]], rest["has_more"]) == ([1], False)
    one = (await acme.get("/pirate/versions/2")).json()
    assert one == first["data"][1]
    assert (one["object"], one["digest"], one["source"], one["errors"]) == (
        "adapter.version",
        "sha256:b",
        "upload",
        None,
    )
    assert error(await acme.get("/pirate/versions/4")) == (404, "not_found", None)
    assert error(await acme.get("/pirate/versions", params={"after": "x"})) == (400, None, "after")
    for number in ("0", "-1", "x", "99999999999999999999"):
        assert error(await acme.get(f"/pirate/versions/{number}"))[0] == 400


CALLS: list[tuple[str, str, Any]] = [
    ("GET", "/pirate", None),
    ("DELETE", "/pirate", None),
    ("POST", "/pirate/restore", None),
    ("POST", "/pirate/rollback", {"version": 1}),
    ("GET", "/pirate/versions", None),
    ("GET", "/pirate/versions/1", None),
    ("GET", "/pirate/versions/1/content", None),
    ("PUT", "/pirate/aliases/prod", {"version": 1}),
    ("DELETE", "/pirate/aliases/prod", None),
    ("PUT", "/pirate/shares/other", None),
    ("DELETE", "/pirate/shares/other", None),
]


async def test_a_strangers_adapter_is_nothing(acme: httpx.AsyncClient, other: httpx.AsyncClient, push: Push) -> None:
    await push("acme", "pirate", "a")
    await acme.put("/pirate/aliases/prod", json={"version": 1})
    for method, path, body in CALLS:
        there = await other.request(method, path, json=body)
        for name in ("nobody", "Piraté", "pirate%00", "%F0%9F%A6%99", "x" * 300):
            nowhere = await other.request(method, path.replace("pirate", name), json=body)
            assert error(there)[:2] == error(nowhere)[:2] == (404, "not_found")
        nobody = await other.request(method, path.replace("pirate", "nobody"), json=body)
        assert there.text.replace("pirate", "nobody") == nobody.text


async def test_deleting_and_restoring(acme: httpx.AsyncClient, push: Push, audited: Audited) -> None:
    await push("acme", "pirate", "a")
    await acme.put("/pirate/aliases/prod", json={"version": 1})
    adapter = (await acme.get("/pirate")).json()
    gone = await acme.delete("/pirate")
    assert gone.json() == {"id": adapter["id"], "object": "adapter.deleted", "name": "pirate", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/versions"), ("GET", "/versions/1")):
        assert error(await acme.request(method, f"/pirate{path}")) == (404, "not_found", None)
    assert (await acme.get(LIST)).json()["data"] == []
    assert (await acme.post("/pirate/restore")).json() == adapter
    assert (await acme.post("/pirate/restore")).json() == adapter
    actions = [action for action, _ in await audited()]
    assert (actions.count("adapter.delete"), actions.count("adapter.restore")) == (1, 1)


async def test_of_parallel_deletions_one_succeeds(acme: httpx.AsyncClient, push: Push) -> None:
    await push("acme", "pirate", "a")
    answers = await asyncio.gather(*(acme.delete("/pirate") for _ in range(6)))
    assert sorted(answer.status_code for answer in answers) == [200, 404, 404, 404, 404, 404]


async def test_rolling_back_and_forth(acme: httpx.AsyncClient, push: Push, audited: Audited) -> None:
    for content in "ab":
        await push("acme", "pirate", content)
    for number in (1, 1, 2):
        answer = await acme.post("/pirate/rollback", json={"version": number})
        assert (answer.status_code, answer.json()["version"], answer.json()["latest"]) == (200, number, None)
    for number in (3, 2**31 - 1):
        assert error(await acme.post("/pirate/rollback", json={"version": number})) == (400, None, "version")
    assert [detail for action, detail in await audited() if action == "adapter.rollback"] == [
        {"name": "pirate", "version": 1, "before": 2},
        {"name": "pirate", "version": 2, "before": 1},
    ]


BAD_ROLLBACKS: list[Any] = [
    None,
    {},
    [],
    "x",
    {"version": "1"},
    {"version": 0},
    {"version": True},
    {"version": 1.5},
    {"version": 10**30},
    {"version": 1, "extra": 1},
]


async def test_bad_rollbacks_are_refused(acme: httpx.AsyncClient, push: Push) -> None:
    await push("acme", "pirate", "a")
    for body in BAD_ROLLBACKS:
        assert error(await acme.post("/pirate/rollback", json=body))[0] == 400, body
    for content in (b"", b"{", b"\xff", b'{"version": NaN}', b'{"version": "\\ud800"}'):
        answer = await acme.post("/pirate/rollback", content=content, headers={"Content-Type": "application/json"})
        assert error(answer)[0] == 400, content


async def test_the_audit_log_knows_who_and_from_where(
    acme: httpx.AsyncClient, push: Push, database: Database, owners: dict[str, Owner]
) -> None:
    await push("acme", "pirate", "a")
    await acme.delete("/pirate")
    async with database.transaction() as session:
        entry = await session.get_one(AuditEntry, 3)
    assert (entry.action, entry.actor, entry.key_id, entry.address) == ("adapter.delete", "tenant", "k", "10.0.0.9")
    assert (entry.request_id, entry.tenant_id) == ("req_7", owners["acme"].tenant_id)
    assert entry.object_id.startswith("adp_")


def test_every_route_is_described(app: FastAPI) -> None:
    document = app.openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            answer = operation["responses"]["200"]["content"]
            assert set(answer) == ({"application/gzip"} if path.endswith("/content") else {"application/json"}), path
            assert ("requestBody" in operation) == (method == "put" or path.endswith("/rollback"))
            assert "4XX" in operation["responses"]
