"""How keys look and how they are stored."""

import re
import stat
from pathlib import Path

import pytest

from polygraft.errors import ConfigError
from polygraft.tenancy.keys import KeyHasher, load_pepper, new_key, shown_prefix


def test_keys_have_their_form_and_never_repeat() -> None:
    assert re.fullmatch(r"pg-[0-9A-Za-z]{40}", new_key())
    assert re.fullmatch(r"pg-admin-[0-9A-Za-z]{40}", new_key(admin=True))
    assert len({new_key() for _ in range(100)}) == 100


@pytest.mark.parametrize("key", [new_key(), new_key(admin=True), "short", ""])
def test_the_shown_prefix_keeps_most_of_a_key_to_itself(key: str) -> None:
    assert key.startswith(shown_prefix(key))
    assert len(shown_prefix(key)) <= len(key) / 4


def test_a_digest_needs_the_pepper() -> None:
    key = new_key()
    one, other = KeyHasher(b"a" * 32), KeyHasher(b"b" * 32)
    assert one.same(one.digest(key), one.digest(key))
    assert not one.same(one.digest(key), other.digest(key))
    assert key not in one.digest(key)


def test_the_pepper_is_made_once_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "data" / "pepper"
    pepper = load_pepper(path)
    assert len(pepper) == 32
    assert load_pepper(path) == pepper
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_damaged_pepper_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "pepper").write_bytes(b"x")
    with pytest.raises(ConfigError, match="pepper"):
        load_pepper(tmp_path / "pepper")
