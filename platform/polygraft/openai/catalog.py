"""The served models as the gateway knows them: their cards, and their tokenizers once they were needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from polygraft.blobs import BlobError
from polygraft.card import ModelCard
from polygraft.errors import unavailable
from polygraft.openai.tokenizer import ModelTokenizer

log = structlog.get_logger(__name__)

_THREADS = 4
"""For texts alone: what uploads and the blob store do elsewhere holds up no prompt."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model, ready to have text turned into its tokens."""

    card: ModelCard
    tokenizer: ModelTokenizer


class ModelCatalog:
    """Finds the card and the tokenizer of a base model. Tokenizers are loaded once per digest, in a thread.

    `cards` gives the cards that workers have registered, by name, as they are now; `blob` is where the file of a digest
    lies. The owner closes it.
    """

    def __init__(self, cards: Callable[[], Mapping[str, ModelCard]], blob: Callable[[str], Path]) -> None:
        self._cards = cards
        self._blob = blob
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")
        self._tokenizers: dict[str, asyncio.Future[ModelTokenizer]] = {}

    async def get(self, base: str) -> ServedModel:
        """The model that workers serve as `base`. Raises ApiError 503 while none does."""
        card = self._cards().get(base)
        if card is None:
            raise unavailable(f"No worker serves the model `{base}` at present.", retry_after=5)
        return ServedModel(card, await self._tokenizer(card.tokenizer))

    async def _tokenizer(self, digest: str) -> ModelTokenizer:
        loading = self._tokenizers.get(digest)
        if loading is None:
            loading = asyncio.get_running_loop().run_in_executor(self._threads, self._load, digest)
            self._tokenizers[digest] = loading
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            raise
        except Exception:
            self._tokenizers.pop(digest, None)
            raise

    def close(self) -> None:
        """End the threads, when they have done what they are at."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _load(self, digest: str) -> ModelTokenizer:
        """In a thread: the file may have to be fetched from another machine."""
        try:
            return ModelTokenizer(self._blob(digest), self._threads)
        except BlobError as error:
            log.error("tokenizer_not_loaded", digest=digest, error=str(error))
            raise unavailable("The model's tokenizer cannot be read.", code="dependency_unavailable") from error
