"""The worker process over a real queue and a tiny random model."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engine.bench import TINY_CONFIG, write_adapter, write_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polygraft.blobs import BlobStore
from polygraft.queue.gateway import GatewayQueue, JobStream
from polygraft.queue.messages import Job, JobEvent
from polygraft.supervisor import CONFIG_EXIT_CODE
from polygraft.valkey import PrivateValkey
from polygraft_adapters.inspection import inspect_adapter
from polygraft_engine.llm import LLM
from polygraft_engine.models.architecture import read_spec
from polygraft_engine.types import SamplingParams

GREEDY = SamplingParams(max_tokens=12, seed=0, temperature=0.0, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=240)


@dataclass(frozen=True)
class Running:
    """A worker process, and what it works on."""

    process: subprocess.Popen[str]
    redis_url: str
    model: Path
    adapters: dict[str, str]
    """Name -> digest."""
    offline: LLM
    blobs: BlobStore


def save_tokenizer(folder: Path) -> None:
    """Bytes are tokens, as far as 128 of them reach."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:125]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: index + 3 for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def start_worker(model: Path, redis_url: str, data: Path, *options: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "polygraft",
        "worker",
        str(model),
        "--redis-url",
        redis_url,
        "--data-dir",
        str(data),
    ]
    options = ("--kernels", "reference", "--max-num-seqs", "8", "--kv-cache-memory", "4MiB", *options)
    return subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("worker")
    model = write_model(root / "tiny", TINY_CONFIG)
    save_tokenizer(model)
    spec = read_spec(model)
    blobs = BlobStore(root / "data" / "blobs")
    adapters = {}
    for seed, name in enumerate(("a1", "a2", "a3")):
        folder = write_adapter(root / name, spec, seed)
        adapters[name] = inspect_adapter(folder, spec.module_shapes("tiny"), 64).digest
        blobs.put_adapter(folder, adapters[name])
    valkey = PrivateValkey(root / "v")
    valkey.start()
    process = start_worker(model, valkey.url, root / "data")
    offline = LLM(model, kernels="reference", kv_cache_memory=1 << 22)
    for name in adapters:
        offline.load_adapter(root / name)
    yield Running(process, valkey.url, model, adapters, offline, blobs)
    process.kill()
    process.communicate()
    valkey.stop()


@pytest.fixture
async def gateway(running: Running) -> AsyncIterator[GatewayQueue]:
    queue = await GatewayQueue.connect(running.redis_url, f"g{time.time()}")
    async with asyncio.timeout(60):
        while ("tiny", "ready") not in {(worker.model, worker.state) for worker in await queue.workers()}:
            assert running.process.poll() is None
            await asyncio.sleep(0.05)
    yield queue
    await queue.close()


_ids = iter(range(10**6))


def job_of(
    gateway: GatewayQueue, *prompts: tuple[int, ...], params: SamplingParams = GREEDY, adapter: str | None = None
) -> Job:
    return Job(
        id=f"job-{next(_ids)}",
        model="tiny",
        tenant="t",
        gateway=gateway.gateway_id,
        adapter=adapter,
        prompts=prompts,
        params=params,
        cache_namespace="t",
        submitted_at=time.time(),
    )


async def events_of(stream: JobStream) -> list[JobEvent]:
    async with asyncio.timeout(30):
        return [arrived.event async for arrived in stream]


def text_of(events: list[JobEvent], index: int = 0) -> str:
    return "".join(delta.text for event in events for delta in event.deltas if delta.index == index)


async def idle(gateway: GatewayQueue) -> None:
    """Wait until the worker's heartbeat says that it holds nothing."""
    async with asyncio.timeout(5):
        while True:
            [status] = await gateway.workers()
            if status.running == status.waiting == 0 and status.kv_blocks_free == status.kv_blocks_total:
                return
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_the_card_is_what_the_gateway_needs(running: Running, gateway: GatewayQueue) -> None:
    card = (await gateway.cards())["tiny"]
    assert (card.name, card.vocab_size, card.max_model_len, card.eos_token_ids) == ("tiny", 128, 256, (2,))
    assert card.numerics_id == running.offline.engine.info.numerics_id
    assert running.blobs.path(card.tokenizer).read_text() == running.offline.tokenizer_files.tokenizer_json


@pytest.mark.slow
async def test_base_and_adapters_answer_as_the_engine_alone(running: Running, gateway: GatewayQueue) -> None:
    prompt = tuple(range(10, 40))
    names = [None, "a1", "a2", "a3", None, "a1"]
    streams = [
        await gateway.open(job_of(gateway, prompt, adapter=None if name is None else running.adapters[name]))
        for name in names
    ]
    answers = [await events_of(stream) for stream in streams]
    for name, events in zip(names, answers, strict=True):
        [alone] = running.offline.generate(prompt, GREEDY, None if name is None else running.model.parent / name)
        tokens = tuple(token for event in events for delta in event.deltas for token in delta.token_ids)
        assert (text_of(events), tokens) == (alone.text, alone.token_ids), name
        usage = events[-1].usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (30, 12)
        assert [delta.finish_reason for delta in events[-1].deltas] == ["length"]
    assert len({text_of(events) for events in answers}) == 4


@pytest.mark.slow
async def test_prompts_count_once_whatever_n_is(gateway: GatewayQueue) -> None:
    params = dataclasses.replace(GREEDY, n=3, temperature=1.0, seed=7)
    stream = await gateway.open(job_of(gateway, (5, 6, 7), (8, 9), params=params))
    events = await events_of(stream)
    ended = [delta.index for event in events for delta in event.deltas if delta.finish_reason is not None]
    assert sorted(ended) == [0, 1, 2, 3, 4, 5]
    usage = events[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 72)
    assert len({text_of(events, index) for index in range(3)}) == 3


@pytest.mark.slow
async def test_a_stop_string_ends_the_generation_in_the_engine_too(running: Running, gateway: GatewayQueue) -> None:
    [alone] = running.offline.generate((5, 6, 7), LONG)
    stop = alone.text[4:6]
    stream = await gateway.open(job_of(gateway, (5, 6, 7), params=dataclasses.replace(LONG, stop=(stop,))))
    events = await events_of(stream)
    assert text_of(events) == alone.text[: alone.text.index(stop)]
    assert events[-1].deltas[-1].stop_reason == stop
    await idle(gateway)


@pytest.mark.slow
async def test_a_job_that_cannot_be_served_costs_nobody_else_anything(running: Running, gateway: GatewayQueue) -> None:
    good = await gateway.open(job_of(gateway, (5, 6, 7)))
    wrong = await gateway.open(job_of(gateway, (5, 999)))
    absent = await gateway.open(job_of(gateway, (5, 6, 7), adapter="sha256:" + "0" * 64))
    assert (await events_of(good))[-1].error is None
    [refused] = await events_of(wrong)
    assert refused.error is not None
    assert (refused.error.status, refused.error.param) == (400, "prompt")
    [failed] = await events_of(absent)
    assert failed.error is not None
    assert (failed.error.status, failed.error.code) == (422, "invalid_adapter")
    await idle(gateway)


@pytest.mark.slow
async def test_a_damaged_adapter_costs_nobody_else_anything_and_is_mended_by_an_upload(
    running: Running, gateway: GatewayQueue, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "fragile", read_spec(running.model), 77)
    digest = inspect_adapter(folder, read_spec(running.model).module_shapes("tiny"), 64).digest
    weights = running.blobs.put_adapter(folder, digest) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    broken = await gateway.open(job_of(gateway, (5, 6, 7), adapter=digest))
    good = await gateway.open(job_of(gateway, (5, 6, 7), adapter=running.adapters["a1"]))
    [failed] = await events_of(broken)
    assert failed.error is not None
    assert (failed.error.status, failed.error.code) == (422, "invalid_adapter")
    assert (await events_of(good))[-1].error is None
    running.blobs.put_adapter(folder, digest)
    mended = await gateway.open(job_of(gateway, (5, 6, 7), adapter=digest))
    assert (await events_of(mended))[-1].error is None


@pytest.mark.slow
async def test_cancelling_frees_everything_and_aborts_once(gateway: GatewayQueue) -> None:
    params = dataclasses.replace(LONG, n=2)
    for _ in range(20):
        stream = await gateway.open(job_of(gateway, (5, 6, 7), params=params))
        first = await anext(stream)
        await stream.cancel()
        events = [first.event, *await events_of(stream)]
        finishes = [delta.finish_reason for event in events for delta in event.deltas if delta.finish_reason]
        assert finishes == ["abort", "abort"]
        usage = events[-1].usage
        assert usage is not None
        assert 2 <= usage.completion_tokens < 480
    await idle(gateway)


@pytest.mark.slow
async def test_a_vanished_gateway_leaves_nothing_running(running: Running, gateway: GatewayQueue) -> None:
    other = await GatewayQueue.connect(running.redis_url, "gone")
    for _ in range(3):
        await other.open(job_of(other, (5, 6, 7), params=LONG))
    await other.close()
    await idle(gateway)


@pytest.mark.slow
async def test_other_models_may_not_take_the_name(running: Running, gateway: GatewayQueue, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny", TINY_CONFIG, seed=1)
    save_tokenizer(model)
    process = start_worker(model, running.redis_url, tmp_path / "data")
    _, said = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == CONFIG_EXIT_CODE
    assert "--served-model-name" in said


@pytest.mark.slow
async def test_sigterm_finishes_what_runs_and_leaves(running: Running, gateway: GatewayQueue) -> None:
    streams = [await gateway.open(job_of(gateway, (5, 6, 7), params=LONG)) for _ in range(4)]
    for stream in streams:
        await anext(stream)
    running.process.send_signal(signal.SIGTERM)
    for stream in streams:
        events = await events_of(stream)
        assert [delta.finish_reason for delta in events[-1].deltas] == ["length"]
    assert await asyncio.to_thread(running.process.wait, 20) == 0
    assert await gateway.workers() == []


@pytest.mark.slow
def test_a_wrong_model_path_is_a_configuration_error(valkey: str, tmp_path: Path) -> None:
    process = start_worker(tmp_path / "nowhere", valkey, tmp_path / "data")
    _, said = process.communicate(timeout=60)
    assert process.returncode == CONFIG_EXIT_CODE
    assert "nowhere does not exist" in said
    assert "Traceback" not in said


@pytest.mark.slow
async def test_what_is_not_done_in_time_fails_and_says_so(valkey: str, running: Running, tmp_path: Path) -> None:
    process = start_worker(running.model, valkey, tmp_path / "data", "--drain-timeout", "0")
    gateway = await GatewayQueue.connect(valkey, "g")
    stream = await gateway.open(job_of(gateway, (5, 6, 7), params=LONG))
    first = await anext(stream)
    process.send_signal(signal.SIGTERM)
    events = [first.event, *await events_of(stream)]
    assert events[-1].error is not None
    assert (events[-1].error.status, events[-1].error.code) == (503, "overloaded")
    assert await asyncio.to_thread(process.wait, 20) == 0
    process.communicate()
    await gateway.close()
