"""Where things are kept, what the model is called, and what a worker's environment holds."""

from pathlib import Path

import pytest

from polygraft import settings
from polygraft.announce import Ready, reachable_url
from polygraft.blobs import BlobPlace
from polygraft.errors import ConfigError
from polygraft.places import places, served_name
from polygraft.worker.environment import usable_cores, worker_environment


def test_everything_is_in_the_data_folder_unless_told_otherwise(tmp_path: Path) -> None:
    where = places(settings.load(data_dir=tmp_path))
    assert where.database_url == f"sqlite:///{tmp_path}/registry.db"
    for path in (where.blobs.folder, where.pepper, where.lock, where.valkey):
        assert path.parent == tmp_path


@pytest.mark.parametrize("store", ["{}/b", "file://{}/b"])
def test_a_blob_store_is_a_folder(tmp_path: Path, store: str) -> None:
    assert places(settings.load(blob_store=store.format(tmp_path))).blobs == BlobPlace(tmp_path / "b")


def test_a_blob_store_is_a_bucket_with_copies_in_the_data_folder(tmp_path: Path) -> None:
    where = places(settings.load(blob_store="s3://bucket/some/where", data_dir=tmp_path)).blobs
    assert (where.folder.parent, where.bucket) == (tmp_path, "s3://bucket/some/where")


def test_other_blob_stores_are_refused() -> None:
    with pytest.raises(ConfigError, match="gs://bucket"):
        places(settings.load(blob_store="gs://bucket"))


def test_the_model_is_called_by_the_last_part_of_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Tiny").mkdir()
    monkeypatch.chdir(tmp_path / "Tiny")
    for model, name in (("org/Llama", "Llama"), (f"{tmp_path}/Tiny/", "Tiny"), (".", "Tiny"), ("", "")):
        assert served_name(settings.load(model=model)) == name
    assert served_name(settings.load(model="org/Llama", served_model_name="mine")) == "mine"


def test_a_worker_shares_the_cores_and_spins_for_a_bounded_time(tmp_path: Path) -> None:
    present = {"OMP_WAIT_POLICY": "active", "HOME": "/h"}
    found = worker_environment(settings.load(model="org/Llama", workers=2), present, cores=5)
    assert found == {"HOME": "/h", "GOMP_SPINCOUNT": "10000", "OMP_NUM_THREADS": "2"}
    many = worker_environment(settings.load(model=str(tmp_path), workers=9), {}, cores=2)
    assert (many["OMP_NUM_THREADS"], many["HF_HUB_OFFLINE"]) == ("1", "1")
    told = worker_environment(settings.load(threads=3), {"OMP_NUM_THREADS": "7", "GOMP_SPINCOUNT": "5"}, cores=8)
    assert (told["OMP_NUM_THREADS"], told["GOMP_SPINCOUNT"]) == ("3", "5")
    assert worker_environment(settings.load(), {"OMP_NUM_THREADS": "7"}, cores=8)["OMP_NUM_THREADS"] == "7"
    assert usable_cores() >= 1


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"),
     ("::1", "http://[::1]:80"), ("example.org", "http://example.org:80")],
)  # fmt: skip
def test_a_server_on_every_address_is_reached_on_loopback(host: str, url: str) -> None:
    assert reachable_url(host, 80) == url


def test_the_ready_message_has_a_command_to_paste() -> None:
    ready = Ready("http://127.0.0.1:8000", "http://127.0.0.1:8001/metrics", "base", ["pirate"], "$POLYGRAFT_API_KEY")
    text = str(ready)
    for piece in ("http://127.0.0.1:8000/v1", "base", "pirate", "metrics"):
        assert piece in text
    assert '-H "Authorization: Bearer $POLYGRAFT_API_KEY"' in ready.example()
    assert "Authorization" not in Ready("u", "m", "base", [], None).example()
    assert '"model": "base"' in Ready("u", "m", "base", [], None).example()
