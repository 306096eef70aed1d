"""A version's way from its number to being served or refused."""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import pytest
from sqlalchemy import delete, update
from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.audit import Actor
from polygraft.db import Adapter, AdapterVersion, Database, Tenant, now
from polygraft.errors import ApiError
from polygraft.registry import intake as implementation
from polygraft.registry import records
from polygraft.registry.adapters import Adapters
from polygraft.registry.intake import Accepted, Intake, Ticket
from polygraft.registry.lending import Aliases, Shares
from polygraft.registry.registration import retire_options
from polygraft.registry.schemas import AliasBody
from polygraft.registry.service import Registry
from polygraft.tenancy.principal import Principal
from polygraft.tenancy.request import Owner
from polygraft_adapters.types import Problem

from .fakes import Audited, Begin, Push, info_of


@pytest.fixture
def begin(intake: Intake, owners: dict[str, Owner], actor: Actor) -> Begin:
    async def begin(name: str = "pirate") -> Ticket:
        return await intake.begin(owners["acme"], actor, name, "base", "upload", None)

    return begin


async def label(registry: Registry, principals: dict[str, Principal], name: str = "pirate") -> str | None:
    return (await registry.resolve(principals["acme"], name)).label


async def test_a_version_is_served_once_it_is_ready(
    intake: Intake, registry: Registry, principals: dict[str, Principal], owners: dict[str, Owner], actor: Actor
) -> None:
    ticket = await intake.begin(owners["acme"], actor, "pirate", "base", "import", "hf://org/pirate@main")
    first = await intake.adapter_object(owners["acme"], "pirate")
    assert (first.status, first.version, first.digest, first.rank, first.latest) == ("validating", 1, None, None, None)
    with pytest.raises(ApiError) as refused:
        await registry.resolve(principals["acme"], "pirate")
    assert refused.value.code == "model_not_found"
    assert await intake.ready(ticket, actor, info_of("a", warnings=("odd\0 \ud800",))) == Accepted(1, existed=False)
    shown = await intake.adapter_object(owners["acme"], "pirate")
    assert (shown.status, shown.version, shown.digest, shown.owned_by) == ("ready", 1, "sha256:a", "acme")
    assert (shown.rank, shown.scale, shown.target_modules, shown.size_bytes) == (8, 2.0, ["q_proj", "v_proj"], 100)
    assert shown.warnings == ["odd� ?"]
    assert await label(registry, principals) == "pirate@v1"


async def test_new_content_is_the_next_version_and_old_content_the_old_one(
    push: Push, adapters: Adapters, registry: Registry, principals: dict[str, Principal], owners: dict[str, Owner]
) -> None:
    assert await push("acme", "pirate", "a") == Accepted(1, existed=False)
    assert await push("acme", "pirate", "b") == Accepted(2, existed=False)
    assert await push("acme", "pirate", "a") == Accepted(1, existed=True)
    assert await label(registry, principals) == "pirate@v1"
    assert [version.version for version in await adapters.versions(owners["acme"], "pirate", 10, None)] == [2, 1]
    assert await push("acme", "pirate", "c") == Accepted(4, existed=False)
    assert await push("other", "pirate", "a") == Accepted(1, existed=False)


async def test_the_same_content_for_another_base_model_is_another_version(
    push: Push, intake: Intake, adapters: Adapters, owners: dict[str, Owner], actor: Actor
) -> None:
    assert await push("acme", "pirate", "a") == Accepted(1, existed=False)
    for existed in (False, True):
        ticket = await intake.begin(owners["acme"], actor, "pirate", "larger", "upload", None)
        assert await intake.ready(ticket, actor, info_of("a")) == Accepted(2, existed=existed)
    versions = await adapters.versions(owners["acme"], "pirate", 10, None)
    assert [(version.version, version.base_model) for version in versions] == [(2, "larger"), (1, "base")]


async def test_a_refused_version_changes_nothing_but_is_told_of(
    push: Push, begin: Begin, intake: Intake, registry: Registry, principals: dict[str, Principal],
    owners: dict[str, Owner], actor: Actor,
) -> None:  # fmt: skip
    await push("acme", "pirate", "a")
    ticket = await begin()
    during = await intake.adapter_object(owners["acme"], "pirate")
    assert during.latest is not None
    assert (during.version, during.latest.version, during.latest.status) == (1, 2, "validating")
    problems = [Problem("a.weight", "is\0 wrong", "fix \ud800it", kind="tensor"), Problem("r", "is 0")]
    await intake.failed(ticket, actor, "wrong in two ways", problems)
    shown = await intake.adapter_object(owners["acme"], "pirate")
    assert (shown.version, shown.status) == (1, "ready")
    assert shown.latest is not None
    assert (shown.latest.status, shown.latest.status_reason) == ("failed", "wrong in two ways")
    assert shown.latest.errors == [
        {"tensor": "a.weight", "problem": "is� wrong", "hint": "fix ?it"},
        {"field": "r", "problem": "is 0", "hint": ""},
    ]
    assert await label(registry, principals) == "pirate@v1"
    assert (await push("acme", "pirate", "b")).version == 3
    assert (await intake.adapter_object(owners["acme"], "pirate")).latest is None


async def test_only_the_newest_failures_are_kept(
    push: Push, begin: Begin, intake: Intake, adapters: Adapters, owners: dict[str, Owner], actor: Actor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(implementation, "KEPT_FAILURES", 2)
    for name in ("pirate", "haiku"):
        await push("acme", name, "a")
        for _ in range(3):
            await intake.failed(await begin(name), actor, "why", [])
        assert [each.version for each in await adapters.versions(owners["acme"], name, 10, None)] == [4, 3, 1]


async def test_an_adapter_has_so_many_versions_and_no_more(
    push: Push, intake: Intake, registry: Registry, principals: dict[str, Principal], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "MAX_VERSIONS", 2)
    await push("acme", "pirate", "a")
    await push("acme", "pirate", "b")
    with pytest.raises(ApiError) as full:
        await push("acme", "pirate", "c")
    assert (full.value.status, full.value.code) == (409, "too_many_versions")
    assert await label(registry, principals) == "pirate@v2"
    assert (await push("acme", "haiku", "c")).version == 1


async def test_a_first_version_that_fails_is_told_of_and_never_served(
    begin: Begin, intake: Intake, registry: Registry, principals: dict[str, Principal], owners: dict[str, Owner],
    actor: Actor,
) -> None:  # fmt: skip
    await intake.failed(await begin(), actor, "x" * 3000, [])
    shown = await intake.adapter_object(owners["acme"], "pirate")
    assert (shown.status, shown.version, len(shown.status_reason or "")) == ("failed", 1, 2000)
    assert "pirate" not in [entry.id for entry in await registry.list_models(principals["acme"])]


async def test_what_was_begun_later_goes_on_being_served(
    begin: Begin, intake: Intake, registry: Registry, principals: dict[str, Principal], actor: Actor
) -> None:
    first, second = await begin(), await begin()
    await intake.ready(second, actor, info_of("b"))
    await intake.ready(first, actor, info_of("a"))
    assert await label(registry, principals) == "pirate@v2"
    assert await label(registry, principals, "pirate@v1") == "pirate@v1"


async def test_numbers_are_never_given_twice_and_the_same_content_is_one_version(
    intake: Intake, adapters: Adapters, owners: dict[str, Owner], actor: Actor
) -> None:
    async def one(number: int) -> tuple[int, Accepted]:
        ticket = await intake.begin(owners["acme"], actor, "pirate", "base", "upload", None)
        return ticket.version, await intake.ready(ticket, actor, info_of(str(number % 2)))

    done = await asyncio.gather(*(one(number) for number in range(8)))
    assert sorted(number for number, _ in done) == list(range(1, 9))
    versions = await adapters.versions(owners["acme"], "pirate", 20, None)
    assert {version.digest for version in versions} == {"sha256:0", "sha256:1"}
    assert len(versions) == 2
    assert sum(accepted.existed for _, accepted in done) == 6


async def test_a_deleted_name_begins_anew_with_what_was_begun_afterwards(
    push: Push, begin: Begin, intake: Intake, adapters: Adapters, aliases: Aliases, shares: Shares, registry: Registry,
    principals: dict[str, Principal], owners: dict[str, Owner], actor: Actor,
) -> None:  # fmt: skip
    owner = owners["acme"]
    await push("acme", "pirate", "a")
    await aliases.set(owner, actor, "pirate", "prod", AliasBody(version=1))
    await shares.lend(owner, actor, "pirate", "other", None)
    assert await label(registry, {"acme": principals["other"]}, "acme/pirate") == "acme/pirate@v1"
    before = await begin()
    await adapters.delete(owner, actor, "pirate")
    await intake.ready(before, actor, info_of("b"))
    with pytest.raises(ApiError):
        await adapters.get(owner, "pirate")
    after = await begin()
    told = await adapters.get(owner, "pirate")
    assert (told.status, told.version) == ("validating", 3)
    with pytest.raises(ApiError):
        await registry.resolve(principals["acme"], "pirate@v1")
    assert await intake.ready(after, actor, info_of("c")) == Accepted(3, existed=False)
    assert await label(registry, principals) == "pirate@v3"
    for whose, name in (("acme", "pirate@v1"), ("acme", "pirate@prod"), ("other", "acme/pirate")):
        with pytest.raises(ApiError):
            await registry.resolve(principals[whose], name)
    assert await push("acme", "pirate", "a") == Accepted(4, existed=False)


async def test_leases_of_the_dead_are_taken_once(
    begin: Begin, intake: Intake, database: Database, registry: Registry, principals: dict[str, Principal],
    actor: Actor,
) -> None:  # fmt: skip
    ticket, kept = await begin(), await begin("haiku")
    assert await intake.abandoned() == []
    async with database.transaction() as session:
        await session.execute(update(AdapterVersion).values(lease_until=now() - timedelta(seconds=1)))
    await intake.renew(kept)
    taken = await asyncio.gather(*(intake.abandoned() for _ in range(4)))
    assert [found for some in taken for found in some] == [ticket]
    await intake.ready(ticket, actor, info_of("a"))
    # Whoever was only slow says the same again.
    assert await intake.ready(ticket, actor, info_of("a")) == Accepted(1, existed=False)
    await intake.failed(ticket, actor, "too late", [])
    assert await label(registry, principals) == "pirate@v1"


async def test_both_validators_of_a_merged_version_hear_the_same(
    push: Push, begin: Begin, intake: Intake, actor: Actor
) -> None:
    await push("acme", "pirate", "a")
    ticket = await begin()
    assert await intake.ready(ticket, actor, info_of("a")) == Accepted(1, existed=True)
    assert await intake.ready(ticket, actor, info_of("a")) == Accepted(1, existed=True)
    with pytest.raises(ApiError) as gone:
        await intake.ready(ticket, actor, info_of("b"))
    assert gone.value.status == 404


async def test_a_tenant_that_is_deleted_meanwhile_takes_its_version_along(
    begin: Begin, intake: Intake, database: Database, owners: dict[str, Owner], actor: Actor
) -> None:
    ticket = await begin()
    async with database.transaction() as session:
        await session.delete(await session.get_one(Tenant, owners["acme"].tenant_id))
    await intake.renew(ticket)
    await intake.failed(ticket, actor, "gone", [])
    with pytest.raises(ApiError) as gone:
        await intake.ready(ticket, actor, info_of("a"))
    assert (gone.value.status, gone.value.code) == (404, "not_found")


async def test_nothing_begins_for_a_tenant_that_has_just_been_deleted(intake: Intake, actor: Actor) -> None:
    with pytest.raises(ApiError) as gone:
        await intake.begin(Owner("ten_gone", "gone"), actor, "pirate", "base", "upload", None)
    assert (gone.value.status, gone.value.code) == (404, "not_found")


async def test_an_adapter_that_is_purged_while_it_is_looked_at_is_not_there(
    push: Push, intake: Intake, adapters: Adapters, owners: dict[str, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    await push("acme", "pirate", "a")
    await push("acme", "haiku", "a")
    shown = records.shown

    async def purged_before(session: AsyncSession, found: Sequence[Adapter]) -> list[records.Shown]:
        await session.execute(delete(AdapterVersion).where(AdapterVersion.adapter_id == found[-1].id))
        return await shown(session, found)

    monkeypatch.setattr(records, "shown", purged_before)
    assert [found.name for found in await adapters.page(owners["acme"], 10, None)] == ["haiku"]
    with pytest.raises(ApiError) as gone:
        await adapters.get(owners["acme"], "pirate")
    assert gone.value.status == 404


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [("base", 409, "name_taken"), ("", 400, None), ("Base", 400, None), ("a/b", 400, None), ("a\0", 400, None),
     ("模型", 400, None), ("x" * 65, 400, None), ("a@v1", 400, None), ("uploads", 400, None)],
)  # fmt: skip
def test_names_that_nothing_may_have(intake: Intake, name: str, status: int, code: str | None) -> None:
    intake.check_name("pirate")
    with pytest.raises(ApiError) as refused:
        intake.check_name(name)
    assert (refused.value.status, refused.value.code, refused.value.param) == (status, code, "name")


async def test_content_that_an_option_brought_first_outlives_the_option(
    push: Push, database: Database, registry: Registry, principals: dict[str, Principal], owners: dict[str, Owner]
) -> None:
    await push("acme", "pirate", "a")
    async with database.transaction() as session:
        await session.execute(update(AdapterVersion).values(source="option"))
    assert await push("acme", "pirate", "a") == Accepted(1, existed=True)
    await retire_options(database, owners["acme"].tenant_id)
    assert await label(registry, principals) == "pirate@v1"


async def test_every_step_is_audited(push: Push, begin: Begin, intake: Intake, audited: Audited, actor: Actor) -> None:
    await push("acme", "pirate", "a")
    await intake.failed(await begin(), actor, "why", [])
    assert await audited() == [
        ("adapter.upload", {"name": "pirate", "version": 1}),
        ("adapter.version", {"name": "pirate", "version": 1, "digest": "sha256:a", "existed": False, "served": True}),
        ("adapter.upload", {"name": "pirate", "version": 2}),
        ("adapter.failed", {"name": "pirate", "version": 2, "reason": "why"}),
    ]
