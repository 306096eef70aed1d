"""`polygraft adapter pull NAME[@VERSION] DIR`."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from polygraft.cli import show
from polygraft.cli.archive import CONFIG, WEIGHTS
from polygraft.cli.connect import Adapters, AsJson, adapters, command_on
from polygraft.cli.progress import progress_bar
from polygraft.cli.remote import Json, RemoteError
from polygraft.cli.values import reference, version
from polygraft.errors import ConfigError

FILES = (CONFIG, *WEIGHTS)


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
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            with (scratch / "archive").open("w+b") as archive:
                _download(mine, found, archive)
                _unpack(archive, scratch / "adapter")
            (scratch / "adapter").rename(directory)
        finally:
            shutil.rmtree(scratch)
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
        number = version(wanted)
    else:
        spelled = show.split(alias)
        if "=" in spelled:
            raise ConfigError(f"{source} is several versions, {spelled}; choose one")
        number = version(spelled)
    return mine.remote.call("GET", mine.path(name, "versions", number))


def _download(mine: Adapters, found: Json, archive: BinaryIO) -> None:
    with (
        mine.remote.stream(mine.path(found["name"], "versions", found["version"], "content")) as (pieces, headers),
        progress_bar() as bar,
    ):
        length = headers.get("content-length")
        task = bar.add_task(found["name"], total=None if length is None else int(length))
        for piece in pieces:
            archive.write(piece)
            bar.advance(task, len(piece))


def _unpack(archive: BinaryIO, folder: Path) -> None:
    """The adapter's files, and nothing else that may be in there."""
    folder.mkdir()
    try:
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                if name in FILES:
                    with opened.open(name) as member, (folder / name).open("xb") as file:
                        shutil.copyfileobj(member, file)
    except zipfile.BadZipFile:
        raise RemoteError("what the server sent is not a whole adapter") from None
