"""An adapter's files as a .tar.gz, made while it is sent: no more than a piece of it is ever in memory."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from polygraft_adapters.config import CONFIG_NAME
from polygraft_adapters.folder import WEIGHTS_NAME

MEMBERS = (CONFIG_NAME, WEIGHTS_NAME)
_CHUNK = 1 << 20
_GZIP = 31
"""zlib's number for a gzip container around the largest window."""
_FAST = 1
"""Weights hardly shrink, however long one tries."""


def tar_gz(folder: Path) -> Iterator[bytes]:
    """The archive in pieces, the same bytes each time. Both files are open before this returns; raises OSError when
    one cannot be. They are closed with the iterator.
    """
    files = ExitStack()
    try:
        opened = [(name, files.enter_context((folder / name).open("rb"))) for name in MEMBERS]
    except OSError:
        files.close()
        raise
    return _packed(opened, files)


def _packed(opened: Sequence[tuple[str, BinaryIO]], files: ExitStack) -> Iterator[bytes]:
    packer = zlib.compressobj(_FAST, zlib.DEFLATED, _GZIP)
    with files:
        for name, file in opened:
            entry = tarfile.TarInfo(name)
            entry.size = os.fstat(file.fileno()).st_size
            yield packer.compress(entry.tobuf(tarfile.GNU_FORMAT))
            while chunk := file.read(_CHUNK):
                yield packer.compress(chunk)
            yield packer.compress(bytes(-entry.size % tarfile.BLOCKSIZE))
        yield packer.compress(bytes(2 * tarfile.BLOCKSIZE))
        yield packer.flush()
