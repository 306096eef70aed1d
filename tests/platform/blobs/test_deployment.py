"""A worker that shares nothing with its gateway but a queue and a bucket."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.engine.bench import TINY_CONFIG, write_adapter, write_model
from tests.platform.worker.test_main import events_of, job_of, save_tokenizer, start_worker

from polygraft.blobs import blob_place
from polygraft.queue.gateway import GatewayQueue
from polygraft_adapters.inspection import inspect_adapter
from polygraft_engine.models.architecture import read_spec


@pytest.mark.slow
async def test_tokenizers_and_adapters_travel_through_the_bucket(s3: str, valkey: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny", TINY_CONFIG)
    save_tokenizer(model)
    folder = write_adapter(tmp_path / "adapter", read_spec(model), 1)
    digest = inspect_adapter(folder, read_spec(model).module_shapes("tiny"), 64).digest
    here = blob_place(s3, tmp_path / "gateway").open()
    process = start_worker(model, valkey, tmp_path / "worker", "--blob-store", s3)
    gateway = await GatewayQueue.connect(valkey, "g")
    try:
        async with asyncio.timeout(60):
            while "ready" not in {worker.state for worker in await gateway.workers()}:
                assert process.poll() is None
                await asyncio.sleep(0.05)
        card = (await gateway.cards())["tiny"]
        assert here.path(card.tokenizer).read_bytes() == (model / "tokenizer.json").read_bytes()
        absent = await gateway.open(job_of(gateway, (5, 6, 7), adapter=digest))
        error = (await events_of(absent))[-1].error
        assert error is not None
        assert (error.status, error.code) == (422, "invalid_adapter")
        await asyncio.to_thread(here.put_adapter, folder, digest)
        present = await gateway.open(job_of(gateway, (5, 6, 7), adapter=digest))
        assert (await events_of(present))[-1].error is None
    finally:
        process.kill()
        process.communicate()
        await gateway.close()
    copies = [path.name for path in (tmp_path / "worker" / "blob-cache" / "adapters").iterdir()]
    assert copies == [digest.removeprefix("sha256:")]


@pytest.mark.slow
def test_a_worker_whose_bucket_does_not_answer_says_so_and_leaves(
    s3: str, valkey: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "tiny", TINY_CONFIG)
    save_tokenizer(model)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    process = start_worker(model, valkey, tmp_path / "worker", "--blob-store", s3)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "does not answer" in said
    assert "Traceback" not in said
