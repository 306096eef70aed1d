"""Why a key is turned away."""

from __future__ import annotations

from polygraft.errors import ApiError
from polygraft.queue.messages import Refusal


def invalid_api_key() -> ApiError:
    """401, in the same words for unknown, revoked and expired keys; the key itself is never repeated."""
    return ApiError(401, "Incorrect API key provided.", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def tenant_disabled() -> ApiError:
    """403: the key is good, but its tenant may not call for now."""
    return ApiError(403, "This tenant is disabled.", type="permission_error", code="tenant_disabled")


def refusal(code: Refusal) -> ApiError:
    """The error of that code."""
    return tenant_disabled() if code == "tenant_disabled" else invalid_api_key()
