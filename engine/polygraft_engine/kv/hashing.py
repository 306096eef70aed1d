"""The identity of a cached prefix: (namespace, adapter, tokens), chained block by block.

root       = H(namespace, adapter)
key of b_i = H(key of b_{i-1} or root, tokens of b_i)

Every field is written with its type and its length before it, so no two different lists of fields have the same bytes.
H is BLAKE2b with 256 bits: nobody can make a prompt whose blocks answer for another tenant's.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b

_PURPOSE = b"polygraft-kv"


def root_key(namespace: str, adapter: str | None) -> bytes:
    """The key before the first block. The base model (None) differs from every digest, the empty one included."""
    owner = _field(b"n", namespace.encode("utf-8", "surrogatepass"))
    model = _field(b"b", b"") if adapter is None else _field(b"a", adapter.encode("utf-8", "surrogatepass"))
    return blake2b(owner + model, digest_size=32, person=_PURPOSE).digest()


def block_key(parent: bytes, token_ids: Iterable[int]) -> bytes:
    """The key of the block that holds `token_ids` and follows `parent`."""
    tokens = array("q", token_ids).tobytes()
    return blake2b(_field(b"p", parent) + _field(b"t", tokens), digest_size=32, person=_PURPOSE).digest()


def _field(kind: bytes, payload: bytes) -> bytes:
    return kind + len(payload).to_bytes(8, "little") + payload
