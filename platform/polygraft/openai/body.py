"""Reading a request's JSON: capped, strict, and never a 5xx for what a client sent."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from polygraft.bodylimit import MAX_BODY
from polygraft.errors import ApiError, bad_request
from polygraft.openai.errors import explain, not_announced, not_json
from polygraft.openai.unsupported import refuse_unsupported

BODY_SILENCE = 30.0
"""Seconds that a body may pause."""

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, model: type[Model]) -> Model:
    """The request's body as `model`; null means absent in every field of the body itself.

    Raises ApiError: 400 for anything that is no such object, 413 past MAX_BODY, 408 for a body that stops half-way.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise not_announced()
    return parse(await _read(request), model)


def parse(raw: bytes, model: type[Model]) -> Model:
    """`raw` as `model`. Raises ApiError 400."""
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise not_json(str(error)) from None
    if isinstance(body, dict):
        body = {name: value for name, value in body.items() if value is not None}
        refuse_unsupported(body)
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise explain(error.errors(include_url=False, include_input=False)) from None


async def _read(request: Request) -> bytes:
    too_large = ApiError(413, f"The body is larger than {MAX_BODY} bytes.", code="too_large")
    # The HTTP parser lets nothing but a number through.
    if int(request.headers.get("content-length", "0")) > MAX_BODY:
        raise too_large
    received = bytearray()
    parts = request.stream()
    try:
        while True:
            async with asyncio.timeout(BODY_SILENCE):
                part = await anext(parts, None)
            if part is None:
                return bytes(received)
            received += part
            if len(received) > MAX_BODY:
                raise too_large
    except ClientDisconnect:
        raise bad_request("The body ended early.") from None
    except TimeoutError:
        # What may still come of this body is not to be taken for the next request.
        raise ApiError(
            408, f"Nothing more of the body came for {BODY_SILENCE:g} seconds.", headers={"Connection": "close"}
        ) from None
