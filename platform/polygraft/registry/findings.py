"""What validation found, as it is stored and told."""

from __future__ import annotations

from collections.abc import Sequence

from polygraft.db import AdapterVersion
from polygraft.errors import ApiError
from polygraft_adapters.types import AdapterInfo, Problem


def storable(text: str) -> str:
    """`text` without what PostgreSQL or JSON cannot hold: NUL characters and halves of surrogate pairs."""
    return text.encode("utf-8", "replace").decode().replace("\0", "�")


def problem_objects(problems: Sequence[Problem]) -> list[dict[str, str]]:
    """`errors` of the API: where, as tensor or field, what, and what to do about it."""
    return [
        {
            problem.kind: storable(problem.where),
            "problem": storable(problem.problem),
            "hint": storable(problem.hint),
        }
        for problem in problems
    ]


def problems_of(version: AdapterVersion) -> list[Problem]:
    """What `problem_objects` stored with a version."""
    stored = [] if version.errors is None else version.errors
    return [
        Problem(error["tensor"], error["problem"], error["hint"], "tensor")
        if "tensor" in error
        else Problem(error["field"], error["problem"], error["hint"])
        for error in stored
    ]


def fill(version: AdapterVersion, info: AdapterInfo) -> None:
    """Make a version ready with what is known of its contents."""
    version.status, version.status_reason, version.errors, version.lease_until = "ready", None, None, None
    version.digest = info.digest
    version.rank, version.scale = info.rank, info.scale
    version.target_modules = list(info.targets)
    version.size_bytes = info.size_bytes
    version.warnings = [storable(warning) for warning in info.warnings]


def invalid_adapter(problems: Sequence[Problem]) -> ApiError:
    """422 with all that is wrong; the message tells the first."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ApiError(
        422,
        f"The adapter cannot be served: {storable(str(problems[0]))}{more}.",
        code="invalid_adapter",
        errors=problem_objects(problems),
    )
