"""An error as an HTTP answer. Apart from `errors`, which processes without HTTP import too."""

from __future__ import annotations

from starlette.responses import JSONResponse

from polygraft.errors import ApiError


def respond(error: ApiError) -> JSONResponse:
    """Its status, headers and body."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)
