"""What a model name stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from polygraft.tenancy.principal import Principal


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model name, resolved once at admission. From here on only the digest names the adapter."""

    base: str
    digest: str | None
    """The adapter's digest; None is the base model itself."""
    adapter: str | None
    """The adapter's name without a version: `name`, or `owner/name` for another tenant's."""
    version: int | None
    shared_prefixes: str | None = None
    """The namespace of cached prefixes that the adapter's owner lets its callers share; None: the caller's own."""

    @property
    def label(self) -> str | None:
        """`name@v3`, for the response header x-polygraft-adapter."""
        return None if self.adapter is None else f"{self.adapter}@v{self.version}"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A line of GET /v1/models."""

    id: str
    created: int
    owned_by: str
    parent: str | None
    max_model_len: int


class ModelResolver(Protocol):
    """The registry as the OpenAI routes see it."""

    async def resolve(self, principal: Principal, name: str, conversation: str | None = None) -> ResolvedModel:
        """Base names first, then the tenant's adapters, then those lent to it as `owner/adapter`.

        `conversation` is what a weighted split sticks to. Raises ApiError 404 model_not_found, 403 model_not_allowed
        for a name that the key may not call, or 503 while no worker can serve it.
        """

    async def describe(self, principal: Principal, name: str) -> ModelEntry:
        """One model, under the very name that was asked for. Raises ApiError as resolve does."""

    async def list_models(self, principal: Principal) -> list[ModelEntry]:
        """The base models with a live worker, then the tenant's ready adapters, then those lent to it; of each only
        what the key may call.
        """
