"""One server per data folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polygraft.errors import ConfigError


class InUseError(ConfigError):
    """Another process holds the lock."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the kernel lets go of it when the process is gone, however it ends. Raises InUseError, or
    ConfigError for a folder that cannot be used.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise ConfigError(f"the data folder {path.parent} cannot be used: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise InUseError(
                f"the data folder {path.parent} is in use by process {file.read().strip()}; "
                "stop that server or choose another folder with --data-dir"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
