"""The adapters of the command line, registered into the tenant `default` like any upload."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from polygraft.audit import SERVER
from polygraft.blobs import BlobUnavailable
from polygraft.card import ModelCard
from polygraft.db import AdapterVersion, Database
from polygraft.errors import ConfigError
from polygraft.registry import records
from polygraft.registry.adapters import audit
from polygraft.registry.findings import fill
from polygraft.registry.options import OPTION, AdapterOption
from polygraft_adapters.types import AdapterError, AdapterInfo, ModuleShapes

log = structlog.get_logger(__name__)

Inspect = Callable[[Path, ModuleShapes, int], AdapterInfo]
"""Checks a folder against a model and a largest rank. Raises AdapterError with everything that is wrong."""


class BlobSink(Protocol):
    """Where contents are kept by digest."""

    def put_adapter(self, folder: Path, digest: str) -> object:
        """Store the folder's files under the digest; no work if they are there."""


@dataclass(frozen=True, slots=True)
class Checked:
    """An option whose folder is a valid adapter of the model."""

    option: AdapterOption
    info: AdapterInfo


def check_options(options: Sequence[AdapterOption], card: ModelCard, inspect: Inspect) -> tuple[Checked, ...]:
    """Inspect every folder. Raises ConfigError that names every bad one with all of its problems."""
    checked: list[Checked] = []
    problems: list[str] = []
    for option in options:
        try:
            checked.append(Checked(option, inspect(option.path, card.modules, card.max_lora_rank)))
        except AdapterError as error:
            listed = "".join(f"\n  - {problem}" for problem in error.problems)
            problems.append(f"the adapter {option.name!r} in {option.path} cannot be served:{listed}")
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(checked)


def warnings_of(checked: Sequence[Checked]) -> list[str]:
    """What the operator should know although it is allowed, one sentence each."""
    warnings = [f"{item.option.name}: {warning}" for item in checked for warning in item.info.warnings]
    first: dict[str, str] = {}
    for item in checked:
        other = first.setdefault(item.info.digest, item.option.name)
        if other != item.option.name:
            warnings.append(f"{item.option.name}: the same contents as {other}")
    return warnings


async def register_options(
    database: Database,
    blobs: BlobSink,
    tenant_id: str,
    card: ModelCard,
    options: Sequence[AdapterOption],
    inspect: Inspect,
) -> tuple[Checked, ...]:
    """Check, store and register the options' adapters; those whose option is gone are no longer served.

    All of it happens or none. Raises ConfigError as check_options does, and BlobUnavailable or SQLAlchemyError where
    what they are kept in fails.
    """
    checked = await asyncio.to_thread(check_options, options, card, inspect)
    for item in checked:
        try:
            await asyncio.to_thread(blobs.put_adapter, item.option.path, item.info.digest)
        except OSError as error:
            raise BlobUnavailable(f"the adapter {item.option.name!r} cannot be stored: {error}") from error
    async with database.transaction() as session:
        # In the order of names, so that gateways which start at once never wait for one another in a circle.
        for item in sorted(checked, key=lambda item: item.option.name):
            await _register(session, tenant_id, card.name, item)
        await _retire_all_but(session, tenant_id, {option.name for option in options})
    for warning in warnings_of(checked):
        log.warning("adapter_warning", warning=warning)
    return checked


async def retire_options(database: Database, tenant_id: str) -> None:
    """Serve none of the adapters that came in by an option: there are no options any more."""
    async with database.transaction() as session:
        await _retire_all_but(session, tenant_id, set())


async def _register(session: AsyncSession, tenant_id: str, base_model: str, item: Checked) -> None:
    """Serve the contents under the name: an old version if it has them already, else the next one."""
    name, info = item.option.name, item.info
    adapter = await records.lock_or_make(session, tenant_id, name)
    known = await records.version_with_digest(session, adapter.id, info.digest, base_model)
    if known is None:
        number = records.take_number(adapter)
        known = AdapterVersion(adapter_id=adapter.id, version=number, source=OPTION, base_model=base_model)
        fill(known, info)
        session.add(known)
    elif (adapter.served_version, adapter.enabled, adapter.deleted_at) == (known.version, True, None):
        return
    adapter.served_version, adapter.enabled, adapter.deleted_at = known.version, True, None
    audit(session, SERVER, "adapter.option", adapter, version=known.version, digest=info.digest)


async def _retire_all_but(session: AsyncSession, tenant_id: str, names: set[str]) -> None:
    """What a name got in another way is served in the option's place; a name with nothing else is not served."""
    for adapter in await records.served_from(session, tenant_id, OPTION):
        if adapter.name in names:
            continue
        other = await records.newest_ready(session, adapter.id, unless_from=OPTION)
        if other is None:
            adapter.enabled = False
        else:
            adapter.served_version = other
        audit(session, SERVER, "adapter.retire", adapter, serves=other)
