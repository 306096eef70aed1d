"""Every refusal as OpenAI's error body."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from polygraft.errors import ApiError, bad_request, no_route, shortened
from polygraft.respond import respond

_PLACES = frozenset({"body", "query", "path", "header", "cookie"})
_NAMED = re.compile(r"`(\w+)`")
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
_UNREADABLE: tuple[tuple[type[Exception], str], ...] = (
    (UnicodeDecodeError, "it is not in UTF-8"),
    (RecursionError, "it is nested too deeply"),
    (ValueError, "it holds a number of too many digits"),
)
"""What reading JSON raises for bytes that are none, apart from the decoder's own complaint."""
_COUNT = re.compile(r" after validation, not \d+$")
_SUBJECT = re.compile(r"^(?:Input|List|String|Dictionary|Value) should ")


def not_json(why: str) -> ApiError:
    """400: the body cannot be decoded, so that no field of it can be named."""
    return bad_request(f"The body is not valid JSON: {why}.")


def not_announced() -> ApiError:
    """400: the headers do not say that the body is JSON."""
    return bad_request("The header Content-Type must be application/json.")


def explain(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """400 from pydantic's `errors`: the first one, told of the field as the client wrote it (`messages[0].role`)."""
    first = errors[0]
    param = ""
    for part in first["loc"]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif param or part not in _PLACES:
            param += f".{part}" if param else str(part)
    if first["type"] == "missing":
        problem = "is required"
    elif first["type"] in ("model_type", "model_attributes_type", "dict_type"):
        problem = "must be a JSON object"
    elif first["type"] == "value_error":
        problem = str(first["ctx"]["error"])
    else:
        problem = _COUNT.sub("", _SUBJECT.sub("must ", first["msg"]))
    if param:
        return bad_request(f"`{param}` {problem}.", param=param)
    if named := _NAMED.match(problem):
        return bad_request(f"{problem}.", param=named[1])
    return bad_request(f"The body {problem}.")


def _api_error(_: Request, error: Exception) -> ApiError:
    assert isinstance(error, ApiError)
    return error


def _invalid(_: Request, error: Exception) -> ApiError:
    assert isinstance(error, RequestValidationError)
    broken = error.__cause__
    if isinstance(broken, json.JSONDecodeError):
        what = f"{broken.msg[:1].lower()}{broken.msg[1:]}"
        return not_json(f"{what} at line {broken.lineno} column {broken.colno}")
    if isinstance(error.body, bytes) and error.errors()[0]["loc"] == ("body",):
        # FastAPI leaves a body of another type as it is.
        return not_announced()
    return explain(error.errors())


def _http_error(request: Request, error: Exception) -> ApiError:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 404:
        answer = no_route(request.method, path)
    elif error.status_code == 405:
        return _wrong_method(request)
    elif error.status_code == 400 and error.__cause__ is not None:
        answer = _unreadable(error.__cause__)
    else:
        answer = ApiError(error.status_code, str(error.detail), code="too_large" if error.status_code == 413 else None)
    if error.headers is not None:
        answer.headers.update(error.headers)
    return answer


def _wrong_method(request: Request) -> ApiError:
    """405 with every method that the path takes; the router's own answer knows those of its first route only."""
    routes, scope = request.app.routes, request.scope
    taken = [
        method
        for method in _METHODS
        if any(route.matches({**scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    return ApiError(
        405,
        f"There is no {request.method} {shortened(scope['path'])}; the path takes {', '.join(taken)}.",
        code="method_not_allowed",
        headers={"Allow": ", ".join(taken)},
    )


def _unreadable(error: BaseException) -> ApiError:
    """400 for a body that FastAPI could not read."""
    return not_json(next((why for kind, why in _UNREADABLE if isinstance(error, kind)), "it cannot be read"))


def install_error_handlers(app: FastAPI, refused: Callable[[ApiError], None] = lambda _: None) -> None:
    """Have `app` answer every refusal in OpenAI's shape, and tell `refused` of it. What nobody foresaw is the request
    log's to answer.
    """

    def answering(
        read: Callable[[Request, Exception], ApiError],
    ) -> Callable[[Request, Exception], Awaitable[Response]]:
        async def answer(request: Request, error: Exception) -> Response:
            refusal = read(request, error)
            refused(refusal)
            return respond(refusal)

        return answer

    app.add_exception_handler(ApiError, answering(_api_error))
    app.add_exception_handler(RequestValidationError, answering(_invalid))
    app.add_exception_handler(HTTPException, answering(_http_error))
