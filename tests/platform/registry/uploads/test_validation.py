"""The checker's process: what it finds, and that it cannot take more than it is given."""

import asyncio
import itertools
import os
import sys
from pathlib import Path

import psutil
import pytest

from polygraft import process
from polygraft.card import ModelCard
from polygraft.errors import ApiError
from polygraft.registry import validation
from polygraft.registry.validation import CheckLimits, validate
from polygraft_adapters.inspection import inspect_adapter
from polygraft_adapters.types import AdapterError

from .making import CONFIG, TENSOR, WEIGHTS, config_of, files, weights_of, zip_of

LIMITS = CheckLimits(max_bytes=1 << 20)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in files().items():
        (folder / name).write_bytes(content)
    return folder


def checkers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "polygraft.registry.checker" in child.cmdline()]


async def running() -> psutil.Process:
    """The checker, once it has become itself."""
    async with asyncio.timeout(30):
        for _ in itertools.count():
            if found := checkers():
                return found[0]
            await asyncio.sleep(0.01)
    raise AssertionError


async def refused(folder: Path, card: ModelCard, limits: CheckLimits = LIMITS, **options: Path) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        await validate(folder, card, limits, **options)
    assert checkers() == []
    return caught.value


async def test_it_says_what_inspection_in_this_process_says(adapter: Path, card: ModelCard) -> None:
    found = await validate(adapter, card, LIMITS)
    assert found == inspect_adapter(adapter, card.modules, card.max_lora_rank)
    assert set(os.listdir(adapter)) == {CONFIG, WEIGHTS}
    assert checkers() == []


async def test_an_archive_is_unpacked_first_and_again_if_that_was_cut_off(tmp_path: Path, card: ModelCard) -> None:
    archive, folder = tmp_path / "archive", tmp_path / "adapter"
    archive.write_bytes(zip_of(files()))
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(b"half")
    found = await validate(folder, card, LIMITS, archive=archive)
    assert (found.rank, found.targets) == (2, ("q_proj",))


async def test_everything_that_is_wrong_is_told_at_once(adapter: Path, card: ModelCard) -> None:
    stranger = TENSOR.format("C")
    (adapter / CONFIG).write_bytes(config_of(use_qalora=True))
    (adapter / WEIGHTS).write_bytes(weights_of(**{stranger: (4, 4)}))
    error = await refused(adapter, card)
    assert {problem.where for problem in error.problems} == {"use_qalora", stranger}


async def test_values_ranks_and_shapes(adapter: Path, card: ModelCard) -> None:
    (adapter / WEIGHTS).write_bytes(weights_of(float("inf")))
    assert "NaN or infinite" in str(await refused(adapter, card))
    (adapter / CONFIG).write_bytes(config_of(r=32))
    (adapter / WEIGHTS).write_bytes(weights_of(rank=32))
    assert "rank 32 > limit 16" in str(await refused(adapter, card))


async def test_ten_thousand_wrong_tensors_are_told_in_a_bounded_answer(adapter: Path, card: ModelCard) -> None:
    (adapter / WEIGHTS).write_bytes(weights_of(**{f"x{index}": (1, 1) for index in range(10_000)}))
    error = await refused(adapter, card)
    assert len(error.problems) <= 101
    assert "more problems" in str(error.problems[-1])


async def test_half_a_surrogate_pair_in_the_config(adapter: Path, card: ModelCard) -> None:
    (adapter / CONFIG).write_bytes(config_of(base_model_name_or_path="\ud800"))
    assert "cannot be read" in str(await refused(adapter, card))


@pytest.mark.slow
async def test_more_memory_than_it_is_given(adapter: Path, card: ModelCard) -> None:
    (adapter / WEIGHTS).write_bytes(
        (16 << 20).to_bytes(8, "little") + b"[" + b"[]," * (5 << 20) + b"]" + bytes(1 << 20)
    )
    error = await refused(adapter, card, CheckLimits(max_bytes=1 << 30, memory=400 << 20))
    assert "takes more memory" in str(error)


async def test_more_time_than_it_is_given(adapter: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_CLOCK", 0)
    assert "takes more time" in str(await refused(adapter, card))


async def test_more_of_a_processor_than_it_is_given(
    adapter: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    spins = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass"
    monkeypatch.setattr(validation, "_child", lambda request, fd: process.ChildSpec("x", (sys.executable, "-c", spins)))
    assert "takes more time or memory" in str(await refused(adapter, card))


@pytest.mark.parametrize("how", ["raise SystemExit(1)", "import os; os.abort()", "import os; os.kill(os.getpid(), 11)"])
async def test_a_checker_that_dies_of_an_adapter(
    adapter: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(validation, "_child", lambda request, fd: process.ChildSpec("x", (sys.executable, "-c", how)))
    assert "cannot be read" in str(await refused(adapter, card))


async def test_a_checker_that_cannot_be_started(
    adapter: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "_child", lambda request, fd: process.ChildSpec("x", ("/nonexistent",)))
    with pytest.raises(ApiError) as caught:
        await validate(adapter, card, LIMITS)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (503, "5")


async def test_it_ends_with_whoever_waits_for_it(adapter: Path, card: ModelCard) -> None:
    task = asyncio.create_task(validate(adapter, card, LIMITS))
    await running()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert checkers() == []


async def test_it_knows_nothing_of_the_servers_secrets(
    adapter: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYGRAFT_KEY_PEPPER", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    task = asyncio.create_task(validate(adapter, card, LIMITS))
    environment = (await running()).environ()
    await task
    assert "secret" not in environment.values()
    assert "POLYGRAFT_KEY_PEPPER" not in environment


async def test_checking_is_quick(adapter: Path, card: ModelCard) -> None:
    used = os.times()
    await validate(adapter, card, LIMITS)
    after = os.times()
    assert after.children_user + after.children_system - used.children_user - used.children_system < 2.0
