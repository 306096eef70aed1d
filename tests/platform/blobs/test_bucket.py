"""Content-addressed files and adapters in a bucket, over HTTP to a server that speaks S3."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from polygraft.blobs import BlobError, BlobStore, BlobUnavailable, blob_place
from polygraft.blobs import bucket as implementation
from polygraft.blobs.bucket import BucketStore
from polygraft.blobs.objects import Objects
from polygraft.errors import ConfigError

DIGEST = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def machine(s3: str, tmp_path: Path) -> Callable[[str], BlobStore]:
    """machine(name) -> the store as another machine sees it, with its own data folder"""
    return lambda name: blob_place(s3, tmp_path / name).open()


@pytest.fixture
def bucket(s3: str) -> S3Store:
    """The bucket below the prefix, behind the store's back."""
    return S3Store.from_url(s3)


def keys(bucket: S3Store) -> list[str]:
    return sorted(meta["path"] for page in obstore.list(bucket) for meta in page)


def key_of(bucket: S3Store, name: str) -> str:
    [key] = [key for key in keys(bucket) if key.endswith(f"/{name}")]
    return key


Machine = Callable[[str], BlobStore]


def test_a_file_goes_from_machine_to_machine(machine: Machine, bucket: S3Store) -> None:
    here, there = machine("here"), machine("there")
    digest = here.put_bytes(b"text")
    assert keys(bucket) == [f"files/{digest.removeprefix('sha256:')}"]
    assert there.has(digest)
    assert there.path(digest).read_bytes() == b"text"
    assert not there.has(OTHER)
    with pytest.raises(BlobError, match=f"no file {OTHER}"):
        there.path(OTHER)
    assert there.put_bytes(b"text") == digest


def test_an_adapter_goes_from_machine_to_machine(machine: Machine, adapter: Path) -> None:
    machine("here").put_adapter(adapter, DIGEST)
    there = machine("there")
    path = there.adapter_path(DIGEST)
    assert path.is_relative_to(there.root)
    assert (path / WEIGHTS).read_bytes() == b"weights"
    assert sorted(each.name for each in path.iterdir()) == ["adapter_config.json", WEIGHTS, "manifest.json"]
    assert list(there.adapters()) == [DIGEST]
    with pytest.raises(BlobError, match=f"no adapter {OTHER}"):
        there.adapter_path(OTHER)
    assert list((there.root / "staging").iterdir()) == []


def test_an_adapter_of_many_pieces_arrives_whole(machine: Machine, make_adapter: Callable[[str, bytes], Path]) -> None:
    weights = os.urandom((20 << 20) + 7)
    machine("here").put_adapter(make_adapter("large", weights), DIGEST)
    assert (machine("there").adapter_path(DIGEST) / WEIGHTS).read_bytes() == weights


def test_a_copy_is_not_fetched_again(machine: Machine, adapter: Path, bucket: S3Store) -> None:
    there = machine("there")
    machine("here").put_adapter(adapter, DIGEST)
    path = there.adapter_path(DIGEST)
    obstore.delete(bucket, keys(bucket))
    assert there.adapter_path(DIGEST) == path
    with pytest.raises(BlobError, match="no adapter"):
        machine("third").adapter_path(DIGEST)


def test_the_same_content_is_stored_once(machine: Machine, adapter: Path, bucket: S3Store) -> None:
    machine("here").put_adapter(adapter, DIGEST)
    before = keys(bucket)
    assert len(before) == 3
    machine("there").put_adapter(adapter, DIGEST)
    assert keys(bucket) == before


def test_a_damaged_copy_is_replaced_by_a_good_one(machine: Machine, adapter: Path) -> None:
    here = machine("here")
    (here.put_adapter(adapter, DIGEST) / WEIGHTS).write_bytes(b"WEIGHTS")
    assert (here.verified_adapter(DIGEST) / WEIGHTS).read_bytes() == b"weights"
    (here.adapter_path(DIGEST) / WEIGHTS).write_bytes(b"short")
    assert (here.adapter_path(DIGEST) / WEIGHTS).read_bytes() == b"weights"


@pytest.mark.parametrize("content", [b"WEIGHTS", b"short", None])
def test_what_is_damaged_in_the_bucket_is_told_and_never_used(
    machine: Machine, adapter: Path, bucket: S3Store, content: bytes | None
) -> None:
    machine("here").put_adapter(adapter, DIGEST)
    key = key_of(bucket, WEIGHTS)
    if content is None:
        obstore.delete(bucket, key)
    else:
        obstore.put(bucket, key, content)
    there = machine("there")
    with pytest.raises(BlobError, match=f"{DIGEST} is damaged.*{WEIGHTS}") as raised:
        there.adapter_path(DIGEST)
    assert not isinstance(raised.value, BlobUnavailable)
    assert list(there.root.glob("*/*")) == []


def test_a_damaged_file_in_the_bucket_is_told(machine: Machine, bucket: S3Store) -> None:
    digest = machine("here").put_bytes(b"text")
    obstore.put(bucket, keys(bucket)[0], b"test")
    with pytest.raises(BlobError, match="damaged"):
        machine("there").path(digest)


def test_half_an_upload_is_no_adapter(machine: Machine, adapter: Path, bucket: S3Store) -> None:
    machine("here").put_adapter(adapter, DIGEST)
    obstore.delete(bucket, key_of(bucket, "manifest.json"))
    there = machine("there")
    assert there.adapters() == {}
    with pytest.raises(BlobError, match="no adapter"):
        there.adapter_path(DIGEST)
    assert there.sweep(60) == 0
    assert there.sweep(-60) == 1
    assert keys(bucket) == []


def test_an_adapter_is_deleted_unless_it_was_put_lately(machine: Machine, adapter: Path, bucket: S3Store) -> None:
    here = machine("here")
    here.put_adapter(adapter, DIGEST)
    assert not here.delete_adapter(DIGEST, idle=60)
    assert here.delete_adapter(DIGEST)
    assert keys(bucket) == []
    assert not here.delete_adapter(DIGEST)
    with pytest.raises(BlobError, match="no adapter"):
        here.adapter_path(DIGEST)


def test_keys_that_are_none_of_ours_are_not_listed(machine: Machine, adapter: Path, bucket: S3Store) -> None:
    machine("here").put_adapter(adapter, DIGEST)
    obstore.put(bucket, "adapters/notes/1/manifest.json", b"{}")
    assert list(machine("here").adapters()) == [DIGEST]


def test_a_later_put_makes_a_generation_that_outlives_the_old_one(
    machine: Machine, adapter: Path, bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine("here")
    here.put_adapter(adapter, DIGEST)
    old = key_of(bucket, "manifest.json").rpartition("/")[0]
    monkeypatch.setattr(implementation, "FRESH_SECONDS", -60.0)
    here.put_adapter(adapter, DIGEST)
    assert len(keys(bucket)) == 6
    # Whoever decided to delete the old generation may do so now: what the put stored stays.
    obstore.delete(bucket, [key for key in keys(bucket) if key.startswith(old)])
    assert (machine("there").verified_adapter(DIGEST) / WEIGHTS).read_bytes() == b"weights"


def test_a_generation_with_a_successor_is_swept_away(
    machine: Machine, adapter: Path, bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine("here")
    monkeypatch.setattr(implementation, "FRESH_SECONDS", -60.0)
    here.put_adapter(adapter, DIGEST)
    here.put_adapter(adapter, DIGEST)
    assert here.sweep(60) == 0
    assert here.sweep(-60) == 1
    assert len(keys(bucket)) == 3
    assert (machine("there").adapter_path(DIGEST) / WEIGHTS).read_bytes() == b"weights"


def test_a_put_mends_what_is_damaged_in_the_bucket(
    machine: Machine, adapter: Path, bucket: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = machine("here")
    here.put_adapter(adapter, DIGEST)
    obstore.put(bucket, key_of(bucket, WEIGHTS), b"short")
    here.put_adapter(adapter, DIGEST)
    assert (machine("there").adapter_path(DIGEST) / WEIGHTS).read_bytes() == b"weights"


def test_copies_take_no_more_than_they_may(
    s3: str, tmp_path: Path, make_adapter: Callable[[str, bytes], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "_IN_USE_SECONDS", 0.0)
    store = BucketStore(Objects(s3), tmp_path / "cache", cache_bytes=6000)
    digests = [f"sha256:{number:064x}" for number in range(6)]
    for number, digest in enumerate(digests):
        store.put_adapter(make_adapter(str(number), bytes(1500)), digest)
        store.adapter_path(digests[0])
    copies = {f"sha256:{path.name}" for path in (tmp_path / "cache" / "adapters").iterdir()}
    assert copies == {digests[0], digests[4], digests[5]}
    assert (store.adapter_path(digests[1]) / WEIGHTS).read_bytes() == bytes(1500)


def test_a_store_that_does_not_answer_is_not_one_that_has_nothing(
    machine: Machine, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("here").put_adapter(adapter, DIGEST)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    away = machine("away")
    for call in (lambda: away.adapter_path(DIGEST), lambda: away.put_adapter(adapter, OTHER), away.adapters):
        with pytest.raises(BlobUnavailable, match=r"s3://.*/some/where does not answer: [^\n]*$"):
            call()


def test_a_bucket_that_is_not_there_does_not_answer(s3: str, adapter: Path, tmp_path: Path) -> None:
    store = blob_place("s3://nothing/here", tmp_path / "data").open()
    for call in (lambda: store.adapter_path(DIGEST), lambda: store.put_adapter(adapter, DIGEST)):
        with pytest.raises(BlobUnavailable):
            call()


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3://", "http://host/x", "file://host/x"])
def test_other_places_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--blob-store"):
        blob_place(url, tmp_path).open()
