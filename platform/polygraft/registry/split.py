"""Which version of a weighted split a conversation gets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence


def choose(split: Sequence[Mapping[str, int]], salt: str, conversation: str) -> int:
    """The version for `conversation`, a share of all conversations that follows the weights.

    The same in every process: nothing but the arguments decides. `salt` makes the splits of different aliases
    independent of one another. The weights must not all be 0.
    """
    total = sum(part["weight"] for part in split)
    hashed = hashlib.sha256(f"{salt}\0{conversation}".encode("utf-8", "replace")).digest()
    point = int.from_bytes(hashed[:8], "big") * total >> 64
    for part in split:
        point -= part["weight"]
        if point < 0:
            return part["version"]
    raise AssertionError(f"a split without weight: {split}")
