"""`polygraft adapter pull NAME[@VERSION] DIR`."""

from __future__ import annotations

import gzip
import io
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from polygraft.cli import show
from polygraft.cli.archive import CONFIG, READ_BYTES, WEIGHTS
from polygraft.cli.connect import Adapters, AsJson, adapters, command_on
from polygraft.cli.progress import progress_bar
from polygraft.cli.remote import Json, RemoteError
from polygraft.cli.values import reference, version
from polygraft.errors import ConfigError

FILES = (CONFIG, WEIGHTS[0])


@command_on(adapters)
def pull(
    mine: Adapters,
    source: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="Like voice, voice@v3 or voice@prod.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A folder to make; an empty one is taken too.")],
    as_json: AsJson = False,
) -> None:
    """Download an adapter as a PEFT folder. The folder appears when it is complete, or not at all."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} is there already")
    found = _version(mine, source)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
            folder = Path(scratch) / "adapter"
            folder.mkdir()
            _download(mine, found, folder)
            folder.rename(directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None
    if as_json:
        show.document({**found, "path": str(directory)})
    else:
        typer.echo(f"{found['name']}@v{found['version']}  {found['digest']}  {directory}")


def _version(mine: Adapters, source: str) -> Json:
    """The version that is meant. Raises RemoteError, or ConfigError for an alias of several."""
    name, wanted = reference(source)
    whole = mine.remote.call("GET", mine.path(name))
    if wanted is None:
        return whole
    alias = whole["aliases"].get(wanted)
    if alias is None:
        try:
            number = version(wanted)
        except typer.BadParameter:
            raise ConfigError(f"{name} has no version and no alias {wanted!r}") from None
    else:
        spelled = show.split(alias)
        if "=" in spelled:
            raise ConfigError(f"{source} is several versions, {spelled}; choose one")
        number = version(spelled)
    return mine.remote.call("GET", mine.path(name, "versions", number))


def _download(mine: Adapters, found: Json, folder: Path) -> None:
    """Unpack the content route's .tar.gz as it comes. Raises RemoteError for one that is damaged or not whole."""
    content = mine.path(found["name"], "versions", found["version"], "content")
    with mine.remote.stream(content) as pieces, progress_bar() as bar:
        task = bar.add_task(found["name"], total=found["size_bytes"])
        try:
            with gzip.open(io.BufferedReader(_Pieces(pieces))) as unzipped:
                _unpack(unzipped, folder, lambda count: bar.advance(task, count))
                # The checksum comes last.
                while unzipped.read(READ_BYTES):
                    pass
        except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError):
            raise RemoteError("what the server sent is not a whole adapter; try again") from None
    if {path.name for path in folder.iterdir()} != set(FILES):
        raise RemoteError("what the server sent is not an adapter")


def _unpack(unzipped: gzip.GzipFile, folder: Path, progress: Callable[[int], None]) -> None:
    """The adapter's files, and nothing else that may be in there."""
    with tarfile.open(fileobj=unzipped, mode="r|") as archive:
        for entry in archive:
            member = archive.extractfile(entry) if entry.name in FILES and entry.isreg() else None
            if member is None:
                continue
            with (folder / entry.name).open("xb") as file:
                while piece := member.read(READ_BYTES):
                    file.write(piece)
                    progress(len(piece))


class _Pieces(io.RawIOBase):
    """Pieces of bytes as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]  # io hands over buffers
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = piece
        count = min(len(view), len(self._rest))
        view[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
