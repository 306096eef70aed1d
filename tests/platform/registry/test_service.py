"""What a model name stands for, for whom."""

from typing import Any

import pytest

from polygraft.card import ModelCard
from polygraft.db import Adapter, AdapterVersion, Database, Tenant
from polygraft.errors import ApiError
from polygraft.registry.live import STALLED_SECONDS, LiveModels
from polygraft.registry.service import Registry
from polygraft.tenancy.principal import TENANT_SCOPES, Principal


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


@pytest.fixture
async def principals(database: Database) -> dict[str, Principal]:
    """The tenant `acme` with the adapter `pirate` (v1, v2 served, v3 failed) and a disabled one; `other` with none."""
    async with database.transaction() as session:
        tenants = [Tenant(name="acme"), Tenant(name="other")]
        session.add_all(tenants)
        await session.flush()
        pirate = Adapter(tenant_id=tenants[0].id, name="pirate", served_version=2, next_version=4)
        pirate.versions = [version(1), version(2), version(3, "failed")]
        gone = Adapter(tenant_id=tenants[0].id, name="gone", served_version=1, enabled=False)
        gone.versions = [version(1)]
        session.add_all([pirate, gone])
    return {
        tenant.name: Principal(key_id="k", tenant_id=tenant.id, tenant_name=tenant.name, scopes=TENANT_SCOPES)
        for tenant in tenants
    }


@pytest.fixture
async def live(directory: Any) -> LiveModels:
    live = LiveModels(directory)
    await live.refresh()
    return live


@pytest.fixture
def registry(database: Database, live: LiveModels) -> Registry:
    registry = Registry(database, live)
    registry.complete = True
    return registry


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
    ["nope", "gone", "pirate@v3", "pirate@v4", "pirate@", "pirate@v", "pirate@v01", "Pirate", "BASE", "base ", ""],
)
async def test_other_names_are_not_found(registry: Registry, principals: dict[str, Principal], name: str) -> None:
    error = await refusal(registry, principals["acme"], name)
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")


async def test_a_strangers_adapter_is_not_found_in_the_same_words(
    registry: Registry, principals: dict[str, Principal]
) -> None:
    theirs = (await refusal(registry, principals["other"], "pirate")).body()
    nobodys = (await refusal(registry, principals["other"], "nobody")).body()
    assert theirs["error"]["message"].replace("pirate", "nobody") == nobodys["error"]["message"]


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
