"""Opening an uploaded archive without trusting it. Runs in the checker's process, whose memory and time are bounded.

Only an adapter's own files are ever written, under names that are ours. Of everything else the names and sizes are
looked at: a name that no honest archiver writes condemns the whole archive, and the bounds hold for all members
together.
"""

from __future__ import annotations

import errno
import gzip
import re
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Container
from pathlib import Path
from typing import IO

from polygraft.registry.uploads.contents import MAX_README, choose, is_adapter_file, is_readme
from polygraft.registry.uploads.forward import BoundedReads, Budget, Forward, refused
from polygraft_adapters.types import AdapterError
from polygraft_adapters.wording import shown

MAX_MEMBERS = 1000
MAX_NAME = 1024
_CHUNK = 1 << 20
_DRIVE = re.compile(r"[A-Za-z]:")
_PACK_HINT = "pack the folder that PEFT saved: zip -r adapter.zip my-adapter, or tar czf adapter.tar.gz my-adapter"
_DAMAGED = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, struct.error,
    EOFError, ValueError, IndexError, KeyError, NotImplementedError, OverflowError, RuntimeError,
)  # fmt: skip
"""What the standard library raises for bytes that are no archive."""


def unpack(archive: Path, folder: Path, max_bytes: int) -> None:
    """Write the adapter's files out of a .zip or .tar.gz into `folder`.

    Raises AdapterError for one that is damaged, malicious, too large, or holds no adapter or several.
    """
    with archive.open("rb") as file:
        magic = file.read(4)
        file.seek(0)
        budget = Budget(archive.stat().st_size, max_bytes)
        try:
            if magic.startswith(b"PK"):
                _unpack_zip(file, folder, budget)
            elif magic.startswith(b"\x1f\x8b"):
                _unpack_tar(file, folder, budget)
            elif not magic:
                raise refused("is empty", _PACK_HINT)
            else:
                raise refused("is neither a .zip nor a .tar.gz", _PACK_HINT)
        except (*_DAMAGED, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise  # the disk's
            raise refused(f"is damaged: {shown(str(error))}", "pack it again and upload it whole") from error


def _unpack_zip(file: IO[bytes], folder: Path, budget: Budget) -> None:
    """A zip's table comes first, so that all is decided before anything is unpacked."""
    with zipfile.ZipFile(BoundedReads(file)) as archive:
        members: dict[str, zipfile.ZipInfo] = {}
        for count, info in enumerate(archive.infolist()):
            _refuse_many(count)
            # More than the table says does not come out of any member.
            budget.spend(info.file_size)
            # The name as the table has it; zipfile's own has been cut at the first NUL.
            path = _checked_name(info.orig_filename)
            if not info.is_dir():
                if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
                    raise _special(path)
                _refuse_twice(path, members)
                members[path] = info
        for name, path in choose(members).items():
            info = members[path]
            if is_readme(path) and info.file_size > MAX_README:
                continue
            if info.flag_bits & 0x1:
                raise refused(f"{shown(path)} is encrypted", "pack it without a password")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise refused(f"{shown(path)} is packed by an unusual method", "pack it with deflate, or store it")
            with archive.open(info) as member:
                _write(member, folder / name)


def _unpack_tar(file: IO[bytes], folder: Path, budget: Budget) -> None:
    """A tar tells its members one after the other: what may be wanted is unpacked as it comes, and chosen from last."""
    members: dict[str, Path | None] = {}
    with gzip.open(file) as stream, tarfile.TarFile(fileobj=Forward(stream, budget), mode="r") as archive:
        for count, info in enumerate(archive):
            _refuse_many(count)
            path = _checked_name(info.name)
            if info.isdir():
                continue
            if not info.isreg() or info.issparse():
                raise _special(path)
            _refuse_twice(path, members)
            wanted = is_adapter_file(path) or (is_readme(path) and info.size <= MAX_README)
            members[path] = folder / f"member-{count}" if wanted else None
            if (target := members[path]) is not None:
                member = archive.extractfile(info)
                assert member is not None, "a regular file has contents"
                _write(member, target)
    for name, path in choose(members).items():
        if (unpacked := members.pop(path)) is not None:
            unpacked.rename(folder / name)
    for unpacked in members.values():
        if unpacked is not None:
            unpacked.unlink()


def _checked_name(name: str) -> str:
    """The name without a leading "./". Raises AdapterError for one that points out of the archive, on any system."""
    path = name.removeprefix("./")
    parts = path.split("/")
    if len(name) > MAX_NAME or "\0" in name or "\\" in name or _DRIVE.match(path) or path.startswith("/"):
        raise refused(f"has a member with the unsafe name {shown(name)!r}", _PACK_HINT)
    if ".." in parts:
        raise refused(f"has a member whose name leads out of it: {shown(name)!r}", _PACK_HINT)
    return path


def _refuse_twice(path: str, members: Container[str]) -> None:
    if path in members:
        raise refused(f"has the member {shown(path)!r} twice", _PACK_HINT)


def _refuse_many(count: int) -> None:
    if count >= MAX_MEMBERS:
        raise refused(f"has more than {MAX_MEMBERS} members", "pack the adapter's two files only")


def _special(path: str) -> AdapterError:
    return refused(f"has the member {shown(path)!r}, which is a link or a device", "pack the files themselves")


def _write(member: IO[bytes], target: Path) -> None:
    with target.open("xb") as to:
        while chunk := member.read(_CHUNK):
            to.write(chunk)
