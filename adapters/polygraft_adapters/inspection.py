"""Checking an adapter in full, without torch and without holding it in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

from polygraft_adapters.binding import Binding, bind
from polygraft_adapters.config import LoraSettings, parse_config
from polygraft_adapters.digest import ContentsDigest
from polygraft_adapters.folder import open_folder
from polygraft_adapters.header import TensorEntry, read_header
from polygraft_adapters.pairs import about
from polygraft_adapters.tables import Repeat
from polygraft_adapters.types import TABLES, TARGETS, AdapterError, AdapterInfo, ModuleShapes, Problem
from polygraft_adapters.values import FiniteCheck, are_transposes
from polygraft_adapters.wording import shown

_CHUNK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class CheckedAdapter:
    """An adapter whose every tensor has its place, with the file of its weights still open to read them from."""

    settings: LoraSettings
    entries: tuple[TensorEntry, ...]
    binding: Binding
    warnings: tuple[str, ...]
    stream: BinaryIO

    def read(self, entry: TensorEntry) -> Iterator[bytes]:
        """A tensor's bytes in pieces. Raises AdapterError when the file has become shorter since it was checked."""
        position = entry.start
        while position < entry.end:
            self.stream.seek(position)  # each time, so that two tensors can be read side by side
            chunk = self.stream.read(min(entry.end - position, _CHUNK_BYTES))
            if not chunk:
                what = "the file became shorter while it was read"
                raise AdapterError([Problem(shown(entry.name), what, kind="tensor")])
            position += len(chunk)
            yield chunk

    def unequal_copies(self) -> list[Problem]:
        """Tensors that must repeat another one and do not."""
        return [repeat.broken for repeat in self.binding.copies if not self._holds(repeat)]

    def _holds(self, repeat: Repeat) -> bool:
        entry, copy = repeat.entry, repeat.copy
        if entry.dtype != copy.dtype:
            return False
        if not repeat.transposed:
            return all(a == b for a, b in zip_longest(self.read(entry), self.read(copy)))
        # Both of them whole, as an exception: they are LoRA's.
        return entry.shape == copy.shape[::-1] and are_transposes(
            entry.dtype, entry.shape, b"".join(self.read(entry)), b"".join(self.read(copy))
        )

    def info(self, digest: str) -> AdapterInfo:
        changed = {key.target for key in (*self.binding.modules, *self.binding.biases)} | self.binding.tables.keys()
        return AdapterInfo(
            digest=digest,
            rank=self.binding.rank,
            scale=self.settings.default_scale,
            targets=tuple(target for target in (*TARGETS, *TABLES) if target in changed),
            size_bytes=sum(entry.nbytes for entry in self.entries),
            base_model=self.settings.base_model,
            warnings=self.warnings,
        )


def inspect_adapter(path: Path, modules: ModuleShapes, max_rank: int) -> AdapterInfo:
    """Check the PEFT folder at `path` against a base model.

    Raises AdapterError with everything that is wrong, non-finite values included.
    """
    with checked_adapter(path, modules, max_rank) as adapter:
        digest = ContentsDigest(adapter.settings)
        problems = adapter.unequal_copies()
        for entry in adapter.entries:
            values = FiniteCheck(entry.dtype)
            digest.add(entry, values.watch(adapter.read(entry)))
            if not values.finite:
                problems.append(not_finite(entry))
        if problems:
            raise AdapterError(problems)
        return adapter.info(digest.value())


def not_finite(entry: TensorEntry) -> Problem:
    """A tensor that no training meant."""
    return about(entry, "has values that are NaN or infinite", "the training run diverged")


@contextmanager
def checked_adapter(path: Path, modules: ModuleShapes, max_rank: int) -> Iterator[CheckedAdapter]:
    """Check a folder and keep its weights open, so that what is read next is the very file that was checked."""
    folder = open_folder(path)
    settings, problems = parse_config(folder.config)
    try:
        with folder.weights.open("rb") as stream:
            try:
                entries = read_header(stream, folder.weights.name)
            except AdapterError as error:
                raise AdapterError([*problems, *error.problems]) from error
            if settings is None:
                raise AdapterError(problems)
            binding = bind(entries, settings, modules, max_rank)
            if problems or binding.problems:
                raise AdapterError([*problems, *binding.problems])
            warnings = (*folder.warnings, *_base_warnings(settings.base_model, modules.base_model), *binding.warnings)
            yield CheckedAdapter(settings, entries, binding, warnings, stream)
    except OSError as error:
        raise AdapterError([Problem(folder.weights.name, f"cannot be read: {error.strerror}")]) from error


def _base_warnings(trained_on: str | None, served: str) -> list[str]:
    """Names differ for good reasons (paths, quantised copies), so that only the last part is compared."""
    if trained_on is None or _last_part(trained_on) == _last_part(served):
        return []
    return [f"the adapter was trained on {shown(trained_on)} and the model served is {served}; their shapes agree"]


def _last_part(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].casefold()
