"""The models that the gateway knows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polygraft.blobs import BlobUnavailable
from polygraft.card import ModelCard
from polygraft.errors import ApiError
from polygraft.openai.catalog import ModelCatalog

MakeCatalog = Callable[[Callable[[], Mapping[str, ModelCard]], Callable[[str], Path]], ModelCatalog]


@pytest.fixture
def make_catalog() -> Iterator[MakeCatalog]:
    """Catalogs that are closed after the test."""
    made: list[ModelCatalog] = []

    def make(cards: Callable[[], Mapping[str, ModelCard]], blob: Callable[[str], Path]) -> ModelCatalog:
        made.append(ModelCatalog(cards, blob))
        return made[-1]

    yield make
    for catalog in made:
        catalog.close()


async def test_a_tokenizer_is_loaded_once_however_many_ask(
    make_catalog: MakeCatalog, cards: Mapping[str, ModelCard], tokenizers: Path
) -> None:
    asked: list[str] = []

    def blob(digest: str) -> Path:
        asked.append(digest)
        return tokenizers / digest

    catalog = make_catalog(lambda: cards, blob)
    found = await asyncio.gather(*(catalog.get(name) for name in ("base", "base", "bare", "bos")))
    assert [served.card.name for served in found] == ["base", "base", "bare", "bos"]
    assert found[0].tokenizer is found[1].tokenizer is found[2].tokenizer
    assert sorted(asked) == ["bos", "plain"]


async def test_a_model_without_workers_is_503_until_one_comes(
    make_catalog: MakeCatalog, cards: Mapping[str, ModelCard], tokenizers: Path
) -> None:
    known: dict[str, ModelCard] = {}
    catalog = make_catalog(lambda: known, lambda digest: tokenizers / digest)
    with pytest.raises(ApiError) as missing:
        await catalog.get("base")
    assert missing.value.status == 503
    assert "Retry-After" in missing.value.headers
    known["base"] = cards["base"]
    assert (await catalog.get("base")).card == cards["base"]


async def test_a_tokenizer_that_could_not_be_read_is_tried_again(
    make_catalog: MakeCatalog, cards: Mapping[str, ModelCard], tokenizers: Path
) -> None:
    folders = [tokenizers / "nowhere", tokenizers]
    catalog = make_catalog(lambda: cards, lambda digest: folders.pop(0) / digest)
    with pytest.raises(Exception, match="No such file"):
        await catalog.get("base")
    assert (await catalog.get("base")).tokenizer.longest_token > 0


async def test_a_tokenizer_that_the_blob_store_cannot_give_is_503(
    make_catalog: MakeCatalog, cards: Mapping[str, ModelCard]
) -> None:
    def blob(digest: str) -> Path:
        raise BlobUnavailable("secret place does not answer")

    with pytest.raises(ApiError) as raised:
        await make_catalog(lambda: cards, blob).get("base")
    assert (raised.value.status, raised.value.code) == (503, "dependency_unavailable")
    assert "secret" not in raised.value.message


async def test_long_texts_do_not_wait_for_what_other_threads_do(
    make_catalog: MakeCatalog, cards: Mapping[str, ModelCard], tokenizers: Path
) -> None:
    occupied, release = threading.Event(), threading.Event()

    def upload() -> None:
        occupied.set()
        release.wait()

    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    uploading = asyncio.create_task(asyncio.to_thread(upload))
    try:
        async with asyncio.timeout(10):
            while not occupied.is_set():  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(0.01)
            tokenizer = (await make_catalog(lambda: cards, lambda digest: tokenizers / digest).get("base")).tokenizer
            text = "hello " * 5000
            ids = await tokenizer.encode(text, special=False)
            assert len(ids) > 5000
            assert await tokenizer.decode(ids) == text
    finally:
        release.set()
        await uploading
