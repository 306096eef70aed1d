"""The models that the gateway knows."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from polygraft.blobs import BlobUnavailable
from polygraft.card import ModelCard
from polygraft.errors import ApiError
from polygraft.openai.catalog import ModelCatalog


async def test_a_tokenizer_is_loaded_once_however_many_ask(cards: Mapping[str, ModelCard], tokenizers: Path) -> None:
    asked: list[str] = []

    def blob(digest: str) -> Path:
        asked.append(digest)
        return tokenizers / digest

    catalog = ModelCatalog(lambda: cards, blob)
    found = await asyncio.gather(*(catalog.get(name) for name in ("base", "base", "bare", "bos")))
    assert [served.card.name for served in found] == ["base", "base", "bare", "bos"]
    assert found[0].tokenizer is found[1].tokenizer is found[2].tokenizer
    assert sorted(asked) == ["bos", "plain"]


async def test_a_model_without_workers_is_503_until_one_comes(cards: Mapping[str, ModelCard], tokenizers: Path) -> None:
    known: dict[str, ModelCard] = {}
    catalog = ModelCatalog(lambda: known, lambda digest: tokenizers / digest)
    with pytest.raises(ApiError) as missing:
        await catalog.get("base")
    assert missing.value.status == 503
    assert "Retry-After" in missing.value.headers
    known["base"] = cards["base"]
    assert (await catalog.get("base")).card == cards["base"]


async def test_a_tokenizer_that_could_not_be_read_is_tried_again(
    cards: Mapping[str, ModelCard], tokenizers: Path
) -> None:
    folders = [tokenizers / "nowhere", tokenizers]
    catalog = ModelCatalog(lambda: cards, lambda digest: folders.pop(0) / digest)
    with pytest.raises(Exception, match="No such file"):
        await catalog.get("base")
    assert (await catalog.get("base")).tokenizer.longest_token > 0


async def test_a_tokenizer_that_the_blob_store_cannot_give_is_503(cards: Mapping[str, ModelCard]) -> None:
    def blob(digest: str) -> Path:
        raise BlobUnavailable("secret place does not answer")

    with pytest.raises(ApiError) as raised:
        await ModelCatalog(lambda: cards, blob).get("base")
    assert (raised.value.status, raised.value.code) == (503, "dependency_unavailable")
    assert "secret" not in raised.value.message
