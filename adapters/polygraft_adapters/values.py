"""Whether an adapter's numbers are numbers, told from their bytes: numpy, not torch, as gateways ask too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

_EXPONENT: dict[str, tuple[np.dtype[Any], int]] = {
    "F32": (np.dtype("<u4"), 0x7F800000),
    "F16": (np.dtype("<u2"), 0x7C00),
    "BF16": (np.dtype("<u2"), 0x7F80),
}
"""The unsigned integer of a value's size, and the bits of the exponent: all of them set is infinite or not a number."""


def are_transposes(dtype: str, shape: tuple[int, ...], matrix: bytes, other: bytes) -> bool:
    """Whether a matrix of `shape` and another of the shape turned round hold the same numbers, bit by bit."""
    integer, _ = _EXPONENT[dtype]
    turned = np.frombuffer(matrix, integer).reshape(shape).T
    return np.array_equal(turned, np.frombuffer(other, integer).reshape(turned.shape))


class FiniteCheck:
    """Looks at the pieces of one tensor as they pass by; pieces may end anywhere in a value."""

    def __init__(self, dtype: str) -> None:
        self._integer, self._mask = _EXPONENT[dtype]
        self._rest = b""
        self.finite = True
        """Of all values seen so far."""

    def watch(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The same chunks, looked at."""
        for chunk in chunks:
            data = self._rest + chunk if self._rest else chunk
            whole = len(data) // self._integer.itemsize * self._integer.itemsize
            self._rest = data[whole:]
            values = np.frombuffer(data, self._integer, count=whole // self._integer.itemsize)
            self.finite = self.finite and not bool(np.any((values & self._mask) == self._mask))
            yield chunk
