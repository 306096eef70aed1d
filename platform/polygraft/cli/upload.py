"""Sending an archive so that a broken connection costs one piece of it at most."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from polygraft.cli.archive import Archive
from polygraft.cli.remote import Json, Remote, RemoteError, path_of
from polygraft.errors import ConfigError

PIECE = 8 << 20
"""Bytes of one request."""
ATTEMPTS = 8
"""Tries in a row without any progress, over about two minutes, before it is given up."""
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
IN_USE = "upload_in_use"
"""The server has not noticed yet that a connection broke."""

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Sender:
    """Uploads of one archive under one adapter's name, below `root` (the tenant's routes, or an operator's)."""

    remote: Remote
    root: str
    archive: Archive

    def begin(self, name: str, base_model: str | None) -> str:
        """Announce an upload; its id. Raises RemoteError."""
        body: Json = {"name": name, "filename": self.archive.filename, "size_bytes": self.archive.size}
        if base_model is not None:
            body["base_model"] = base_model
        return str(self.remote.call("POST", f"{self.root}/uploads", json=body)["id"])

    def resume(self, upload: str, name: str) -> None:
        """See that `upload` is one of this archive. Raises ConfigError, RemoteError."""
        found = self.remote.call("GET", self._path(upload))
        announced = (found["name"], found["filename"], found["size_bytes"])
        if announced != (name, self.archive.filename, self.archive.size):
            raise ConfigError(
                f"upload {upload} is of {announced[1]} with {announced[2]} bytes for {announced[0]}, "
                f"not of {self.archive.filename} with {self.archive.size} for {name}"
            )

    def send(self, upload: str, progress: Progress) -> None:
        """Send what the server does not have yet; `progress` is told how many bytes it has. Raises RemoteError for
        what trying again does not help, and when nothing got through for a while.
        """
        received = self._received(upload)
        failures = 0
        while received < self.archive.size:
            progress(received)
            before = received
            try:
                received = self._send_piece(upload, received, progress)
            except RemoteError as error:
                # 409: the server has another number of bytes than was thought, or is still busy with the last piece.
                if not (error.passing or error.status == 409):
                    raise
                received, failures = self._recover(upload, before, failures, error)
            else:
                failures = 0
        progress(received)

    def complete(self, upload: str, name: str) -> Json:
        """Have the server check it; the adapter. Raises RemoteError."""
        failures = 0
        unheard = False
        while True:
            try:
                return self.remote.call("POST", f"{self._path(upload)}/complete")
            except RemoteError as error:
                if unheard and error.status == 404:
                    # It went through the first time, and only the answer was lost.
                    return self.remote.call("GET", self.root + path_of(name))
                failures += 1
                if not (error.passing or error.code == IN_USE) or failures == ATTEMPTS:
                    raise
                unheard = unheard or error.status is None
                _pause(failures, error)

    def _send_piece(self, upload: str, start: int, progress: Progress) -> int:
        stop = min(start + PIECE, self.archive.size)

        def pieces() -> Iterator[bytes]:
            sent = start
            for piece in self.archive.read(start, stop):
                yield piece
                sent += len(piece)
                progress(sent)

        headers = {
            "Content-Range": f"bytes {start}-{stop - 1}/{self.archive.size}",
            "Content-Length": str(stop - start),
            "Content-Type": "application/octet-stream",
        }
        answer = self.remote.call("PATCH", self._path(upload), content=pieces(), headers=headers)
        return int(answer["received_bytes"])

    def _recover(self, upload: str, before: int, failures: int, error: RemoteError) -> tuple[int, int]:
        """After a failure: how far the server is, and the failures in a row without progress."""
        while True:
            failures += 1
            if failures == ATTEMPTS:
                raise error
            _pause(failures, error)
            try:
                received = self._received(upload)
            except RemoteError as again:
                if not again.passing:
                    raise
                error = again
            else:
                return received, 0 if received > before else failures

    def _received(self, upload: str) -> int:
        return int(self.remote.call("GET", self._path(upload))["received_bytes"])

    def _path(self, upload: str) -> str:
        return f"{self.root}/uploads{path_of(upload)}"


def _pause(failures: int, error: RemoteError) -> None:
    """Longer each time, by a chance amount: many clients that were cut off together do not come back together."""
    longest = min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** (failures - 1))
    asked = 0.0 if error.retry_after is None else min(error.retry_after, LONGEST_WAIT)
    time.sleep(max(asked, longest * random.uniform(0.5, 1.0)))
