"""The one shape in which errors reach a client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def error_body(message: str, type: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's API words it."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


class PolygraftError(Exception):
    """Base of every error the platform raises."""

    type = "failed"
    """Its kind, as a command tells it under --json."""
    exit_code = 1
    """Of a command that ends with it."""

    def body(self) -> dict[str, Any]:
        """In the shape of the API's errors."""
        return error_body(str(self), self.type)


class ConfigError(PolygraftError):
    """What the operator asked for cannot be run; the message says what to change. Ends the process, no restart
    helps.
    """


class OptionError(ConfigError):
    """An option is missing or its value malformed: wrong usage of the command line, or of the environment that stands
    for it.
    """

    type = "invalid_request_error"
    exit_code = 2


class ApiError(PolygraftError):
    """An answer other than success, as OpenAI's API words it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        errors: list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers) if headers is not None else {}
        self.errors = errors

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        body = error_body(self.message, self.type, param=self.param, code=self.code)
        if self.errors is not None:
            body["error"]["errors"] = self.errors
        return body


CLIENT_LEFT = 499
"""The status of an answer whose client left before its end, in logs and metrics only (nginx's number)."""


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


LONGEST_ECHO = 100


def shortened(text: str) -> str:
    """A client's own words, fit to be told back: not many."""
    return text if len(text) <= LONGEST_ECHO else f"{text[:LONGEST_ECHO]}…"


def model_not_found(model: str) -> ApiError:
    """404, in the same words whether the model does not exist or belongs to somebody else."""
    return ApiError(
        404,
        f"The model `{shortened(model)}` does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


def no_route(method: str, path: str) -> ApiError:
    """404 for a path that nothing answers."""
    return ApiError(404, f"There is no route {method} {shortened(path)}.", code="not_found")


def not_found(what: str, name: str) -> ApiError:
    """404, in the same words whether there is no such `what` or it is somebody else's."""
    return ApiError(404, f"There is no {what} `{shortened(name)}`.", code="not_found")


def unknown_cursor() -> ApiError:
    """400 for a page that is to begin after an id which its list does not have."""
    return bad_request("`after` is no id of this list.", param="after")


def internal_error() -> ApiError:
    """500 without any detail: what went wrong is for the log."""
    return ApiError(500, "internal error", type="server_error")


def unavailable(message: str, *, code: str = "overloaded", retry_after: int = 1) -> ApiError:
    """503: try again in `retry_after` seconds."""
    return ApiError(
        503, message, type="service_unavailable_error", code=code, headers={"Retry-After": str(retry_after)}
    )
