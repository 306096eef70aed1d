"""From a digest to weights, out of real folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engine.bench import TINY_CONFIG, write_adapter, write_model

from polygraft.blobs import BlobError, BlobStore, BlobUnavailable
from polygraft.card import ModelCard
from polygraft.worker import loading as implementation
from polygraft.worker.loading import AdapterLoader, Prepare
from polygraft.worker.vitals import Vitals
from polygraft_adapters.inspection import inspect_adapter
from polygraft_adapters.types import AdapterError
from polygraft_engine.models.architecture import ModelSpec, read_spec

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return read_spec(write_model(tmp_path / "tiny", TINY_CONFIG))


@pytest.fixture
def blobs(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


@pytest.fixture
def stored(tmp_path: Path, spec: ModelSpec, blobs: BlobStore) -> str:
    """The digest of an adapter in the store."""
    folder = write_adapter(tmp_path / "adapter", spec, 1)
    digest = inspect_adapter(folder, spec.module_shapes("tiny"), 64).digest
    blobs.put_adapter(folder, digest)
    return digest


Loaders = Callable[..., AdapterLoader]


@pytest.fixture
def make_loader(spec: ModelSpec, card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> Loaders:
    monkeypatch.setattr(implementation, "_PAUSES", (0.0, 0.0))
    fitting = {"modules": spec.module_shapes("tiny"), "max_lora_rank": 64}

    def make(
        blobs: BlobStore, vitals: Vitals | None = None, prepare: Prepare = lambda weights: weights
    ) -> AdapterLoader:
        told = {name: getattr(card, name) for name in card.__struct_fields__} | fitting
        return AdapterLoader(blobs, ModelCard(**told), torch.float32, vitals or Vitals("w", "m"), prepare)

    return make


def test_an_adapter_is_loaded_and_prepared_for_the_engine(make_loader: Loaders, blobs: BlobStore, stored: str) -> None:
    vitals = Vitals("w", "m")
    weights = make_loader(blobs, vitals)(stored)
    assert weights.info.digest == stored
    assert weights.pairs
    assert make_loader(blobs, vitals, lambda weights: replace(weights, pairs={}))(stored).pairs == {}
    assert sum(vitals.status().adapter_loads.counts) == 2


def test_one_flipped_bit_is_found(make_loader: Loaders, blobs: BlobStore, stored: str) -> None:
    path = blobs.adapter_path(stored) / WEIGHTS
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(BlobError, match=f"damaged.*{WEIGHTS}"):
        make_loader(blobs)(stored)


def test_a_damaged_config_is_told_as_damage_and_not_as_somebodys_mistake(
    make_loader: Loaders, blobs: BlobStore, stored: str
) -> None:
    path = blobs.adapter_path(stored) / CONFIG
    path.write_text(path.read_text().replace("{", "[", 1))
    with pytest.raises(BlobError, match=f"damaged.*{CONFIG}"):
        make_loader(blobs)(stored)


def test_what_was_stored_under_anothers_digest_is_not_served(
    make_loader: Loaders, blobs: BlobStore, stored: str, tmp_path: Path
) -> None:
    other = "sha256:" + "0" * 64
    blobs.put_adapter(tmp_path / "adapter", other)
    with pytest.raises(BlobError, match=f"{other} has the contents of {stored}"):
        make_loader(blobs)(other)


def test_an_adapter_that_is_whole_but_does_not_fit_says_why(
    make_loader: Loaders, blobs: BlobStore, stored: str, tmp_path: Path
) -> None:
    config = tmp_path / "adapter" / CONFIG
    config.write_text(config.read_text().replace("LORA", "PROMPT_TUNING"))
    other = "sha256:" + "0" * 64
    blobs.put_adapter(tmp_path / "adapter", other)
    with pytest.raises(AdapterError, match="peft_type"):
        make_loader(blobs)(other)


def test_one_that_is_not_there_is_told_at_once(make_loader: Loaders, blobs: BlobStore) -> None:
    with pytest.raises(BlobError, match="no adapter") as raised:
        make_loader(blobs)("sha256:" + "0" * 64)
    assert not isinstance(raised.value, BlobUnavailable)


class Shaky(BlobStore):
    """A folder on a disk that fails `failures` times."""

    failures = 0
    calls = 0

    def adapter_path(self, digest: str) -> Path:
        self.calls += 1
        if self.calls <= self.failures:
            raise OSError(5, os.strerror(5))
        return super().adapter_path(digest)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_disk_that_fails_is_asked_again(make_loader: Loaders, blobs: BlobStore, stored: str, failures: int) -> None:
    shaky = Shaky(blobs.root)
    shaky.failures = failures
    assert make_loader(shaky)(stored).info.digest == stored


def test_a_disk_that_goes_on_failing_does_not_answer(make_loader: Loaders, blobs: BlobStore, stored: str) -> None:
    shaky = Shaky(blobs.root)
    shaky.failures = 100
    with pytest.raises(BlobUnavailable, match="cannot be read"):
        make_loader(shaky)(stored)
    assert shaky.calls == 3
