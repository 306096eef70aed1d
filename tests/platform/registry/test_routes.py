"""The routes of adapters: what they answer, what they change, and what they tell the audit log."""

import asyncio
import io
import tarfile
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from polygraft.blobs import BlobError, BlobUnavailable
from polygraft.db import Adapter, AdapterAlias, AdapterVersion, AuditEntry, Database
from polygraft.openai.errors import install_error_handlers
from polygraft.registry.adapters import Adapters
from polygraft.registry.lending import MAX_ALIASES, Aliases, Shares
from polygraft.registry.routes import AdapterServices, build_router
from polygraft.registry.turns import Turns
from polygraft.tenancy.principal import Principal
from polygraft.tenancy.request import Owner, calling_tenant

from .fakes import Audited, Push

PREFIX = "/v1/adapters"
LIST = f"http://localhost{PREFIX}"


class Folders:
    """Adapters' folders by digest."""

    def __init__(self) -> None:
        self.known: dict[str, Path] = {}
        self.failure: BlobError | None = None

    def verified_adapter(self, digest: str) -> Path:
        if self.failure is not None:
            raise self.failure
        return self.known[digest]


def as_tenant(app: ASGIApp, principals: dict[str, Principal]) -> ASGIApp:
    """The key is the tenant's name."""

    async def authenticated(scope: Scope, receive: Receive, send: Send) -> None:
        key = dict(scope["headers"])[b"authorization"].decode()
        scope.setdefault("state", {}).update(principal=principals[key], request_id="req_7")
        await app(scope, receive, send)

    return authenticated


@pytest.fixture
def folders() -> Folders:
    return Folders()


@pytest.fixture
def app(adapters: Adapters, aliases: Aliases, shares: Shares, folders: Folders) -> FastAPI:
    app = FastAPI()
    install_error_handlers(app)
    services = AdapterServices(adapters, aliases, shares, folders)
    app.include_router(build_router(services, prefix=PREFIX, owner=calling_tenant))
    return app


@pytest.fixture
async def acme(app: FastAPI, principals: dict[str, Principal]) -> AsyncIterator[httpx.AsyncClient]:
    async with client(app, principals, "acme") as acme:
        yield acme


@pytest.fixture
async def other(app: FastAPI, principals: dict[str, Principal]) -> AsyncIterator[httpx.AsyncClient]:
    async with client(app, principals, "other") as other:
        yield other


def client(app: FastAPI, principals: dict[str, Principal], tenant: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(as_tenant(app, principals), client=("10.0.0.9", 1))
    return httpx.AsyncClient(transport=transport, base_url=LIST, headers={"Authorization": tenant})


def error(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    found = answer.json()["error"]
    assert found["message"]
    return answer.status_code, found["code"], found["param"]


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


async def test_aliases_are_set_told_and_removed(acme: httpx.AsyncClient, push: Push, audited: Audited) -> None:
    for content in "ab":
        await push("acme", "pirate", content)
    split = [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]
    answer = await acme.put("/pirate/aliases/try", json={"split": split})
    assert answer.json() == {
        "object": "adapter.alias", "name": "try", "adapter": "pirate", "target": {"split": split},
    }  # fmt: skip
    for _ in range(2):
        assert (await acme.put("/pirate/aliases/prod", json={"version": 2})).json()["target"] == {"version": 2}
    assert (await acme.get("/pirate")).json()["aliases"] == {"prod": {"version": 2}, "try": {"split": split}}
    assert (await acme.delete("/pirate/aliases/try")).json() == {
        "object": "adapter.alias.deleted", "name": "try", "adapter": "pirate", "deleted": True,
    }  # fmt: skip
    assert error(await acme.delete("/pirate/aliases/try"))[:2] == (404, "not_found")
    assert (await acme.get("/pirate")).json()["aliases"] == {"prod": {"version": 2}}
    assert [(action, detail["alias"]) for action, detail in await audited() if "alias" in detail] == [
        ("adapter.alias", "try"),
        ("adapter.alias", "prod"),
        ("adapter.unalias", "try"),
    ]


BAD_ALIASES: list[tuple[str, Any]] = [
    ("v3", {"version": 1}),
    ("v01", {"version": 1}),
    ("Prod", {"version": 1}),
    ("%00", {"version": 1}),
    ("x" * 65, {"version": 1}),
    ("prod", {"version": 9}),
    ("prod", {}),
    ("prod", {"version": 1, "split": [{"version": 1, "weight": 1}]}),
    ("prod", {"split": []}),
    ("prod", {"split": [{"version": 1, "weight": 0}]}),
    ("prod", {"split": [{"version": 1, "weight": -1}]}),
    ("prod", {"split": [{"version": 1, "weight": 1}, {"version": 1, "weight": 1}]}),
    ("prod", {"split": [{"version": 1, "weight": 1}, {"version": 9, "weight": 1}]}),
    ("prod", {"split": [{"version": 1, "weight": 1, "more": 1}]}),
    ("prod", {"split": [{"version": 1, "weight": 10**30}]}),
    ("prod", {"split": [{"version": number, "weight": 1} for number in range(1, 100)]}),
    ("prod", {"split": {"1": 2}}),
    ("prod", None),
]


async def test_bad_aliases_are_refused(acme: httpx.AsyncClient, push: Push) -> None:
    await push("acme", "pirate", "a")
    for alias, body in BAD_ALIASES:
        assert error(await acme.put(f"/pirate/aliases/{alias}", json=body))[0] == 400, (alias, body)
    assert (await acme.get("/pirate")).json()["aliases"] == {}


async def test_an_adapter_has_only_so_many_aliases(acme: httpx.AsyncClient, push: Push, database: Database) -> None:
    await push("acme", "pirate", "a")
    adapter_id = (await acme.get("/pirate")).json()["id"]
    split = [{"version": 1, "weight": 1}]
    async with database.transaction() as session:
        names = [f"a{number}" for number in range(MAX_ALIASES - 1)]
        session.add_all(AdapterAlias(adapter_id=adapter_id, name=name, split=split) for name in names)
    assert (await acme.put("/pirate/aliases/last", json={"version": 1})).status_code == 200
    assert (await acme.put("/pirate/aliases/more", json={"version": 1})).status_code == 400
    assert (await acme.put("/pirate/aliases/a1", json={"version": 1})).status_code == 200


async def test_sharing_is_with_a_tenant_by_id_or_name(
    acme: httpx.AsyncClient, owners: dict[str, Owner], push: Push, audited: Audited
) -> None:
    await push("acme", "pirate", "a")
    shared = (await acme.put("/pirate/shares/other")).json()
    assert abs(shared.pop("created_at") - time.time()) < 60
    assert shared == {
        "object": "adapter.share", "adapter": "pirate", "tenant_id": owners["other"].tenant_id, "tenant": "other",
        "share_prefix": False,
    }  # fmt: skip
    again = await acme.put(f"/pirate/shares/{owners['other'].tenant_id}", json={"share_prefix": True})
    assert again.json()["share_prefix"] is True
    assert (await acme.put("/pirate/shares/other", json={})).json()["share_prefix"] is True
    assert (await acme.delete("/pirate/shares/other")).json()["deleted"] is True
    for unknown in ("other", "nobody", "%00", "x" * 300):
        assert error(await acme.delete(f"/pirate/shares/{unknown}"))[:2] == (404, "not_found")
    for unknown in ("nobody", "%00", "x" * 300):
        assert error(await acme.put(f"/pirate/shares/{unknown}"))[:2] == (404, "not_found")
    assert error(await acme.put("/pirate/shares/acme"))[0] == 400
    for body in ({"share_prefix": "yes"}, {"more": 1}, [1]):
        assert error(await acme.put("/pirate/shares/other", json=body))[0] == 400
    assert [action for action, _ in await audited() if "share" in action] == [
        "adapter.share", "adapter.share", "adapter.unshare",
    ]  # fmt: skip


async def test_contents_are_sent_as_a_tar_gz(
    acme: httpx.AsyncClient, push: Push, folders: Folders, tmp_path: Path
) -> None:
    await push("acme", "pirate", "a")
    weights = bytes(range(256)) * 20_000
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    (tmp_path / "secret").write_bytes(b"no")
    folders.known["sha256:a"] = tmp_path
    answer = await acme.get("/pirate/versions/1/content")
    assert answer.headers["content-type"] == "application/gzip"
    assert answer.headers["content-disposition"] == 'attachment; filename="pirate-v1.tar.gz"'
    with tarfile.open(fileobj=io.BytesIO(answer.content), mode="r:gz") as archive:
        found = {member.name: archive.extractfile(member) for member in archive}
        contents = {name: file.read() for name, file in found.items() if file is not None}
    assert contents == {"adapter_config.json": b"{}", "adapter_model.safetensors": weights}
    (tmp_path / "adapter_model.safetensors").unlink()
    assert (await acme.get("/pirate/versions/1/content")).status_code == 503


@pytest.mark.parametrize(
    ("failure", "status", "code", "event"),
    [
        (BlobUnavailable("no answer"), 503, "dependency_unavailable", "adapter_content_not_read"),
        (BlobError("other bytes"), 422, "invalid_adapter", "adapter_content_damaged"),
    ],
)
async def test_contents_that_are_damaged_are_to_be_uploaded_again_and_those_out_of_reach_are_asked_for_later(
    acme: httpx.AsyncClient, push: Push, folders: Folders, failure: BlobError, status: int, code: str, event: str
) -> None:
    await push("acme", "pirate", "a")
    folders.failure = failure
    with structlog.testing.capture_logs() as logged:
        answer = await acme.get("/pirate/versions/1/content")
    assert error(answer)[:2] == (status, code)
    assert ("Upload it again" in answer.text) == (status == 422)
    [entry] = [entry for entry in logged if entry["log_level"] == "error"]
    assert (entry["event"], entry["digest"], entry["error"]) == (event, "sha256:a", str(failure))


async def test_contents_are_checked_one_after_the_other_and_who_waits_long_may_come_back(
    adapters: Adapters, aliases: Aliases, shares: Shares, principals: dict[str, Principal], push: Push, tmp_path: Path
) -> None:
    await push("acme", "pirate", "a")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    checking, release, checked = threading.Event(), threading.Event(), []

    class Slow:
        def verified_adapter(self, digest: str) -> Path:
            checked.append(digest)
            checking.set()
            release.wait()
            return tmp_path

    app = FastAPI()
    install_error_handlers(app)
    services = AdapterServices(adapters, aliases, shares, Slow(), checks=Turns(1, patience=0.1))
    for prefix in (PREFIX, "/again"):
        app.include_router(build_router(services, prefix=prefix, owner=calling_tenant))
    async with client(app, principals, "acme") as acme:
        first = asyncio.create_task(acme.get("/pirate/versions/1/content"))
        try:
            async with asyncio.timeout(10):
                while not checking.is_set():  # noqa: ASYNC110 - a thread sets it
                    await asyncio.sleep(0.01)
            refused = await acme.get("http://localhost/again/pirate/versions/1/content")
        finally:
            release.set()
        assert error(refused)[:2] == (503, "overloaded")
        assert int(refused.headers["Retry-After"]) >= 1
        assert (await first).status_code == 200
        assert (await acme.get("/pirate/versions/1/content")).status_code == 200
    assert len(checked) == 2


async def test_versions_that_are_not_ready_have_no_contents(
    acme: httpx.AsyncClient, intake: Any, owners: dict[str, Owner], actor: Any
) -> None:
    await intake.begin(owners["acme"], actor, "pirate", "base", "upload", None)
    assert (await acme.get("/pirate/versions/1")).json()["status"] == "validating"
    assert error(await acme.get("/pirate/versions/1/content"))[:2] == (404, "not_found")


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
