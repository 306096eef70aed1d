"""What a model name stands for, for whom."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.audit import Actor
from polygraft.card import ModelCard
from polygraft.db import Adapter, AdapterVersion, Database, Tenant
from polygraft.errors import ApiError
from polygraft.registry import lending
from polygraft.registry.adapters import Adapters
from polygraft.registry.lending import Aliases, Shares
from polygraft.registry.live import STALLED_SECONDS, LiveModels
from polygraft.registry.schemas import AliasBody
from polygraft.registry.service import Registry
from polygraft.tenancy.principal import Principal
from polygraft.tenancy.request import Owner

from .fakes import Push


def version(number: int, status: str = "ready") -> AdapterVersion:
    return AdapterVersion(
        version=number,
        source="option",
        base_model="base",
        digest=f"sha256:{number}",
        status=status,
        rank=8,
        scale=1.0,
        target_modules=[],
        size_bytes=1,
        warnings=[],
    )


@pytest.fixture(autouse=True)
async def pirate(database: Database, owners: dict[str, Owner]) -> str:
    """The id of the adapter `pirate` of `acme` (v1, v2 served, v3 failed), beside one whose option is gone."""
    tenant = owners["acme"].tenant_id
    async with database.transaction() as session:
        pirate = Adapter(tenant_id=tenant, name="pirate", served_version=2, next_version=4)
        pirate.versions = [version(1), version(2), version(3, "failed")]
        gone = Adapter(tenant_id=tenant, name="gone", served_version=1, enabled=False)
        gone.versions = [version(1)]
        session.add_all([pirate, gone])
    return pirate.id


@contextmanager
def counted_queries(database: Database) -> Iterator[list[str]]:
    """The statements that are executed meanwhile."""
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        statements.append(statement)

    event.listen(database.engine.sync_engine, "before_cursor_execute", note)
    yield statements
    event.remove(database.engine.sync_engine, "before_cursor_execute", note)


def replace_model(worker: Any, model: str) -> Any:
    return msgspec.structs.replace(worker, id=model, model=model)


async def refusal(registry: Registry, principal: Principal, name: str) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await registry.resolve(principal, name)
    return caught.value


async def test_base_names_resolve_to_the_base(registry: Registry, principals: dict[str, Principal]) -> None:
    found = await registry.resolve(principals["other"], "base")
    assert (found.base, found.digest, found.label) == ("base", None, None)


async def test_an_adapter_resolves_to_a_digest(registry: Registry, principals: dict[str, Principal]) -> None:
    bare = await registry.resolve(principals["acme"], "pirate")
    assert (bare.base, bare.digest, bare.label) == ("base", "sha256:2", "pirate@v2")
    first = await registry.resolve(principals["acme"], "pirate@v1")
    assert (first.digest, first.label) == ("sha256:1", "pirate@v1")


@pytest.mark.parametrize(
    "name",
    [
        "nope",
        "gone",
        "pirate@v3",
        "pirate@v4",
        "pirate@prod",
        "acme/pirate",
        "other/pirate",
        "pirate\0",
        "pirate@",
        "pirate@v",
        "pirate@v01",
        "Pirate",
        "BASE",
        "base ",
        "",
    ],
)
async def test_other_names_are_not_found(registry: Registry, principals: dict[str, Principal], name: str) -> None:
    error = await refusal(registry, principals["acme"], name)
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


@pytest.mark.parametrize(
    "name", ["pirate", "pirate@v1", "pirate@prod", "acme/pirate", "acme/pirate@v1", "acme/pirate@prod"]
)
async def test_a_strangers_adapter_is_not_found_in_the_same_words_and_queries(
    registry: Registry, database: Database, principals: dict[str, Principal], aliases: Aliases,
    owners: dict[str, Owner], actor: Actor, name: str,
) -> None:  # fmt: skip
    await aliases.set(owners["acme"], actor, "pirate", "prod", AliasBody(version=1))
    with counted_queries(database) as theirs:
        there = (await refusal(registry, principals["other"], name)).body()
    with counted_queries(database) as nobodys:
        nowhere = (await refusal(registry, principals["other"], name.replace("pirate", "nobody"))).body()
    assert there["error"]["message"].replace("pirate", "nobody") == nowhere["error"]["message"]
    assert theirs == nobodys


async def test_aliases_stand_for_versions_at_once(
    registry: Registry, principals: dict[str, Principal], aliases: Aliases, owners: dict[str, Owner], actor: Actor
) -> None:
    for number in (1, 2, 1):
        await aliases.set(owners["acme"], actor, "pirate", "prod", AliasBody(version=number))
        found = await registry.resolve(principals["acme"], "pirate@prod")
        assert (found.label, found.digest) == (f"pirate@v{number}", f"sha256:{number}")
    await aliases.remove(owners["acme"], actor, "pirate", "prod")
    assert (await refusal(registry, principals["acme"], "pirate@prod")).code == "model_not_found"


async def test_splits_stick_to_a_conversation(
    registry: Registry, database: Database, live: LiveModels, principals: dict[str, Principal], aliases: Aliases,
    owners: dict[str, Owner], actor: Actor,
) -> None:  # fmt: skip
    split = AliasBody.model_validate({"split": [{"version": 1, "weight": 50}, {"version": 2, "weight": 50}]})
    await aliases.set(owners["acme"], actor, "pirate", "try", split)
    another_gateway = Registry(database, live)
    another_gateway.complete = True
    seen = set()
    for number in range(16):
        versions = {
            (await each.resolve(principals["acme"], "pirate@try", f"user-{number}")).version
            for each in (registry, another_gateway)
        }
        assert len(versions) == 1
        seen |= versions
    assert seen == {1, 2}
    assert (await registry.resolve(principals["acme"], "pirate@try")).version in seen


async def test_lent_adapters_are_called_by_their_owners_name_until_they_are_taken_back(
    registry: Registry, principals: dict[str, Principal], shares: Shares, aliases: Aliases, owners: dict[str, Owner],
    actor: Actor,
) -> None:  # fmt: skip
    await aliases.set(owners["acme"], actor, "pirate", "prod", AliasBody(version=1))
    await shares.lend(owners["acme"], actor, "pirate", "other", None)
    for name, number in (("acme/pirate", 2), ("acme/pirate@v1", 1), ("acme/pirate@prod", 1)):
        found = await registry.resolve(principals["other"], name)
        assert (found.label, found.digest) == (f"acme/pirate@v{number}", f"sha256:{number}")
        assert found.shared_prefixes is None
    assert [(entry.id, entry.owned_by) for entry in await registry.list_models(principals["other"])][1:] == [
        ("acme/pirate", "acme")
    ]
    assert (await refusal(registry, principals["other"], "pirate")).status == 404
    assert (await refusal(registry, principals["acme"], "acme/pirate")).status == 404
    await shares.take_back(owners["acme"], actor, "pirate", "other")
    assert (await refusal(registry, principals["other"], "acme/pirate")).status == 404
    assert len(await registry.list_models(principals["other"])) == 1


async def test_nothing_is_lent_to_a_tenant_that_has_just_been_deleted(
    shares: Shares, owners: dict[str, Owner], actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find(_session: AsyncSession, reference: str) -> Tenant:
        return Tenant(id="ten_gone", name=reference)

    monkeypatch.setattr(lending, "find", find)
    with pytest.raises(ApiError) as gone:
        await shares.lend(owners["acme"], actor, "pirate", "other", None)
    assert (gone.value.status, gone.value.message) == (404, "There is no tenant `other`.")


async def test_borrowers_share_prefixes_only_where_the_owner_says_so(
    registry: Registry, principals: dict[str, Principal], shares: Shares, owners: dict[str, Owner], actor: Actor
) -> None:
    await shares.lend(owners["acme"], actor, "pirate", "other", True)
    lent = await registry.resolve(principals["other"], "acme/pirate")
    assert lent.shared_prefixes is not None
    assert lent.shared_prefixes.startswith(owners["acme"].tenant_id)
    assert lent.shared_prefixes not in (owners["acme"].tenant_id, owners["other"].tenant_id)
    assert (await registry.resolve(principals["acme"], "pirate")).shared_prefixes is None
    # Lending it again, without a word about prefixes, changes nothing about them.
    await shares.lend(owners["acme"], actor, "pirate", "other", None)
    assert (await registry.resolve(principals["other"], "acme/pirate")).shared_prefixes == lent.shared_prefixes
    await shares.lend(owners["acme"], actor, "pirate", "other", False)
    assert (await registry.resolve(principals["other"], "acme/pirate")).shared_prefixes is None


async def test_a_disabled_tenants_adapters_are_lent_to_nobody(
    registry: Registry, database: Database, principals: dict[str, Principal], shares: Shares, owners: dict[str, Owner],
    actor: Actor,
) -> None:  # fmt: skip
    await shares.lend(owners["acme"], actor, "pirate", "other", None)
    async with database.transaction() as session:
        (await session.get_one(Tenant, owners["acme"].tenant_id)).status = "disabled"
    assert (await refusal(registry, principals["other"], "acme/pirate")).status == 404
    assert len(await registry.list_models(principals["other"])) == 1


async def test_a_keys_model_list_holds_whatever_the_version(
    registry: Registry, principals: dict[str, Principal], shares: Shares, owners: dict[str, Owner], actor: Actor
) -> None:
    await shares.lend(owners["acme"], actor, "pirate", "other", None)
    narrow = replace(principals["acme"], models=frozenset({"pirate"}))
    for name in ("pirate", "pirate@v1"):
        await registry.resolve(narrow, name)
    for name in ("base", "nope", "gone", "acme/pirate", "pirate2", ""):
        error = await refusal(registry, narrow, name)
        assert (error.status, error.code, error.type) == (403, "model_not_allowed", "permission_error")
    assert (await refusal(registry, narrow, "pirate@v9")).status == 404
    assert [entry.id for entry in await registry.list_models(narrow)] == ["pirate"]
    borrower = replace(principals["other"], models=frozenset({"acme/pirate", "base"}))
    for name in ("base", "acme/pirate", "acme/pirate@v1"):
        await registry.resolve(borrower, name)
    assert [entry.id for entry in await registry.list_models(borrower)] == ["base", "acme/pirate"]
    nothing = replace(principals["acme"], models=frozenset())
    assert await registry.list_models(nothing) == []


async def test_one_model_is_described_under_the_name_that_was_asked_for(
    registry: Registry, database: Database, principals: dict[str, Principal], shares: Shares, owners: dict[str, Owner],
    actor: Actor,
) -> None:  # fmt: skip
    await shares.lend(owners["acme"], actor, "pirate", "other", None)
    base = await registry.describe(principals["acme"], "base")
    assert (base.id, base.owned_by, base.parent) == ("base", "polygraft", None)
    with counted_queries(database) as queries:
        own = await registry.describe(principals["acme"], "pirate@v1")
    assert len(queries) == 1
    assert (own.id, own.owned_by, own.parent, own.max_model_len) == ("pirate@v1", "acme", "base", base.max_model_len)
    lent = await registry.describe(principals["other"], "acme/pirate")
    assert (lent.id, lent.owned_by, lent.parent) == ("acme/pirate", "acme", "base")


async def test_base_names_come_first_and_whole(
    registry: Registry, live: LiveModels, directory: Any, card: ModelCard, principals: dict[str, Principal]
) -> None:
    directory.known = {"acme/pirate@v1": card, "pirate": card}
    directory.live = [replace_model(directory.live[0], name) for name in directory.known]
    await live.refresh()
    for name in directory.known:
        assert (await registry.resolve(principals["acme"], name)).digest is None
    narrow = replace(principals["acme"], models=frozenset({"acme/pirate"}))
    assert (await refusal(registry, narrow, "acme/pirate@v1")).code == "model_not_allowed"


async def test_rollback_and_deletion_hold_for_the_next_request(
    registry: Registry, principals: dict[str, Principal], adapters: Adapters, owners: dict[str, Owner], actor: Actor,
    push: Push,
) -> None:  # fmt: skip
    admitted = await registry.resolve(principals["acme"], "pirate")
    await adapters.rollback(owners["acme"], actor, "pirate", 1)
    assert (await registry.resolve(principals["acme"], "pirate")).digest == "sha256:1"
    await adapters.delete(owners["acme"], actor, "pirate")
    for name in ("pirate", "pirate@v1"):
        assert (await refusal(registry, principals["acme"], name)).code == "model_not_found"
    await adapters.restore(owners["acme"], actor, "pirate")
    assert (await registry.resolve(principals["acme"], "pirate")).digest == "sha256:1"
    assert admitted.digest == "sha256:2"


async def test_a_thousand_adapters_are_listed_in_two_queries(
    registry: Registry, database: Database, principals: dict[str, Principal], owners: dict[str, Owner]
) -> None:
    async with database.transaction() as session:
        for number in range(1000):
            adapter = Adapter(tenant_id=owners["other"].tenant_id, name=f"a{number}", served_version=1, next_version=2)
            adapter.versions = [version(1)]
            session.add(adapter)
    with counted_queries(database) as queries:
        assert len(await registry.list_models(principals["other"])) == 1001
    assert len(queries) == 2


async def test_models_are_listed_per_tenant(registry: Registry, principals: dict[str, Principal]) -> None:
    listed = await registry.list_models(principals["acme"])
    assert [(entry.id, entry.owned_by, entry.parent) for entry in listed] == [
        ("base", "polygraft", None),
        ("pirate", "acme", "base"),
    ]
    assert [entry.id for entry in await registry.list_models(principals["other"])] == ["base"]


@pytest.mark.parametrize("trouble", ["loading", "draining", "stalled", "nobody"])
async def test_nothing_is_accepted_or_listed_while_no_worker_can_serve(
    registry: Registry, live: LiveModels, directory: Any, principals: dict[str, Principal], trouble: str
) -> None:
    if trouble == "nobody":
        directory.live = []
    elif trouble == "stalled":
        directory.worker(stalled=STALLED_SECONDS + 1)
    else:
        directory.worker(trouble)
    await live.refresh()
    for name in ("base", "pirate"):
        error = await refusal(registry, principals["acme"], name)
        assert error.status == 503
        assert "Retry-After" in error.headers
    assert await registry.list_models(principals["acme"]) == []
    # What is unknown is unknown all the same.
    assert (await refusal(registry, principals["acme"], "nope")).status == 404


async def test_an_unknown_name_may_still_come_while_loading(
    registry: Registry, live: LiveModels, directory: Any, principals: dict[str, Principal]
) -> None:
    registry.complete = False
    assert (await refusal(registry, principals["acme"], "pirate")).status == 503
    registry.complete = True
    directory.known = {}
    await live.refresh()
    assert (await refusal(registry, principals["acme"], "base")).status == 503


async def test_the_catalog_says_when_the_queue_is_away(live: LiveModels, directory: Any, card: ModelCard) -> None:
    assert live.now.reachable
    directory.away = True
    away = await live.refresh()
    assert (away.reachable, away.ready_models()) == (False, [])
    # The model is still known: its clients hear 503, not 404.
    assert away.cards == {card.name: card}
