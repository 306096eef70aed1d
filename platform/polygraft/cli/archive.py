"""A PEFT folder as the archive that an upload sends: laid out once, then read from any offset, never held or stored."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from polygraft.errors import ConfigError

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapters.safetensors")
"""The file of the weights as PEFT calls it, and as MLX does."""
READ_BYTES = 256 * 1024
ARCHIVES = {".zip": "adapter.zip", ".tar.gz": "adapter.tar.gz", ".tgz": "adapter.tar.gz"}


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the archive: bytes of its own, or `size` bytes of a file."""

    size: int
    source: bytes | Path


@dataclass(frozen=True, slots=True)
class Archive:
    """What is to be sent, byte for byte the same however often it is laid out."""

    filename: str
    """adapter.zip or adapter.tar.gz."""
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return sum(part.size for part in self.parts)

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` up to `stop`, in pieces. Raises ConfigError for a file that became shorter."""
        begin = 0
        for part in self.parts:
            low, high = max(start - begin, 0), min(stop - begin, part.size)
            begin += part.size
            if low < high:
                yield from _read(part, low, high)


def open_archive(path: Path) -> Archive:
    """The archive at `path`, or one laid out for the PEFT folder there: a .zip with the config and the weights as they
    are. Reads the weights once, for their checksum. Raises ConfigError.
    """
    try:
        if path.is_dir():
            return _lay_out(path)
        size = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    for suffix, filename in ARCHIVES.items():
        if path.name.lower().endswith(suffix):
            return Archive(filename, (Part(size, path),))
    raise ConfigError(f"{path} is neither a PEFT folder nor a .zip or .tar.gz")


def _lay_out(folder: Path) -> Archive:
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} is no adapter: it has no {CONFIG}")
    weights = next((name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise ConfigError(
            f"{folder} has no {WEIGHTS[0]}; save it with save_pretrained(..., safe_serialization=True), "
            "for files of other kinds are never opened"
        )
    layout = _Layout()
    # The layout cannot seek, so zipfile writes each checksum after its file, and nothing before it has to be patched.
    with zipfile.ZipFile(layout, "w", zipfile.ZIP_STORED) as archive:
        for name in (CONFIG, weights):
            path = folder / name
            large = path.stat().st_size >= zipfile.ZIP64_LIMIT
            with path.open("rb") as file, archive.open(zipfile.ZipInfo(name), "w", force_zip64=large) as member:
                layout.begin_file()
                while piece := file.read(READ_BYTES):
                    member.write(piece)
                layout.end_file(path)
    return Archive("adapter.zip", layout.parts())


class _Layout(io.RawIOBase):
    """Takes down what zipfile writes: its own bytes as they are, those of the files by their number."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._own = bytearray()
        self._file: int | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]  # zipfile writes bytes
        if self._file is None:
            self._own += view
        else:
            self._file += view.nbytes
        return view.nbytes

    def begin_file(self) -> None:
        """What comes next is a file's."""
        self._close_own()
        self._file = 0

    def end_file(self, path: Path) -> None:
        """The file that it was."""
        assert self._file is not None
        self._parts.append(Part(self._file, path))
        self._file = None

    def parts(self) -> tuple[Part, ...]:
        """All of it."""
        self._close_own()
        return tuple(self._parts)

    def _close_own(self) -> None:
        self._parts.append(Part(len(self._own), bytes(self._own)))
        self._own.clear()


def _read(part: Part, low: int, high: int) -> Iterator[bytes]:
    if isinstance(part.source, bytes):
        yield part.source[low:high]
        return
    try:
        with part.source.open("rb") as file:
            file.seek(low)
            while low < high:
                piece = file.read(min(READ_BYTES, high - low))
                if not piece:
                    raise ConfigError(f"{part.source} became shorter while it was sent")
                low += len(piece)
                yield piece
    except OSError as error:
        raise ConfigError(f"{part.source} cannot be read: {error.strerror}") from None
