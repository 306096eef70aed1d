"""Every refusal in OpenAI's shape."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from polygraft.errors import unavailable
from polygraft.openai.errors import install_error_handlers

from .fakes import error_of


class Limits(BaseModel):
    """What a route of another room may take."""

    max: int


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """An app whose routes fail."""
    app = FastAPI()
    install_error_handlers(app)

    @app.get("/overloaded")
    async def overloaded() -> None:
        raise unavailable("Too much.", retry_after=7)

    @app.post("/limits")
    async def limits(limits: list[Limits], since: int = 0) -> None:
        return None

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client


async def test_errors_keep_status_and_headers(client: httpx.AsyncClient) -> None:
    answer = await client.get("/overloaded")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "7"
    assert error_of(answer.content) == {
        "message": "Too much.",
        "type": "service_unavailable_error",
        "param": None,
        "code": "overloaded",
    }


async def test_validation_is_400_and_names_the_field(client: httpx.AsyncClient) -> None:
    answer = await client.post("/limits", json=[{"max": 1}, {"max": "x"}])
    assert answer.status_code == 400
    error = error_of(answer.content)
    assert error["param"] == "[1].max"
    answer = await client.post("/limits?since=x", json=[])
    assert error_of(answer.content)["param"] == "since"
    answer = await client.post("/limits", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400
