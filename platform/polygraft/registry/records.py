"""SQL for a tenant's adapters, their versions, aliases and shares, as their owner sees and changes them, and for which
uploads became which versions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, and_, bindparam, delete, func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from polygraft.db import Adapter, AdapterAlias, AdapterShare, AdapterVersion, Upload
from polygraft.errors import not_found

_LIVE = (Adapter.enabled, Adapter.deleted_at.is_(None))

_OTHER = aliased(AdapterVersion)
_NEWEST = select(func.max(_OTHER.version)).where(_OTHER.adapter_id == AdapterVersion.adapter_id).scalar_subquery()
# Made once: putting a statement together takes longer than SQLite needs to answer it.
_SHOWN_VERSIONS = (
    select(AdapterVersion)
    .join(Adapter, Adapter.id == AdapterVersion.adapter_id)
    .where(Adapter.id.in_(bindparam("ids", expanding=True)))
    .where(or_(AdapterVersion.version == Adapter.served_version, AdapterVersion.version == _NEWEST))
)
_SHOWN_ALIASES = (
    select(AdapterAlias)
    .where(AdapterAlias.adapter_id.in_(bindparam("ids", expanding=True)))
    .order_by(AdapterAlias.name)
)


@dataclass(frozen=True, slots=True)
class Shown:
    """An adapter with what a listing tells of it."""

    adapter: Adapter
    served: AdapterVersion | None
    newest: AdapterVersion
    aliases: Sequence[AdapterAlias]


async def lock(session: AsyncSession, tenant_id: str, name: str, *, live: bool = True) -> Adapter | None:
    """The tenant's adapter of that name, held until the transaction ends; unless told otherwise, only one that is
    neither deleted nor without its option.

    Call it before anything else in the transaction.
    """
    return await _lock(session, Adapter.tenant_id == tenant_id, Adapter.name == name, *(_LIVE if live else ()))


async def lock_by_id(session: AsyncSession, adapter_id: str) -> Adapter | None:
    """The adapter, whatever its state, held until the transaction ends."""
    return await _lock(session, Adapter.id == adapter_id)


async def _lock(session: AsyncSession, *where: ColumnElement[bool]) -> Adapter | None:
    # An update that changes nothing: SQLite knows no FOR UPDATE, and PostgreSQL looks again after it has waited.
    held = update(Adapter).where(*where).values(next_version=Adapter.next_version).returning(Adapter.id)
    adapter_id = await session.scalar(held, execution_options={"synchronize_session": False})
    return None if adapter_id is None else await session.get(Adapter, adapter_id, populate_existing=True)


async def lock_or_make(session: AsyncSession, tenant_id: str, name: str) -> Adapter:
    """The tenant's adapter of that name, whatever its state and made if there is none, held until the transaction
    ends. Whoever makes it too waits, and gets the same. Raises ApiError 404 when the tenant has just been deleted.
    """
    found = await lock(session, tenant_id, name, live=False)
    if found is None:
        insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
        try:
            await session.execute(insert(Adapter).values(tenant_id=tenant_id, name=name).on_conflict_do_nothing())
        except IntegrityError:
            raise not_found("tenant", tenant_id) from None
        found = await lock(session, tenant_id, name, live=False)
        if found is None:
            # Somebody else made it, and it has gone with its tenant.
            raise not_found("tenant", tenant_id)
    return found


async def begin_anew(session: AsyncSession, adapter: Adapter) -> None:
    """Undo a locked adapter's deletion for what was begun afterwards: versions from before, aliases and shares are gone
    for good. Numbers go on, so that no version is ever taken for another.
    """
    assert adapter.deleted_at is not None, "only what was deleted begins anew"
    old = (AdapterVersion.adapter_id == adapter.id, AdapterVersion.created_at <= adapter.deleted_at)
    for removal in (
        delete(AdapterVersion).where(*old),
        delete(AdapterAlias).where(AdapterAlias.adapter_id == adapter.id),
        delete(AdapterShare).where(AdapterShare.adapter_id == adapter.id),
    ):
        await session.execute(removal, execution_options={"synchronize_session": False})
    adapter.deleted_at, adapter.served_version, adapter.share_prefix = None, None, False


def take_number(adapter: Adapter) -> int:
    """The number of the next version of a locked adapter, which no other version gets."""
    number = adapter.next_version
    adapter.next_version = number + 1
    return number


async def by_name(session: AsyncSession, tenant_id: str, name: str) -> Adapter | None:
    """The tenant's adapter of that name, deleted or not."""
    query = select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.name == name)
    found: Adapter | None = await session.scalar(query)
    return found


async def live_by_name(session: AsyncSession, tenant_id: str, name: str) -> Adapter | None:
    """The tenant's adapter of that name, if it is neither deleted nor without its option."""
    query = select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.name == name, *_LIVE)
    found: Adapter | None = await session.scalar(query)
    return found


async def created_at(session: AsyncSession, tenant_id: str, adapter_id: str) -> datetime | None:
    """When the tenant's adapter of that id was made; None if there is none."""
    query = select(Adapter.created_at).where(Adapter.tenant_id == tenant_id, Adapter.id == adapter_id)
    found: datetime | None = await session.scalar(query)
    return found


async def newest_adapters(
    session: AsyncSession, tenant_id: str, limit: int, before: tuple[datetime, str] | None
) -> Sequence[Adapter]:
    """The tenant's live adapters, newest first, from after the one made at that time with that id."""
    query = select(Adapter).where(Adapter.tenant_id == tenant_id, *_LIVE)
    if before is not None:
        moment, adapter_id = before
        earlier = and_(Adapter.created_at == moment, Adapter.id < adapter_id)
        query = query.where(or_(Adapter.created_at < moment, earlier))
    query = query.order_by(Adapter.created_at.desc(), Adapter.id.desc()).limit(limit)
    return (await session.scalars(query)).all()


async def shown(session: AsyncSession, adapters: Sequence[Adapter]) -> list[Shown]:
    """The adapters with their served and newest versions and their aliases: two queries, however many they are. One
    that has been purged since it was found is passed over.
    """
    ids = {"ids": [adapter.id for adapter in adapters]}
    versions: dict[str, list[AdapterVersion]] = defaultdict(list)
    for version in await session.scalars(_SHOWN_VERSIONS, ids):
        versions[version.adapter_id].append(version)
    aliases: dict[str, list[AdapterAlias]] = defaultdict(list)
    for alias in await session.scalars(_SHOWN_ALIASES, ids):
        aliases[alias.adapter_id].append(alias)
    return [
        Shown(
            adapter,
            served=next((found for found in versions[adapter.id] if found.version == adapter.served_version), None),
            newest=max(versions[adapter.id], key=lambda found: found.version),
            aliases=aliases[adapter.id],
        )
        for adapter in adapters
        if versions[adapter.id]
    ]


async def version_numbered(session: AsyncSession, adapter_id: str, number: int) -> AdapterVersion | None:
    """The adapter's version of that number, ready or not."""
    query = select(AdapterVersion).where(AdapterVersion.adapter_id == adapter_id, AdapterVersion.version == number)
    found: AdapterVersion | None = await session.scalar(query)
    return found


async def version_with_digest(
    session: AsyncSession, adapter_id: str, digest: str, base_model: str
) -> AdapterVersion | None:
    """The adapter's version with these contents for this base model."""
    query = select(AdapterVersion).where(
        AdapterVersion.adapter_id == adapter_id,
        AdapterVersion.digest == digest,
        AdapterVersion.base_model == base_model,
    )
    found: AdapterVersion | None = await session.scalar(query)
    return found


async def newest_ready(session: AsyncSession, adapter_id: str, *, unless_from: str | None = None) -> int | None:
    """The highest number of a ready version, leaving out those that came in by `unless_from`."""
    query = select(func.max(AdapterVersion.version)).where(
        AdapterVersion.adapter_id == adapter_id, AdapterVersion.status == "ready"
    )
    if unless_from is not None:
        query = query.where(AdapterVersion.source != unless_from)
    found: int | None = await session.scalar(query)
    return found


async def ready_numbers(session: AsyncSession, adapter_id: str, among: Sequence[int]) -> set[int]:
    """Which of these numbers are ready versions of the adapter."""
    query = select(AdapterVersion.version).where(
        AdapterVersion.adapter_id == adapter_id, AdapterVersion.status == "ready", AdapterVersion.version.in_(among)
    )
    return set(await session.scalars(query))


async def count_versions(session: AsyncSession, adapter_id: str) -> int:
    """How many versions the adapter has, ready or not."""
    query = select(func.count()).select_from(AdapterVersion).where(AdapterVersion.adapter_id == adapter_id)
    found: int = (await session.scalars(query)).one()
    return found


async def forget_failures(session: AsyncSession, adapter_id: str, but: int) -> None:
    """Remove the adapter's failed versions but the newest ones."""
    failed = (AdapterVersion.adapter_id == adapter_id, AdapterVersion.status == "failed")
    oldest_kept = select(AdapterVersion.version).where(*failed).order_by(AdapterVersion.version.desc())
    removal = delete(AdapterVersion).where(
        *failed, AdapterVersion.version < oldest_kept.offset(but - 1).limit(1).scalar_subquery()
    )
    await session.execute(removal, execution_options={"synchronize_session": False})


async def versions_before(
    session: AsyncSession, adapter_id: str, limit: int, number: int | None
) -> Sequence[AdapterVersion]:
    """The adapter's versions, newest first, from below that number."""
    query = select(AdapterVersion).where(AdapterVersion.adapter_id == adapter_id)
    if number is not None:
        query = query.where(AdapterVersion.version < number)
    return (await session.scalars(query.order_by(AdapterVersion.version.desc()).limit(limit))).all()


async def version_of(session: AsyncSession, adapter_id: str, version_id: str) -> AdapterVersion | None:
    """The version of that id, if it is this adapter's."""
    query = select(AdapterVersion).where(AdapterVersion.adapter_id == adapter_id, AdapterVersion.id == version_id)
    found: AdapterVersion | None = await session.scalar(query)
    return found


async def become(session: AsyncSession, upload_id: str, version_id: str) -> bool:
    """Note that a resumable upload became the version. False for one that has become another, or is gone."""
    open_upload = update(Upload).where(Upload.id == upload_id, Upload.version_id.is_(None))
    noted = open_upload.values(version_id=version_id).returning(Upload.id)
    return await session.scalar(noted, execution_options={"synchronize_session": False}) is not None


async def become_another(session: AsyncSession, version_id: str, known_id: str) -> None:
    """Note that the uploads of one version became another, which has the same contents and was there before."""
    moved = update(Upload).where(Upload.version_id == version_id).values(version_id=known_id, existed=True)
    await session.execute(moved, execution_options={"synchronize_session": False})


async def served_from(session: AsyncSession, tenant_id: str, source: str) -> Sequence[Adapter]:
    """The tenant's live adapters whose served version came in by `source`."""
    query = (
        select(Adapter)
        .join(AdapterVersion, AdapterVersion.adapter_id == Adapter.id)
        .where(Adapter.tenant_id == tenant_id, *_LIVE)
        .where(AdapterVersion.version == Adapter.served_version, AdapterVersion.source == source)
        .order_by(Adapter.name)
    )
    return (await session.scalars(query)).all()


async def count_aliases(session: AsyncSession, adapter_id: str) -> int:
    """How many aliases the adapter has."""
    query = select(func.count()).select_from(AdapterAlias).where(AdapterAlias.adapter_id == adapter_id)
    found: int = (await session.scalars(query)).one()
    return found


async def remove_alias(session: AsyncSession, adapter_id: str, name: str) -> bool:
    """Whether there was one to remove."""
    removal = delete(AdapterAlias).where(AdapterAlias.adapter_id == adapter_id, AdapterAlias.name == name)
    return await session.scalar(removal.returning(AdapterAlias.name)) is not None


async def remove_share(session: AsyncSession, adapter_id: str, tenant_id: str) -> bool:
    """Whether there was one to remove."""
    removal = delete(AdapterShare).where(AdapterShare.adapter_id == adapter_id, AdapterShare.tenant_id == tenant_id)
    return await session.scalar(removal.returning(AdapterShare.tenant_id)) is not None
