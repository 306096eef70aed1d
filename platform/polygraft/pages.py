"""Listings by cursor, and errors, as /openapi.json describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

from fastapi import Query
from pydantic import BaseModel


class _Identified(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T")
Listed = TypeVar("Listed", bound=_Identified)

Limit = Annotated[int, Query(ge=1, le=100, description="Most objects in one page.")]
After = Annotated[str | None, Query(max_length=128, description="The id after which the page begins: `last_id`.")]
DEFAULT_LIMIT = 20


class Page(BaseModel, Generic[T]):
    """Some objects, newest first unless the route says otherwise, and whether there are more."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool
    first_id: str | None
    last_id: str | None


def page(found: Sequence[Listed], limit: int) -> Page[Listed]:
    """The first `limit` of what was found; ask the database for one more than that."""
    data = list(found[:limit])
    return Page(
        data=data,
        has_more=len(found) > limit,
        first_id=data[0].id if data else None,
        last_id=data[-1].id if data else None,
    )


class ErrorDetail(BaseModel):
    """What went wrong, as OpenAI's API words it."""

    message: str
    type: str
    param: str | None
    code: str | None
    errors: list[dict[str, str]] | None = None


class ErrorBody(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "Refused"},
    "5XX": {"model": ErrorBody, "description": "Failed"},
}
"""For `responses=` of a router."""
