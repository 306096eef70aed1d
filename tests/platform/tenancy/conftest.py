"""A hasher with a known pepper."""

import pytest

from polygraft.tenancy.keys import KeyHasher


@pytest.fixture
def hasher() -> KeyHasher:
    """Keys hashed under a fixed pepper."""
    return KeyHasher(b"p" * 32)
