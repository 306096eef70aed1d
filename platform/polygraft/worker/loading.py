"""From a digest to weights in host memory: on the loading threads, never in the step loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog
import torch

from polygraft.blobs import BlobError, BlobStore, BlobUnavailable
from polygraft.card import ModelCard
from polygraft.worker.vitals import Vitals
from polygraft_adapters.types import AdapterError
from polygraft_adapters.weights import AdapterWeights, load_adapter

log = structlog.get_logger(__name__)

Prepare = Callable[[AdapterWeights], AdapterWeights]
"""What the engine wants done to weights before it takes them."""

_PAUSES = (0.1, 0.5)
"""Seconds before a disk is asked again that failed; a bucket has its own repetitions."""


def single_threaded() -> None:
    """Compute on the calling thread alone: several loads at once would take every core from the step, several times
    over.
    """
    torch.set_num_threads(1)


class AdapterLoader:
    """Reads adapters out of the blob store, in the dtype that the engine computes in. Called by several threads."""

    def __init__(self, blobs: BlobStore, card: ModelCard, dtype: torch.dtype, vitals: Vitals, prepare: Prepare) -> None:
        self._blobs = blobs
        self._card = card
        self._dtype = dtype
        self._vitals = vitals
        self._prepare = prepare

    def __call__(self, digest: str) -> AdapterWeights:
        """Raises AdapterError for an adapter that does not fit the model, BlobError for one that is missing or damaged
        where it is stored, BlobUnavailable where that cannot be told.
        """
        began = time.monotonic()
        weights = self._prepare(self._read_patiently(digest))
        self._vitals.adapter_loaded(time.monotonic() - began)
        return weights

    def _read_patiently(self, digest: str) -> AdapterWeights:
        for pause in _PAUSES:
            try:
                return self._read(digest)
            except OSError as error:
                log.warning("adapter_not_read", adapter=digest, error=str(error))
                time.sleep(pause)
        try:
            return self._read(digest)
        except OSError as error:
            raise BlobUnavailable(f"the adapter {digest} cannot be read: {error}") from error

    def _read(self, digest: str) -> AdapterWeights:
        """What is not right at the first reading is compared with its checksums, which also replaces a damaged copy of
        a good original, and read again.
        """
        try:
            return self._load(self._blobs.adapter_path(digest), digest)
        except BlobUnavailable:
            raise
        except (AdapterError, BlobError) as error:
            log.warning("adapter_not_right", adapter=digest, error=str(error))
            return self._load(self._blobs.verified_adapter(digest), digest)

    def _load(self, folder: Path, digest: str) -> AdapterWeights:
        """The digest is taken of the very bytes that are returned, so that comparing it costs nothing."""
        weights = load_adapter(folder, self._card.modules, self._card.max_lora_rank, self._dtype)
        if weights.info.digest != digest:
            raise BlobError(f"what is stored as the adapter {digest} has the contents of {weights.info.digest}")
        return weights
