"""The routes of adapters: for a tenant its own, for operators those of the tenant that the path names."""

# No `from __future__ import annotations` here: FastAPI must see the dependency that build_router is given.

import asyncio
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Annotated, Protocol

import structlog
from fastapi import APIRouter, Body, Depends, Path
from starlette.requests import Request
from starlette.responses import StreamingResponse

from polygraft.blobs import BlobError, BlobUnavailable
from polygraft.errors import ApiError, unavailable
from polygraft.pages import DEFAULT_LIMIT, ERRORS, After, Limit, Page, page
from polygraft.registry.adapters import Adapters
from polygraft.registry.archive import tar_gz
from polygraft.registry.lending import Aliases, Shares
from polygraft.registry.schemas import (
    LARGEST_VERSION,
    AdapterObject,
    AliasBody,
    AliasObject,
    DeletedAdapter,
    DeletedAlias,
    DeletedShare,
    RollbackBody,
    ShareBody,
    ShareObject,
    VersionObject,
)
from polygraft.registry.turns import Turns
from polygraft.tenancy.request import Owner, OwnerOf, actor_of

log = structlog.get_logger(__name__)

Version = Annotated[int, Path(ge=1, le=LARGEST_VERSION)]
GZIP = "application/gzip"
CHECKS_AT_ONCE = 2
"""Every byte of an adapter is hashed before it is sent: a thread and a core each, which others want too."""
CHECK_PATIENCE = 10.0
"""Seconds."""


class AdapterBlobs(Protocol):
    """Where contents are kept by digest."""

    def verified_adapter(self, digest: str) -> FilePath:
        """A folder with the adapter's files, every byte checked. Blocks; raises BlobError."""


@dataclass(frozen=True, slots=True)
class AdapterServices:
    """What the routes work with."""

    adapters: Adapters
    aliases: Aliases
    shares: Shares
    blobs: AdapterBlobs
    checks: Turns = field(default_factory=lambda: Turns(CHECKS_AT_ONCE, CHECK_PATIENCE))
    """Of contents that are fetched, by tenants and operators together."""


def build_router(services: AdapterServices, *, prefix: str, owner: OwnerOf) -> APIRouter:
    """The routes below `prefix`, about the adapters of the tenant that `owner` finds."""
    router = APIRouter(prefix=prefix, tags=["adapters"], responses=ERRORS)
    owned = Depends(owner)
    adapters, aliases, shares = services.adapters, services.aliases, services.shares

    @router.get("")
    async def list_adapters(
        owner: Annotated[Owner, owned], limit: Limit = DEFAULT_LIMIT, after: After = None
    ) -> Page[AdapterObject]:
        """All adapters, newest first."""
        return page(await adapters.page(owner, limit + 1, after), limit)

    @router.get("/{name}")
    async def get_adapter(owner: Annotated[Owner, owned], name: str) -> AdapterObject:
        """What the bare name serves, and what is newer."""
        return await adapters.get(owner, name)

    @router.delete("/{name}")
    async def delete_adapter(request: Request, owner: Annotated[Owner, owned], name: str) -> DeletedAdapter:
        """Stop serving it. It can be restored."""
        return await adapters.delete(owner, actor_of(request), name)

    @router.post("/{name}/restore")
    async def restore_adapter(request: Request, owner: Annotated[Owner, owned], name: str) -> AdapterObject:
        """Serve a deleted adapter again."""
        return await adapters.restore(owner, actor_of(request), name)

    @router.post("/{name}/rollback")
    async def roll_back(
        request: Request, owner: Annotated[Owner, owned], name: str, body: RollbackBody
    ) -> AdapterObject:
        """Have the bare name serve another version, an older or a newer one."""
        return await adapters.rollback(owner, actor_of(request), name, body.version)

    @router.get("/{name}/versions")
    async def list_versions(
        owner: Annotated[Owner, owned], name: str, limit: Limit = DEFAULT_LIMIT, after: After = None
    ) -> Page[VersionObject]:
        """All versions, newest first."""
        return page(await adapters.versions(owner, name, limit + 1, after), limit)

    @router.get("/{name}/versions/{version}")
    async def get_version(owner: Annotated[Owner, owned], name: str, version: Version) -> VersionObject:
        """One version, ready or not."""
        return await adapters.version(owner, name, version)

    @router.get(
        "/{name}/versions/{version}/content",
        response_class=StreamingResponse,
        responses={200: {"content": {GZIP: {"schema": {"type": "string", "format": "binary"}}}}},
    )
    async def get_content(owner: Annotated[Owner, owned], name: str, version: Version) -> StreamingResponse:
        """The version's configuration and weights as a .tar.gz."""
        digest = await adapters.digest(owner, name, version)
        try:
            async with services.checks.one("fetch adapters"):
                folder = await asyncio.to_thread(services.blobs.verified_adapter, digest)
            packed = await asyncio.to_thread(tar_gz, folder)
        except (BlobUnavailable, OSError) as error:
            log.error("adapter_content_not_read", digest=digest, error=str(error))
            raise unavailable(
                f"The contents of `{name}@v{version}` cannot be read just now.", code="dependency_unavailable"
            ) from None
        except BlobError as error:
            log.error("adapter_content_damaged", digest=digest, error=str(error))
            raise ApiError(
                422,
                f"The files of `{name}@v{version}` are missing or damaged where they are stored. Upload it again.",
                code="invalid_adapter",
            ) from None
        headers = {
            "Content-Disposition": f'attachment; filename="{name}-v{version}.tar.gz"',
            "ETag": f'"{digest}"',
        }
        return StreamingResponse(packed, media_type=GZIP, headers=headers)

    @router.put("/{name}/aliases/{alias}")
    async def set_alias(
        request: Request, owner: Annotated[Owner, owned], name: str, alias: str, body: AliasBody
    ) -> AliasObject:
        """Have `name@alias` be one version, or for each conversation one of several."""
        return await aliases.set(owner, actor_of(request), name, alias, body)

    @router.delete("/{name}/aliases/{alias}")
    async def remove_alias(request: Request, owner: Annotated[Owner, owned], name: str, alias: str) -> DeletedAlias:
        """Take an alias away."""
        return await aliases.remove(owner, actor_of(request), name, alias)

    @router.put("/{name}/shares/{borrower}")
    async def lend_adapter(
        request: Request,
        owner: Annotated[Owner, owned],
        name: str,
        borrower: Annotated[str, Path(description="The other tenant's id or name.")],
        body: Annotated[ShareBody | None, Body()] = None,
    ) -> ShareObject:
        """Let another tenant call the adapter, as `owner/name`."""
        share_prefix = None if body is None else body.share_prefix
        return await shares.lend(owner, actor_of(request), name, borrower, share_prefix)

    @router.delete("/{name}/shares/{borrower}")
    async def take_adapter_back(
        request: Request, owner: Annotated[Owner, owned], name: str, borrower: str
    ) -> DeletedShare:
        """Let the other tenant call it no longer."""
        return await shares.take_back(owner, actor_of(request), name, borrower)

    return router
