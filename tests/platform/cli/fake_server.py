"""A server that remembers what it was asked and answers as the API says, for commands that are run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

Answer = Callable[[httpx.Request], httpx.Response]


def refused(status: int, message: str, code: str | None = None, **extra: Any) -> httpx.Response:
    """An error as the API words it."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code, **extra}
    return httpx.Response(status, json={"error": error})


def adapter(name: str = "voice", version: int = 1, status: str = "ready", **fields: Any) -> dict[str, Any]:
    """An adapter object."""
    ready = status == "ready"
    return {
        "id": f"adp_{name}",
        "object": "adapter",
        "name": name,
        "version": version,
        "digest": "sha256:0123" if ready else None,
        "status": status,
        "status_reason": None,
        "base_model": "base",
        "rank": 8 if ready else None,
        "scale": 2.0 if ready else None,
        "target_modules": ["q_proj", "v_proj"],
        "size_bytes": 1_500_000,
        "created_at": 1_700_000_000,
        "owned_by": "acme",
        "aliases": {},
        "latest": None,
        "warnings": [],
        **fields,
    }


def streamed(content: bytes) -> Answer:
    """A body that is read piece by piece."""
    return lambda request: httpx.Response(200, stream=httpx.ByteStream(content))


@dataclass
class FakeServer:
    """Routes are answers by method and path; a list of answers is given one after the other, the last for ever."""

    key: str = "pg-key"
    routes: dict[str, list[Answer | httpx.Response | Exception]] = field(default_factory=dict)
    asked: list[httpx.Request] = field(default_factory=list)

    def on(self, route: str, *answers: Answer | httpx.Response | Exception | dict[str, Any]) -> None:
        """Answer `GET /path`; a dict is a 200."""
        self.routes[route] = [
            httpx.Response(200, json=answer) if isinstance(answer, dict) else answer for answer in answers
        ]

    def on_list(self, route: str, *found: dict[str, Any]) -> None:
        """Answer with pages of what was found, however small the client wants them."""

        def page(request: httpx.Request) -> httpx.Response:
            ids = [one["id"] for one in found]
            after = request.url.params.get("after")
            start = 0 if after is None else ids.index(after) + 1
            limit = int(request.url.params["limit"])
            data = found[start : start + limit]
            more = start + limit < len(found)
            body = {"object": "list", "data": data, "has_more": more, "last_id": data[-1]["id"] if data else None}
            return httpx.Response(200, json=body)

        self.routes[route] = [page]

    def bodies(self, route: str) -> list[Any]:
        """The JSON that was sent there."""
        return [json.loads(request.content) for request in self.asked if _route(request) == route]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        if request.headers.get("authorization") != f"Bearer {self.key}":
            return refused(401, "Incorrect API key provided.", "invalid_api_key")
        answers = self.routes.get(_route(request))
        if answers is None:
            return refused(404, f"There is no route {_route(request)}.", "not_found")
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer(request) if callable(answer) else answer


@dataclass
class FakeUpload:
    """A resumable upload. Whole requests can be cut off after some bytes, or refused before any."""

    server: FakeServer
    root: str = "/v1/adapters"
    received: bytearray = field(default_factory=bytearray)
    cut_after: list[int | httpx.Response | None] = field(default_factory=list)
    """For one PATCH after the other: where the connection breaks; None: it does not; or the refusal."""
    announced: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.server.on(f"POST {self.root}/uploads", self._begin)
        self.server.on(f"GET {self.root}/uploads/upl_1", self._show)
        self.server.on(f"PATCH {self.root}/uploads/upl_1", self._patch)
        self.server.on(f"POST {self.root}/uploads/upl_1/complete", self._complete)

    def _object(self) -> dict[str, Any]:
        return {"id": "upl_1", "object": "upload", "received_bytes": len(self.received), **self.announced}

    def _begin(self, request: httpx.Request) -> httpx.Response:
        self.announced = json.loads(request.content)
        return httpx.Response(201, json=self._object())

    def _show(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=self._object())

    def _patch(self, request: httpx.Request) -> httpx.Response:
        fate = self.cut_after.pop(0) if self.cut_after else None
        if isinstance(fate, httpx.Response):
            return fate
        span, _, total = request.headers["content-range"].removeprefix("bytes ").partition("/")
        start, stop = (int(part) for part in span.split("-"))
        assert int(total) == self.announced["size_bytes"]
        if start != len(self.received):
            return refused(409, f"The upload has {len(self.received)} bytes.", "upload_offset")
        assert len(request.content) == stop + 1 - start
        self.received += request.content[:fate]
        if fate is not None:
            raise httpx.WriteError("Broken pipe", request=request)
        return httpx.Response(200, json=self._object())

    def _complete(self, request: httpx.Request) -> httpx.Response:
        if len(self.received) != self.announced["size_bytes"]:
            return refused(409, "The upload is not complete.", "upload_incomplete")
        return httpx.Response(201, json=adapter(self.announced["name"]))


def _route(request: httpx.Request) -> str:
    return f"{request.method} {request.url.raw_path.decode().partition('?')[0]}"
