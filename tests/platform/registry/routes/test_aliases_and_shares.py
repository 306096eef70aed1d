"""The routes of names for versions, and of tenants who may call an adapter that is not theirs."""

import time
from typing import Any

import httpx
from tests.platform.registry.fakes import Audited, Push

from polygraft.db import AdapterAlias, Database
from polygraft.registry.lending import MAX_ALIASES
from polygraft.tenancy.request import Owner

from .calling import error


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
