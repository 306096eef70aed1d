"""API keys: how they look and how they are stored."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import string
from pathlib import Path

from polygraft.errors import ConfigError

_BASE62 = string.digits + string.ascii_letters
KEY_CHARACTERS = 40
"""238 bits: no key can be guessed, so a fast keyed hash is enough to store it."""
PREFIX_CHARACTERS = 8
"""How much of a key a listing may show beyond the kind."""
ENVIRONMENT = "environment"
"""The name of the key that a start is given, which the next start may replace; no other key may have it."""


def new_key(*, admin: bool = False) -> str:
    """A random key: `pg-` or `pg-admin-`, then 40 base62 characters."""
    return ("pg-admin-" if admin else "pg-") + "".join(secrets.choice(_BASE62) for _ in range(KEY_CHARACTERS))


def shown_prefix(key: str) -> str:
    """The first characters of a key, never more than a quarter of it."""
    return key[: min(PREFIX_CHARACTERS, len(key) // 4)]


class KeyHasher:
    """HMAC-SHA256 under the server's pepper: a stolen database alone does not let anybody test keys."""

    def __init__(self, pepper: bytes) -> None:
        self._pepper = pepper

    def digest(self, key: str) -> str:
        """What is stored of `key`: 64 hex digits."""
        return hmac.new(self._pepper, key.encode(), hashlib.sha256).hexdigest()

    @staticmethod
    def same(stored: str, computed: str) -> bool:
        """Compare two digests in constant time."""
        return hmac.compare_digest(stored, computed)


def load_pepper(path: Path) -> bytes:
    """The pepper in `path`, made on first use with mode 0600. Raises ConfigError for a file that holds none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pepper = path.read_bytes()
    else:
        pepper = secrets.token_bytes(32)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pepper)
            file.flush()
            os.fsync(file.fileno())
    if len(pepper) != 32:
        raise ConfigError(f"{path} should hold the 32 bytes under which keys are hashed, but has {len(pepper)}")
    return pepper
