"""How the tests of these routes call, and what they read of a refusal."""

from pathlib import Path

import httpx
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from polygraft.blobs import BlobError
from polygraft.tenancy.principal import Principal

PREFIX = "/v1/adapters"
LIST = f"http://localhost{PREFIX}"


class Folders:
    """Adapters' folders by digest."""

    def __init__(self) -> None:
        self.known: dict[str, Path] = {}
        self.failure: BlobError | None = None

    def verified_adapter(self, digest: str) -> Path:
        if self.failure is not None:
            raise self.failure
        return self.known[digest]


def as_tenant(app: ASGIApp, principals: dict[str, Principal]) -> ASGIApp:
    """The key is the tenant's name."""

    async def authenticated(scope: Scope, receive: Receive, send: Send) -> None:
        key = dict(scope["headers"])[b"authorization"].decode()
        scope.setdefault("state", {}).update(principal=principals[key], request_id="req_7")
        await app(scope, receive, send)

    return authenticated


def client(app: FastAPI, principals: dict[str, Principal], tenant: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(as_tenant(app, principals), client=("10.0.0.9", 1))
    return httpx.AsyncClient(transport=transport, base_url=LIST, headers={"Authorization": tenant})


def error(answer: httpx.Response) -> tuple[int, str | None, str | None]:
    found = answer.json()["error"]
    assert found["message"]
    return answer.status_code, found["code"], found["param"]
