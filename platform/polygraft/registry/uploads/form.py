"""The multipart form of an upload: read as it comes, straight to disk."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from polygraft.errors import ApiError, bad_request, shortened
from polygraft.registry.uploads.body import Body
from polygraft_adapters.config import CONFIG_NAME, MAX_CONFIG_BYTES
from polygraft_adapters.folder import MLX_WEIGHTS_NAME, WEIGHTS_NAME

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

BATCH = 256 * 1024
"""Bytes that are parsed and written at once, off the event loop."""
OVERHEAD = MAX_CONFIG_BYTES + 64 * 1024
"""Bytes that a form may take beside its largest file."""
MAX_TEXT = 1024
MAX_PARTS = 8
_TEXTS = ("name", "base_model", "sha256")
_FILES = ("file", "config", "weights")
_BOUNDARY = re.compile(rb"[ -~]{1,70}")
SHA256 = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Form:
    """What somebody wants registered; the files lie where the reader was told to put them."""

    name: str
    base_model: str | None
    archived: bool
    """Whether one archive came, rather than config and weights."""


class _Part:
    """One part as it comes; `file` is None for the text of a field."""

    def __init__(self, name: str, limit: int, path: Path | None) -> None:
        self.name = name
        self.limit = limit
        self.text = bytearray()
        self.file: IO[bytes] | None = None if path is None else path.open("xb")
        self.hash = hashlib.sha256()
        self.size = 0


class FormReader:
    """Takes in a form piece by piece. Everything here blocks; it runs off the event loop, one call at a time."""

    def __init__(self, boundary: bytes, archive: Path, folder: Path, max_bytes: int) -> None:
        """`archive` is where the part `file` goes, and `folder` where `config` and `weights` do."""
        self._archive = archive
        self._folder = folder
        self._max_bytes = max_bytes
        self._parts: dict[str, _Part] = {}
        self._open: _Part | None = None
        self._headers: dict[bytes, bytes] = {}
        self._field, self._value = bytearray(), bytearray()
        self._ended = False
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open_part,
            "on_part_data": self._take,
            "on_part_end": self._close_part,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)

    def feed(self, data: bytes) -> None:
        """Raises ApiError for anything that is no such form."""
        if not self._ended:
            try:
                self._parser.write(data)
            except FormParserError as error:
                raise bad_request(f"The body is not valid multipart/form-data: {shortened(str(error))}.") from None

    def text(self, name: str) -> str | None:
        """A field, once it has come whole."""
        part = self._parts.get(name)
        if part is None or part is self._open:
            return None
        try:
            return part.text.decode()
        except UnicodeDecodeError:
            raise bad_request(f"`{name}` is not UTF-8.", param=name) from None

    def finish(self) -> Form:
        """Raises ApiError for a form that is cut off, or lacks or contradicts something."""
        if not self._ended:
            raise bad_request("The body ended before the form's last boundary.")
        name = self.text("name")
        if name is None:
            raise bad_request("`name` is required.", param="name")
        files = [part for part in _FILES if part in self._parts]
        if files not in (["file"], ["config", "weights"]):
            raise bad_request("Send either `file` (a .zip or .tar.gz) or both `config` and `weights`.", param="file")
        self._compare(self._parts[files[-1]])
        return Form(name, self.text("base_model"), archived=files == ["file"])

    def close(self) -> None:
        """Let go of the files."""
        for part in self._parts.values():
            if part.file is not None:
                part.file.close()

    def _compare(self, part: _Part) -> None:
        expected = self.text("sha256")
        if expected is None:
            return
        if SHA256.fullmatch(expected) is None:
            raise bad_request("`sha256` must be 64 hex digits.", param="sha256")
        if expected.lower() != part.hash.hexdigest():
            raise bad_request(f"`{part.name}` is not what `sha256` says: it was damaged on its way.", param="sha256")

    def _begin(self) -> None:
        self._headers = {}
        if len(self._parts) >= MAX_PARTS:
            raise bad_request(f"The form has more than {MAX_PARTS} parts.")

    def _end_header(self) -> None:
        self._headers[bytes(self._field).lower()] = bytes(self._value)
        self._field.clear()
        self._value.clear()

    def _open_part(self) -> None:
        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name:
            raise bad_request("Every part needs the header Content-Disposition: form-data with a name.")
        if name not in (*_TEXTS, *_FILES):
            raise bad_request(f"The form has the unknown part `{shortened(name)}`.", param=shortened(name))
        if name in self._parts:
            raise bad_request(f"The form has the part `{name}` twice.", param=name)
        if self._headers.get(b"content-transfer-encoding", b"binary").strip().lower() not in (
            b"binary",
            b"8bit",
            b"7bit",
        ):
            raise bad_request(f"The part `{name}` must not be encoded.", param=name)
        self._open = self._parts[name] = self._part(name, options.get(b"filename", b""))

    def _part(self, name: str, filename: bytes) -> _Part:
        if name in _TEXTS:
            return _Part(name, MAX_TEXT, None)
        if name == "file":
            return _Part(name, self._max_bytes, self._archive)
        self._folder.mkdir(exist_ok=True)
        if name == "config":
            return _Part(name, MAX_CONFIG_BYTES, self._folder / CONFIG_NAME)
        # What MLX writes is told from what PEFT writes by the file's name.
        is_mlx = os.path.basename(filename) == MLX_WEIGHTS_NAME.encode()
        return _Part(name, self._max_bytes, self._folder / (MLX_WEIGHTS_NAME if is_mlx else WEIGHTS_NAME))

    def _take(self, data: bytes, start: int, end: int) -> None:
        part = self._open
        assert part is not None, "data belongs to a part"
        part.size += end - start
        if part.size > part.limit:
            raise _too_long(part)
        piece = memoryview(data)[start:end]
        if part.file is None:
            part.text += piece
        else:
            part.file.write(piece)
            part.hash.update(piece)

    def _close_part(self) -> None:
        assert self._open is not None, "only what was begun ends"
        if self._open.file is not None:
            self._open.file.close()
        self._open = None

    def _end(self) -> None:
        self._ended = True


async def read_form(
    body: Body, content_type: str, archive: Path, folder: Path, max_bytes: int, check_name: Callable[[str], None]
) -> Form:
    """Read the whole form. `check_name` is asked as soon as the name is there, before the files are read to their end.

    Raises ApiError for what the client sent, and what `check_name` raises.
    """
    reader = FormReader(_boundary(content_type), archive, folder, max_bytes)
    checked = False
    batch = bytearray()
    try:
        async for piece in body:
            batch += piece
            if len(batch) < BATCH and checked:
                continue
            await asyncio.to_thread(reader.feed, bytes(batch))
            batch.clear()
            if not checked and (name := reader.text("name")) is not None:
                check_name(name)
                checked = True
        await asyncio.to_thread(reader.feed, bytes(batch))
        form = reader.finish()
        check_name(form.name)
        return form
    finally:
        reader.close()


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or _BOUNDARY.fullmatch(boundary) is None:
        raise bad_request("The header Content-Type must be multipart/form-data with a boundary.")
    return boundary


def _too_long(part: _Part) -> ApiError:
    told = f"`{part.name}` is larger than the {part.limit} bytes that it may have."
    if part.file is None:
        return bad_request(told, param=part.name)
    return ApiError(413, told, param=part.name, code="too_large")
