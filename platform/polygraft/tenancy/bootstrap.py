"""The first tenant and the first keys."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.db import ApiKey, Database, Tenant
from polygraft.errors import ConfigError
from polygraft.tenancy import repository
from polygraft.tenancy.keys import ENVIRONMENT, KeyHasher, new_key, shown_prefix
from polygraft.tenancy.principal import TENANT_SCOPES, Scope

DEFAULT_TENANT = "default"
ADMIN_SCOPES: frozenset[Scope] = frozenset({"admin"})


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """The tenant `default`, and keys that were made just now and can never be shown again."""

    tenant_id: str
    tenant_active: bool
    admin_key: str | None
    tenant_key: str | None


async def bootstrap(
    database: Database, hasher: KeyHasher, *, admin_key: str | None = None, tenant_key: str | None = None
) -> Bootstrapped:
    """See that the tenant `default` and a key of each kind exist.

    A key given here (from the environment) is made to work; otherwise a random one is made where none ever
    existed. Running it again changes nothing. Raises ConfigError for a given key that is somebody else's.
    """
    async with database.transaction() as session:
        tenant = await repository.tenant_by_name(session, DEFAULT_TENANT)
        if tenant is None:
            tenant = Tenant(name=DEFAULT_TENANT)
            session.add(tenant)
            await session.flush()
        admin = await _ensure(session, hasher, None, admin_key)
        made = await _ensure(session, hasher, tenant.id, tenant_key)
        return Bootstrapped(tenant.id, tenant.status == "active", admin_key=admin, tenant_key=made)


async def _ensure(session: AsyncSession, hasher: KeyHasher, tenant_id: str | None, given: str | None) -> str | None:
    """Returns the key if it had to be made up."""
    if given is not None:
        await _ensure_given(session, hasher, tenant_id, given)
        return None
    if await repository.has_keys(session, tenant_id):
        return None
    key = new_key(admin=tenant_id is None)
    session.add(_row(hasher, tenant_id, "bootstrap", key))
    return key


async def _ensure_given(session: AsyncSession, hasher: KeyHasher, tenant_id: str | None, key: str) -> None:
    """One key per owner comes from the environment: a new value replaces the old one. A key that the owner has already
    is left as it is, also if it is revoked.
    """
    digest = hasher.digest(key)
    known = await repository.key_by_hash(session, digest)
    if known is not None:
        if known.tenant_id != tenant_id:
            variable = f"POLYGRAFT_BOOTSTRAP_{'ADMIN' if tenant_id is None else 'TENANT'}_KEY"
            raise ConfigError(f"what {variable} gives is the key `{known.id}` of somebody else")
        return
    row = await repository.key_by_name(session, tenant_id, ENVIRONMENT)
    if row is None:
        session.add(_row(hasher, tenant_id, ENVIRONMENT, key))
    else:
        row.key_hash, row.prefix, row.revoked_at, row.expires_at = digest, shown_prefix(key), None, None


def _row(hasher: KeyHasher, tenant_id: str | None, name: str, key: str) -> ApiKey:
    scopes = ADMIN_SCOPES if tenant_id is None else TENANT_SCOPES
    return ApiKey(
        tenant_id=tenant_id, name=name, key_hash=hasher.digest(key), prefix=shown_prefix(key), scopes=sorted(scopes)
    )


def print_keys(first: Bootstrapped) -> None:
    """Show keys that were made just now on stdout, the only time that they can be shown."""
    made = {"admin key": first.admin_key, "key of the tenant `default`": first.tenant_key}
    lines = [f"  {key}   {what}" for what, key in made.items() if key is not None]
    if lines:
        print("Made on this first start, and shown only now:", *lines, sep="\n", flush=True)  # noqa: T201
