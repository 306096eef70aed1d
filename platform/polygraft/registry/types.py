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
    version: int | None

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

    async def resolve(self, principal: Principal, name: str) -> ResolvedModel:
        """Base names first, then the tenant's adapters.

        Raises ApiError 404 model_not_found, or 503 while no model is ready.
        """

    async def list_models(self, principal: Principal) -> list[ModelEntry]:
        """The base models with a live worker, then the tenant's ready adapters."""
