"""What the routes of uploads and imports take and answer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from polygraft.db import Upload
from polygraft.registry.schemas import Body, unix

Name = Annotated[str, Field(description="The adapter's name.")]
BaseModelName = Annotated[
    str | None, Field(max_length=255, description="The served base model; may be left out where there is only one.")
]


class UploadBody(Body):
    """POST …/uploads: what is going to be sent."""

    name: Name
    filename: Annotated[str, Field(max_length=255, description="Ends in .zip or .tar.gz.")]
    size_bytes: Annotated[int, Field(ge=1, le=2**62)]
    base_model: BaseModelName = None


class CompleteBody(Body):
    """POST …/complete; may be left out."""

    sha256: Annotated[str | None, Field(pattern="^[0-9a-fA-F]{64}$", description="Of all bytes, in hex.")] = None


class ImportBody(Body):
    """POST …/import: where the server finds the adapter."""

    name: Name
    source: Annotated[str, Field(max_length=2000, description="hf://org/repo@rev, s3://bucket/prefix or file:///path.")]
    base_model: BaseModelName = None


class UploadObject(BaseModel):
    """A resumable upload and how far it got."""

    id: str
    object: Literal["adapter.upload"] = "adapter.upload"
    name: str
    """The adapter's."""
    filename: str
    size_bytes: int
    received_bytes: int
    base_model: str | None
    created_at: int
    expires_at: int


def upload_object(upload: Upload, received: int) -> UploadObject:
    """The upload as its owner sees it."""
    return UploadObject(
        id=upload.id,
        name=upload.name,
        filename=upload.filename,
        size_bytes=upload.size_bytes,
        received_bytes=received,
        base_model=upload.base_model,
        created_at=unix(upload.created_at),
        expires_at=unix(upload.expires_at),
    )


class DeletedUpload(BaseModel):
    """An upload that was given up."""

    id: str
    object: Literal["adapter.upload.deleted"] = "adapter.upload.deleted"
    deleted: Literal[True] = True
