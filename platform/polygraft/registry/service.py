"""The registry: model names to digests."""

from __future__ import annotations

import structlog

from polygraft.card import ModelCard
from polygraft.db import Database
from polygraft.errors import ApiError, model_not_found, shortened, unavailable
from polygraft.registry import repository
from polygraft.registry.live import LiveModels
from polygraft.registry.names import parse_adapter_name, without_version
from polygraft.registry.repository import Served
from polygraft.registry.split import choose
from polygraft.registry.types import ModelEntry, ResolvedModel
from polygraft.tenancy.principal import Principal


class Registry:
    """Resolves names for the OpenAI routes (ModelResolver). Opens and closes its own short transactions."""

    def __init__(self, database: Database, live: LiveModels) -> None:
        self._database = database
        self._live = live
        self.complete = False
        """Whether the adapters of the options have been registered; until then an unknown name may still come."""

    async def resolve(self, principal: Principal, name: str, conversation: str | None = None) -> ResolvedModel:
        """See ModelResolver."""
        found, _ = await self._found(principal, name, conversation)
        return found

    async def describe(self, principal: Principal, name: str) -> ModelEntry:
        """See ModelResolver."""
        found, adapter = await self._found(principal, name, None)
        card = self._card(found.base)
        if adapter is None:
            return _base_entry(card)
        assert found.adapter is not None
        owner, slash, _ = found.adapter.partition("/")
        return _adapter_entry(name, owner if slash else _own_name(principal), adapter, card)

    async def list_models(self, principal: Principal) -> list[ModelEntry]:
        """See ModelResolver."""
        now = self._live.now
        live = {name: now.cards[name] for name in now.ready_models()}
        entries = [_base_entry(card) for card in live.values()]
        if principal.tenant_id is not None:
            async with self._database.transaction() as session:
                own = await repository.own_models(session, principal.tenant_id)
                lent = await repository.lent_models(session, principal.tenant_id)
            entries += [
                _adapter_entry(adapter.name, _own_name(principal), adapter, live[adapter.base_model])
                for adapter in own
                if adapter.base_model in live
            ]
            entries += [
                _adapter_entry(f"{owner}/{adapter.name}", owner, adapter, live[adapter.base_model])
                for owner, adapter in lent
                if adapter.base_model in live
            ]
        return [entry for entry in entries if principal.models is None or entry.id in principal.models]

    async def _found(
        self, principal: Principal, name: str, conversation: str | None
    ) -> tuple[ResolvedModel, Served | None]:
        """As `_find`, and told in the request's line of the log."""
        found, adapter = await self._find(principal, name, conversation)
        structlog.contextvars.bind_contextvars(model=found.base if found.label is None else found.label)
        return found, adapter

    async def _find(
        self, principal: Principal, name: str, conversation: str | None
    ) -> tuple[ResolvedModel, Served | None]:
        """What the name stands for, and the adapter if it is one. Raises ApiError as resolve does."""
        is_base = name in self._live.now.cards
        _require_allowed(principal, name if is_base else without_version(name))
        if is_base:
            self._card(name)
            return ResolvedModel(base=name, digest=None, adapter=None, version=None), None
        if not self.complete or not self._live.now.cards:
            raise unavailable("The model is being loaded.", retry_after=2)
        adapter = await self._adapter(principal, name, conversation)
        if adapter is None:
            raise model_not_found(name)
        self._card(adapter.base_model)
        lent = adapter.tenant_id != principal.tenant_id
        resolved = ResolvedModel(
            base=adapter.base_model,
            digest=adapter.digest,
            adapter=without_version(name),
            version=adapter.version,
            # A tenant's id has no slash: nobody's own namespace, the owner's included, is ever equal to this.
            shared_prefixes=f"{adapter.tenant_id}/shared" if lent and adapter.share_prefix else None,
        )
        return resolved, adapter

    async def _adapter(self, principal: Principal, name: str, conversation: str | None) -> Served | None:
        wanted = parse_adapter_name(name)
        if wanted is None or principal.tenant_id is None:
            return None
        async with self._database.transaction() as session:
            version = wanted.version
            if wanted.alias is not None:
                alias = await repository.alias(session, principal.tenant_id, wanted)
                if alias is None:
                    return None
                sticky = conversation if conversation is not None else ""
                version = choose(alias.split, f"{alias.adapter_id}@{wanted.alias}", sticky)
            return await repository.served(session, principal.tenant_id, wanted, version)

    def _card(self, base: str) -> ModelCard:
        """The base model's card. Raises ApiError 503 while no worker can serve it."""
        card = self._live.now.cards.get(base)
        if card is None or not self._live.now.serving(base):
            raise unavailable(f"No worker is ready to serve `{base}` just now.", retry_after=2)
        return card


def _require_allowed(principal: Principal, name: str) -> None:
    """By the name alone, whether or not there is such a model."""
    if principal.models is not None and name not in principal.models:
        raise ApiError(
            403,
            f"This API key may not call the model `{shortened(name)}`.",
            type="permission_error",
            param="model",
            code="model_not_allowed",
        )


def _own_name(principal: Principal) -> str:
    assert principal.tenant_id is not None
    return principal.tenant_name if principal.tenant_name is not None else principal.tenant_id


def _base_entry(card: ModelCard) -> ModelEntry:
    return ModelEntry(
        id=card.name, created=card.created, owned_by="polygraft", parent=None, max_model_len=card.max_model_len
    )


def _adapter_entry(name: str, owner: str, adapter: Served, card: ModelCard) -> ModelEntry:
    return ModelEntry(
        id=name,
        created=int(adapter.created_at.timestamp()),
        owned_by=owner,
        parent=adapter.base_model,
        max_model_len=card.max_model_len,
    )
