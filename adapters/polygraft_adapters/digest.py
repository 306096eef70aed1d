"""An adapter's name inside Polygraft: sha256 over what it computes, not over how it was packed.

Two folders with the same tensors and the same maths have the same digest, whatever else their files say.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from polygraft_adapters.config import LoraSettings
from polygraft_adapters.header import TensorEntry
from polygraft_adapters.patterns import Patterns

_VERSION = "polygraft adapter 1"


class ContentsDigest:
    """Fed every tensor once, in sorted order of names. Each field is written with its type and length, so that no
    two different adapters can spell the same bytes.
    """

    def __init__(self, settings: LoraSettings) -> None:
        self._hash = hashlib.sha256()
        self._last_name: str | None = None
        self._text(_VERSION)
        self._integer(settings.r)
        self._number(settings.alpha)
        self._integer(int(settings.use_rslora))
        for patterns in (settings.rank_pattern, settings.alpha_pattern):
            self._patterns(patterns)
        self._tables(settings)

    def add(self, entry: TensorEntry, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        """One tensor: its description and its bytes, in pieces of any size."""
        assert self._last_name is None or self._last_name < entry.name, "tensors come in sorted order"
        self._last_name = entry.name
        self._text(entry.name)
        self._text(entry.dtype)
        self._integer(len(entry.shape))
        for size in entry.shape:
            self._integer(size)
        self._field(b"b", entry.nbytes)
        for chunk in chunks:
            self._hash.update(chunk)

    def value(self) -> str:
        """sha256:<64 hex digits>"""
        return f"sha256:{self._hash.hexdigest()}"

    def _patterns(self, patterns: Patterns[int] | Patterns[float]) -> None:
        # In the file's order, which decides between keys that match the same module.
        self._field(b"m", len(patterns.items))
        for key, value in patterns.items:
            self._text(key)
            self._number(value)

    def _tables(self, settings: LoraSettings) -> None:
        """What decides which table a tensor is for; nothing where there is nothing to decide."""
        if settings.saved:
            self._field(b"w", len(settings.saved))
            for table in settings.saved:
                self._text(table)
            self._integer(int(settings.ensure_weight_tying))
        for table, ids in sorted(settings.tokens.items()):
            self._field(b"t", len(ids))
            self._text(table)
            for id in ids:
                self._integer(id)

    def _field(self, kind: bytes, length: int) -> None:
        self._hash.update(kind + struct.pack("<Q", length))

    def _text(self, value: str) -> None:
        raw = value.encode("utf-8", "surrogatepass")  # JSON can spell lone surrogates
        self._field(b"s", len(raw))
        self._hash.update(raw)

    def _integer(self, value: int) -> None:
        self._field(b"i", 8)
        self._hash.update(struct.pack("<q", value))

    def _number(self, value: float) -> None:
        self._field(b"f", 8)
        self._hash.update(struct.pack("<d", value))
