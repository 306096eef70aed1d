"""Content-addressed files and adapters in a folder."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polygraft.blobs import BlobError, BlobStore
from polygraft.blobs.contents import Manifest

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def test_a_digest_is_the_contents(blobs: BlobStore) -> None:
    digest = blobs.put_bytes(b"text")
    assert digest == "sha256:" + hashlib.sha256(b"text").hexdigest()
    assert blobs.put_bytes(b"text") == digest
    assert blobs.has(digest)
    assert blobs.path(digest).read_bytes() == b"text"


def test_what_is_not_there_is_named(blobs: BlobStore) -> None:
    assert not blobs.has(DIGEST)
    with pytest.raises(BlobError, match=DIGEST):
        blobs.path(DIGEST)
    with pytest.raises(BlobError, match=DIGEST):
        blobs.adapter_path(DIGEST)


@pytest.mark.parametrize("digest", ["", "sha256:../../etc/passwd", "sha256:AB" + "ab" * 31, "md5:" + "ab" * 32])
def test_only_digests_name_anything(blobs: BlobStore, digest: str) -> None:
    with pytest.raises(BlobError, match="no sha256 digest"):
        blobs.path(digest)


def test_an_adapter_is_its_two_files_and_their_sums(blobs: BlobStore, adapter: Path) -> None:
    blobs.put_adapter(adapter, DIGEST)
    stored = blobs.adapter_path(DIGEST)
    names = ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    assert sorted(path.name for path in stored.iterdir()) == names
    (adapter / "adapter_model.safetensors").write_bytes(b"changed")
    blobs.put_adapter(adapter, DIGEST)
    assert (stored / "adapter_model.safetensors").read_bytes() == b"weights"


def test_half_an_adapter_is_never_seen(blobs: BlobStore, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        blobs.put_adapter(adapter, DIGEST)
    with pytest.raises(BlobError):
        blobs.adapter_path(DIGEST)
    assert list((blobs.root / "staging").iterdir()) == []


def test_many_writers_of_the_same_content_agree(blobs: BlobStore, adapter: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: blobs.put_adapter(adapter, DIGEST), range(32)))
        digests = set(pool.map(lambda _: blobs.put_bytes(b"same"), range(32)))
    assert len(digests) == 1
    assert list((blobs.root / "staging").iterdir()) == []
    assert blobs.verified_adapter(DIGEST) == blobs.adapter_path(DIGEST)


def test_a_damaged_file_is_told_and_mended_by_the_next_put(blobs: BlobStore) -> None:
    digest = blobs.put_bytes(b"text")
    blobs.path(digest).write_bytes(b"test")
    with pytest.raises(BlobError, match="damaged"):
        blobs.path(digest)
    assert blobs.put_bytes(b"text") == digest
    assert blobs.path(digest).read_bytes() == b"text"


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_adapter_is_told_and_mended_by_the_next_put(blobs: BlobStore, adapter: Path, name: str) -> None:
    stored = blobs.put_adapter(adapter, DIGEST)
    content = (stored / name).read_bytes()
    (stored / name).write_bytes(content[:-1] + b"?")
    with pytest.raises(BlobError, match=f"{DIGEST} is damaged.*{name}"):
        blobs.verified_adapter(DIGEST)
    blobs.put_adapter(adapter, DIGEST)
    assert (blobs.verified_adapter(DIGEST) / name).read_bytes() == content


@pytest.mark.parametrize("meanwhile", ["mended", "deleted"])
def test_others_go_on_while_a_damaged_adapter_is_compared(
    blobs: BlobStore, adapter: Path, meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing takes long; what it found may have been replaced when it ends."""
    stored = blobs.put_adapter(adapter, DIGEST)
    (stored / "adapter_model.safetensors").write_bytes(b"damaged")
    check, checks = Manifest.check, 0

    def slowly(manifest: Manifest, folder: Path, digest: str) -> None:
        nonlocal checks
        checks += 1
        try:
            check(manifest, folder, digest)
        finally:
            # The second comparison of the put is the one with its own copy at hand.
            if checks == 2:
                other = threading.Thread(target=blobs.delete_adapter, args=[DIGEST])
                if meanwhile == "mended":
                    other = threading.Thread(target=blobs.put_adapter, args=[adapter, DIGEST])
                other.start()
                other.join(10)
                assert not other.is_alive()

    monkeypatch.setattr(Manifest, "check", slowly)
    blobs.put_adapter(adapter, DIGEST)
    monkeypatch.undo()
    blobs.verified_adapter(DIGEST)
    assert list((blobs.root / "staging").iterdir()) == []


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "manifest.json"])
@pytest.mark.parametrize("kept", [None, 1])
def test_a_file_that_is_missing_or_cut_off_shows_at_once(
    blobs: BlobStore, adapter: Path, name: str, kept: int | None
) -> None:
    stored = blobs.put_adapter(adapter, DIGEST)
    if kept is None:
        (stored / name).unlink()
    else:
        (stored / name).write_bytes((stored / name).read_bytes()[:kept])
    with pytest.raises(BlobError, match=f"damaged.*{name}"):
        blobs.adapter_path(DIGEST)
    blobs.put_adapter(adapter, DIGEST)
    blobs.verified_adapter(DIGEST)


def test_adapters_are_listed_and_deleted(blobs: BlobStore, adapter: Path) -> None:
    assert blobs.adapters() == {}
    before = time.time() - 1
    blobs.put_adapter(adapter, DIGEST)
    [(digest, put)] = blobs.adapters().items()
    assert digest == DIGEST
    assert before < put < time.time() + 1
    assert blobs.delete_adapter(DIGEST)
    assert blobs.adapters() == {}
    assert not blobs.delete_adapter(DIGEST)
    with pytest.raises(BlobError, match="no adapter"):
        blobs.adapter_path(DIGEST)
    assert list((blobs.root / "staging").iterdir()) == []


def test_names_that_are_no_digests_are_not_listed(blobs: BlobStore, adapter: Path) -> None:
    blobs.put_adapter(adapter, DIGEST)
    (blobs.root / "adapters" / "lost+found").mkdir()
    assert list(blobs.adapters()) == [DIGEST]


def test_what_was_put_again_lately_is_not_deleted(blobs: BlobStore, adapter: Path) -> None:
    stored = blobs.put_adapter(adapter, DIGEST)
    os.utime(stored, (0, 0))
    blobs.put_adapter(adapter, DIGEST)
    assert not blobs.delete_adapter(DIGEST, idle=60)
    os.utime(stored, (0, 0))
    assert blobs.delete_adapter(DIGEST, idle=60)


def test_a_put_that_ended_well_outlives_the_deletions_around_it(blobs: BlobStore, adapter: Path) -> None:
    """Whoever deletes only what nobody put lately never takes away what a put has just found to be there."""
    for _ in range(20):
        os.utime(blobs.put_adapter(adapter, DIGEST), (0, 0))
        with ThreadPoolExecutor(4) as pool:
            deleting = [pool.submit(blobs.delete_adapter, DIGEST, 60) for _ in range(4)]
            pool.submit(blobs.put_adapter, adapter, DIGEST).result()
            blobs.verified_adapter(DIGEST)
            assert sum(each.result() for each in deleting) <= 1
        blobs.verified_adapter(DIGEST)


def test_a_reader_of_what_is_deleted_reads_to_the_end(blobs: BlobStore, adapter: Path) -> None:
    with (blobs.put_adapter(adapter, DIGEST) / "adapter_model.safetensors").open("rb") as stream:
        assert blobs.delete_adapter(DIGEST)
        assert stream.read() == b"weights"


def test_what_the_dead_left_half_done_is_swept_away(blobs: BlobStore) -> None:
    assert blobs.sweep(60) == 0
    left, fresh, written, renamed = (blobs.staging_folder() for _ in range(4))
    renamed = renamed.rename(renamed.with_name("somebody-elses"))
    for folder in (left, fresh, written, renamed):
        (folder / "part").write_bytes(b"x")
    for path in (left / "part", left, written, renamed / "part", renamed):
        os.utime(path, (0, 0))
    assert blobs.sweep(60) == 1
    assert sorted((blobs.root / "staging").iterdir()) == sorted([fresh, written, renamed])
