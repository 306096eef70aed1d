"""Paths that a request names: only those below the folders that the operator has set aside for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polygraft.errors import ApiError


def adapter_roots(folders: Sequence[str]) -> tuple[Path, ...]:
    """The --adapter-root folders with `~` and links resolved."""
    return tuple(Path(folder).expanduser().resolve() for folder in folders)


def below_roots(path: str, roots: Sequence[Path], *, param: str) -> Path:
    """`path`, absolute or relative to a root, with every link resolved.

    Raises ApiError 403: in the same words for what does not exist and what lies elsewhere, so that nobody learns which
    files there are; in others when there is no root at all.
    """
    if not roots:
        raise ApiError(
            403,
            "Runtime loading is off; start the server with --adapter-root DIR.",
            type="permission_error",
            param=param,
            code="runtime_loading_off",
        )
    for root in roots:
        found = _resolved(root, path)
        if found is not None and found.is_relative_to(root):
            return found
    raise ApiError(
        403,
        f"`{param}` names nothing below the folders that were given as --adapter-root.",
        type="permission_error",
        param=param,
        code="path_not_allowed",
    )


def _resolved(root: Path, path: str) -> Path | None:
    """None for what does not exist, and for what the system cannot take for a path."""
    try:
        return (root / path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        return None
