"""The registry: model names to digests."""

from __future__ import annotations

import re

import structlog

from polygraft.db import Database
from polygraft.errors import model_not_found, unavailable
from polygraft.registry import repository
from polygraft.registry.live import LiveModels
from polygraft.registry.types import ModelEntry, ResolvedModel
from polygraft.tenancy.principal import Principal

_VERSIONED = re.compile(r"(?P<name>[^@]+)@v(?P<version>[1-9][0-9]{0,8})")


class Registry:
    """Resolves names for the OpenAI routes (ModelResolver). Opens and closes its own short transactions."""

    def __init__(self, database: Database, live: LiveModels) -> None:
        self._database = database
        self._live = live
        self.complete = False
        """Whether the adapters of the options have been registered; until then an unknown name may still come."""

    async def resolve(self, principal: Principal, name: str) -> ResolvedModel:
        """See ModelResolver."""
        found = await self._find(principal, name)
        structlog.contextvars.bind_contextvars(model=found.base if found.label is None else found.label)
        return found

    async def _find(self, principal: Principal, name: str) -> ResolvedModel:
        if name in self._live.now.cards:
            self._require_worker(name)
            return ResolvedModel(base=name, digest=None, adapter=None, version=None)
        if not self.complete or not self._live.now.cards:
            raise unavailable("The model is being loaded.", retry_after=2)
        if principal.tenant_id is None:
            raise model_not_found(name)
        versioned = _VERSIONED.fullmatch(name)
        wanted, version = (name, None) if versioned is None else (versioned["name"], int(versioned["version"]))
        async with self._database.transaction() as session:
            found = await repository.served_version(session, principal.tenant_id, wanted, version)
        if found is None:
            raise model_not_found(name)
        adapter, served = found
        self._require_worker(served.base_model)
        return ResolvedModel(
            base=served.base_model,
            digest=served.digest,
            adapter=adapter.name,
            version=served.version,
        )

    async def list_models(self, principal: Principal) -> list[ModelEntry]:
        """See ModelResolver."""
        now = self._live.now
        live = {name: now.cards[name] for name in now.ready_models()}
        entries = [
            ModelEntry(
                id=card.name, created=card.created, owned_by="polygraft", parent=None, max_model_len=card.max_model_len
            )
            for card in live.values()
        ]
        if principal.tenant_id is None:
            return entries
        async with self._database.transaction() as session:
            adapters = await repository.served_adapters(session, principal.tenant_id)
        return entries + [
            ModelEntry(
                id=adapter.name,
                created=int(adapter.created_at.timestamp()),
                owned_by=principal.tenant_name if principal.tenant_name is not None else principal.tenant_id,
                parent=version.base_model,
                max_model_len=live[version.base_model].max_model_len,
            )
            for adapter, version in adapters
            if version.base_model in live
        ]

    def _require_worker(self, base: str) -> None:
        if not self._live.now.serving(base):
            raise unavailable(f"No worker is ready to serve `{base}` just now.", retry_after=2)
