"""A new version of an adapter on its way from a number to being served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.audit import Actor
from polygraft.db import Adapter, AdapterVersion, Database, new_id, now
from polygraft.errors import ApiError, bad_request, not_found
from polygraft.registry import records
from polygraft.registry.adapters import audit
from polygraft.registry.findings import fill, invalid_adapter, problem_objects, problems_of, storable
from polygraft.registry.live import LiveModels
from polygraft.registry.names import NAME_RULE, is_adapter_name
from polygraft.registry.objects import found_object, no_adapter, object_at
from polygraft.registry.options import OPTION, ROUTES, clash
from polygraft.registry.schemas import AdapterObject
from polygraft.tenancy.request import Owner
from polygraft_adapters.types import AdapterInfo, Problem

LEASE_SECONDS = 30
"""For how long a version belongs to whoever validates it, unless that one renews it."""
LONGEST_REASON = 2000
MAX_VERSIONS = 1000
"""Of one adapter."""
KEPT_FAILURES = 20
"""Of one adapter, the newest: they tell what was wrong."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A version that is being validated."""

    version_id: str
    adapter_id: str
    tenant_id: str
    name: str
    """The adapter's."""
    version: int
    base_model: str
    begun: datetime


@dataclass(frozen=True, slots=True)
class Accepted:
    """The version that holds the contents; `existed`: the name had them before."""

    version: int
    existed: bool


class Intake:
    """Numbers new versions, and serves or refuses them once they have been validated."""

    def __init__(self, database: Database, live: LiveModels) -> None:
        self._database = database
        self._live = live

    def check_name(self, name: str) -> None:
        """Raise ApiError 400 for what is no adapter's name, 409 for one that could be taken for a base model's."""
        if not is_adapter_name(name):
            raise bad_request(f"`name` must be made of {NAME_RULE}.", param="name")
        if name in ROUTES:
            raise bad_request(f"`{name}` is the name of a route; choose another.", param="name")
        for base in self._live.now.cards:
            if clash(name, base):
                raise ApiError(
                    409, f"The name `{name}` clashes with the base model `{base}`.", param="name", code="name_taken"
                )

    async def begin(
        self,
        owner: Owner,
        actor: Actor,
        name: str,
        base_model: str,
        source: Literal["upload", "import"],
        origin: str | None,
        upload_id: str | None = None,
    ) -> Ticket:
        """Take the next number of the name, which check_name has let pass, for what came by the resumable upload if it
        came by one. What the name serves stays as it is. Raises ApiError 409 for a name that has MAX_VERSIONS, and for
        an upload that has become a version already.
        """
        version_id, moment = new_id("adv"), now()
        async with self._database.transaction() as session:
            adapter = await records.lock_or_make(session, owner.tenant_id, name)
            if await records.count_versions(session, adapter.id) >= MAX_VERSIONS:
                raise _too_many_versions(name)
            number = records.take_number(adapter)
            session.add(
                AdapterVersion(
                    id=version_id,
                    adapter_id=adapter.id,
                    version=number,
                    source=source,
                    origin=None if origin is None else storable(origin),
                    status="validating",
                    base_model=base_model,
                    lease_until=moment + timedelta(seconds=LEASE_SECONDS),
                    created_at=moment,
                )
            )
            await session.flush()
            if upload_id is not None and not await records.become(session, upload_id, version_id):
                raise upload_in_use()
            audit(session, actor, f"adapter.{source}", adapter, version=number)
        return Ticket(version_id, adapter.id, owner.tenant_id, name, number, base_model, moment)

    async def renew(self, ticket: Ticket) -> None:
        """Keep the version for another LEASE_SECONDS."""
        lease = now() + timedelta(seconds=LEASE_SECONDS)
        renewal = (
            update(AdapterVersion)
            .where(AdapterVersion.id == ticket.version_id, AdapterVersion.status == "validating")
            .values(lease_until=lease)
        )
        async with self._database.transaction() as session:
            await session.execute(renewal)

    async def ready(self, ticket: Ticket, actor: Actor, info: AdapterInfo) -> Accepted:
        """Serve the contents, which must be in the blob store, under the name: from here on, all at once.

        A name that was deleted before the ticket begins anew: none of what it was comes back with it. Contents that the
        name has already for the same base model are that version again, and the ticket's is no more. What was begun
        later and is ready already goes on being served. Raises ApiError 404 when the adapter is gone for good.
        """
        async with self._database.transaction() as session:
            adapter = await records.lock_by_id(session, ticket.adapter_id)
            if adapter is None:
                raise no_adapter(ticket.name)
            mine = await records.version_of(session, adapter.id, ticket.version_id)
            if adapter.deleted_at is not None and mine is not None and mine.created_at > adapter.deleted_at:
                await records.begin_anew(session, adapter)
            newest = await records.newest_ready(session, adapter.id)
            known = await records.version_with_digest(session, adapter.id, info.digest, ticket.base_model)
            if mine is None and known is None:
                raise no_adapter(ticket.name)
            existed = known is not None and (mine is None or known.id != mine.id)
            if known is not None and existed:
                await _merge(session, known, mine)
            elif mine is not None:
                fill(mine, info)
                known = mine
            assert known is not None
            served = newest is None or ticket.version >= newest
            if served:
                adapter.served_version, adapter.enabled = known.version, True
            told = {"version": known.version, "digest": info.digest, "existed": existed, "served": served}
            audit(session, actor, "adapter.version", adapter, **told)
        return Accepted(known.version, existed)

    async def failed(self, ticket: Ticket, actor: Actor, reason: str, problems: Sequence[Problem]) -> None:
        """Keep the version as a refused one, with all that is wrong with it. What the name serves stays as it is."""
        async with self._database.transaction() as session:
            adapter = await records.lock_by_id(session, ticket.adapter_id)
            mine = None if adapter is None else await records.version_of(session, adapter.id, ticket.version_id)
            if adapter is None or mine is None or mine.status != "validating":
                return
            mine.status, mine.lease_until = "failed", None
            mine.status_reason = storable(reason)[:LONGEST_REASON]
            mine.errors = problem_objects(problems)
            audit(session, actor, "adapter.failed", adapter, version=mine.version, reason=mine.status_reason)
            await session.flush()
            await records.forget_failures(session, adapter.id, but=KEPT_FAILURES)

    async def abandoned(self) -> list[Ticket]:
        """The versions whose validation has stopped because its gateway died; they are the caller's now, leased."""
        moment = now()
        take = (
            update(AdapterVersion)
            .where(AdapterVersion.status == "validating", AdapterVersion.lease_until < moment)
            .values(lease_until=moment + timedelta(seconds=LEASE_SECONDS))
            .returning(AdapterVersion.id)
        )
        async with self._database.transaction() as session:
            taken = set(await session.scalars(take, execution_options={"synchronize_session": False}))
            query = (
                select(AdapterVersion, Adapter)
                .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
                .where(AdapterVersion.id.in_(taken))
            )
            return [
                Ticket(
                    version.id,
                    adapter.id,
                    adapter.tenant_id,
                    adapter.name,
                    version.version,
                    version.base_model,
                    version.created_at,
                )
                for version, adapter in await session.execute(query)
            ]

    async def adapter_object(self, owner: Owner, name: str) -> AdapterObject:
        """The adapter as its owner sees it, also while its first version is validated. Raises ApiError 404."""
        async with self._database.transaction() as session:
            found = await found_object(session, owner, name)
        if found is None:
            raise no_adapter(name)
        return found

    async def outcome(self, owner: Owner, version_id: str) -> AdapterObject:
        """What whoever sent the version was told, or would be by now: the adapter as if it served the version, or as it
        is while the version is validated. Raises ApiError: 422 for a refused one, 404 where it is gone or deleted.
        """
        async with self._database.transaction() as session:
            version = await session.get(AdapterVersion, version_id)
            adapter = None if version is None else await session.get(Adapter, version.adapter_id)
            if version is None or adapter is None:
                raise not_found("version", version_id)
            if version.status == "failed":
                raise _refused(version)
            if version.status == "ready":
                found = await object_at(session, owner, adapter, version)
            else:
                found = await found_object(session, owner, adapter.name)
            if found is None:
                raise no_adapter(adapter.name)
            return found


def upload_in_use() -> ApiError:
    """409 for a resumable upload that somebody else is at work on."""
    return ApiError(409, "Another request is at work on this upload.", code="upload_in_use")


def _refused(version: AdapterVersion) -> ApiError:
    problems = problems_of(version)
    if problems:
        return invalid_adapter(problems)
    return ApiError(422, f"The adapter cannot be served: {version.status_reason}", code="invalid_adapter", errors=[])


def _too_many_versions(name: str) -> ApiError:
    return ApiError(
        409,
        f"`{name}` has {MAX_VERSIONS} versions and can have no more: upload under another name. Deleting it frees "
        "its name once it can no longer be restored.",
        param="name",
        code="too_many_versions",
    )


async def _merge(session: AsyncSession, known: AdapterVersion, mine: AdapterVersion | None) -> None:
    """Have the known version instead of the new one."""
    if mine is None:
        return
    if known.source == OPTION:
        # It no longer depends on the option being there.
        known.source, known.origin = mine.source, mine.origin
    await records.become_another(session, mine.id, known.id)
    await session.delete(mine)
