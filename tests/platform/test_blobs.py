"""Content-addressed files and adapters."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polygraft.blobs import BlobError, BlobStore

DIGEST = "sha256:" + "ab" * 32


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("not ours to keep")
    return folder


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


def test_an_adapter_is_its_two_files(blobs: BlobStore, adapter: Path) -> None:
    blobs.put_adapter(adapter, DIGEST)
    stored = blobs.adapter_path(DIGEST)
    assert sorted(path.name for path in stored.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    (adapter / "adapter_model.safetensors").write_bytes(b"changed")
    blobs.put_adapter(adapter, DIGEST)
    assert (stored / "adapter_model.safetensors").read_bytes() == b"weights"


def test_half_an_adapter_is_never_seen(blobs: BlobStore, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        blobs.put_adapter(adapter, DIGEST)
    with pytest.raises(BlobError):
        blobs.adapter_path(DIGEST)


def test_many_writers_of_the_same_content_agree(blobs: BlobStore, adapter: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: blobs.put_adapter(adapter, DIGEST), range(32)))
        digests = set(pool.map(lambda _: blobs.put_bytes(b"same"), range(32)))
    assert len(digests) == 1
    assert list((blobs.root / "staging").iterdir()) == []
