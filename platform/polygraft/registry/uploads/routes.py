"""The routes by which adapters come in: for a tenant its own, for operators those of the tenant that the path names."""

# No `from __future__ import annotations` here: FastAPI must see the dependency that build_router is given.

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Response
from pydantic import BaseModel
from starlette.requests import Request

from polygraft.openai.body import read_body
from polygraft.pages import ERRORS
from polygraft.registry.schemas import AdapterObject
from polygraft.registry.uploads.resumable import parse_range
from polygraft.registry.uploads.schemas import CompleteBody, DeletedUpload, ImportBody, UploadBody, UploadObject
from polygraft.registry.uploads.service import Answer, Uploads
from polygraft.tenancy.request import Owner, OwnerOf, actor_of

_BINARY = {"type": "string", "format": "binary"}
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "description": "The adapter's name."},
                        "base_model": {"type": "string", "description": "The served base model, if there are several."},
                        "file": _BINARY | {"description": "A .zip or .tar.gz of the folder that PEFT saved."},
                        "config": _BINARY | {"description": "adapter_config.json"},
                        "weights": _BINARY | {"description": "adapter_model.safetensors"},
                        "sha256": {
                            "type": "string",
                            "description": "Of `file` or `weights`, in hex; checked if given.",
                        },
                    },
                    "required": ["name"],
                    "oneOf": [{"required": ["file"]}, {"required": ["config", "weights"]}],
                    "additionalProperties": False,
                }
            }
        },
    }
}
_RAW = {"requestBody": {"required": True, "content": {"application/octet-stream": {"schema": _BINARY}}}}
_REGISTERED: dict[int | str, dict[str, Any]] = {
    200: {"model": AdapterObject, "description": "The tenant has these contents under this name already"},
    201: {"model": AdapterObject, "description": "A new version: ready, or still being validated"},
}


def _json(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """The body as /openapi.json describes it; it is read by `read_body`, which bounds it."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": required, "content": content}}


def build_router(uploads: Uploads, *, prefix: str, owner: OwnerOf) -> APIRouter:
    """The routes below `prefix`, for the adapters of the tenant that `owner` finds."""
    router = APIRouter(prefix=prefix, tags=["adapters"], responses=ERRORS)
    owned = Depends(owner)

    def registered(answer: Answer, response: Response) -> AdapterObject:
        response.status_code = 201 if answer.created else 200
        return answer.adapter

    @router.post("", status_code=201, responses=_REGISTERED, openapi_extra=_FORM)
    async def upload_adapter(request: Request, response: Response, owner: Annotated[Owner, owned]) -> AdapterObject:
        """Register an adapter: an archive, or the two files. Waits a while for its validation."""
        return registered(await uploads.receive(owner, actor_of(request), request), response)

    @router.post("/import", status_code=202, openapi_extra=_json(ImportBody))
    async def import_adapter(request: Request, owner: Annotated[Owner, owned]) -> AdapterObject:
        """Have the server fetch an adapter from a place that its operator allows. The adapter tells how it went."""
        return await uploads.fetch(owner, actor_of(request), await read_body(request, ImportBody))

    @router.post("/uploads", status_code=201, openapi_extra=_json(UploadBody))
    async def create_upload(request: Request, owner: Annotated[Owner, owned]) -> UploadObject:
        """Announce an archive that is going to be sent in pieces, within a day."""
        return await uploads.open(owner, await read_body(request, UploadBody))

    @router.get("/uploads/{upload}")
    async def get_upload(owner: Annotated[Owner, owned], upload: str) -> UploadObject:
        """How far an upload got."""
        return await uploads.progress(owner, upload)

    @router.patch("/uploads/{upload}", openapi_extra=_RAW)
    async def append_to_upload(
        request: Request,
        owner: Annotated[Owner, owned],
        upload: str,
        content_range: Annotated[str, Header(max_length=100, description="`bytes 0-1048575/4000000`")],
    ) -> UploadObject:
        """Send the next piece. 409 tells where it has to begin, if not there."""
        return await uploads.append(owner, upload, parse_range(content_range), request)

    @router.post(
        "/uploads/{upload}/complete",
        status_code=201,
        responses=_REGISTERED,
        openapi_extra=_json(CompleteBody, required=False),
    )
    async def complete_upload(
        request: Request, response: Response, owner: Annotated[Owner, owned], upload: str
    ) -> AdapterObject:
        """Register what was sent, like an upload in one piece. Told again to whoever asks again within the day."""
        empty = "transfer-encoding" not in request.headers and request.headers.get("content-length", "0") == "0"
        body = CompleteBody() if empty else await read_body(request, CompleteBody)
        return registered(await uploads.complete(owner, actor_of(request), upload, body.sha256), response)

    @router.delete("/uploads/{upload}")
    async def delete_upload(owner: Annotated[Owner, owned], upload: str) -> DeletedUpload:
        """Give an upload up."""
        return await uploads.delete(owner, upload)

    return router
