"""The checker's processes: what they find, and that they cannot take more than they are given."""

import asyncio
import dataclasses
import os
import signal
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from polygraft.card import ModelCard
from polygraft.errors import ApiError
from polygraft.registry import validation
from polygraft.registry.checker import NOT_STARTED
from polygraft.registry.validation import Checkers, CheckLimits, read_verdict
from polygraft_adapters.inspection import inspect_adapter
from polygraft_adapters.types import AdapterError

from .making import CONFIG, TENSOR, WEIGHTS, config_of, eventually, files, mlx_files, weights_of, zip_of

LIMITS = CheckLimits(max_bytes=1 << 20)


@pytest.fixture
async def checkers() -> AsyncIterator[Checkers]:
    checkers = Checkers()
    yield checkers
    await checkers.close()
    assert servers() == []


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name, content in files().items():
        (folder / name).write_bytes(content)
    return folder


def servers() -> list[psutil.Process]:
    """The processes that fork."""
    return [child for child in psutil.Process().children() if "polygraft.registry.checker" in child.cmdline()]


async def refused(checkers: Checkers, folder: Path, card: ModelCard, limits: CheckLimits = LIMITS) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        await checkers.validate(folder, card, limits)
    return caught.value


async def test_they_say_what_inspection_in_this_process_says(
    checkers: Checkers, adapter: Path, card: ModelCard
) -> None:
    expected = inspect_adapter(adapter, card.modules, card.max_lora_rank)
    found = await asyncio.gather(*(checkers.validate(adapter, card, LIMITS) for _ in range(8)))
    assert found == [expected] * 8
    assert set(os.listdir(adapter)) == {CONFIG, WEIGHTS}
    assert len(servers()) == 1
    assert servers()[0].children() == []


async def test_requests_that_the_socket_has_no_room_for_at_once(
    checkers: Checkers, adapter: Path, card: ModelCard
) -> None:
    others = {f"another_projection_{number}": (4, 4) for number in range(20_000)}
    modules = dataclasses.replace(card.modules, shapes={**card.modules.shapes, **others})
    large = msgspec.structs.replace(card, modules=modules)
    found = await asyncio.gather(*(checkers.validate(adapter, large, LIMITS) for _ in range(4)))
    assert [info.rank for info in found] == [2] * 4
    assert len(servers()) == 1


async def test_an_archive_is_unpacked_first_and_again_if_that_was_cut_off(
    checkers: Checkers, tmp_path: Path, card: ModelCard
) -> None:
    archive, folder = tmp_path / "archive", tmp_path / "adapter"
    archive.write_bytes(zip_of(files()))
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(b"half")
    found = await checkers.validate(folder, card, LIMITS, archive=archive)
    assert (found.rank, found.targets) == (2, ("q_proj",))


async def test_what_mlx_wrote_is_converted_where_there_is_a_place_for_it(
    checkers: Checkers, tmp_path: Path, card: ModelCard
) -> None:
    archive, folder, converted = (tmp_path / name for name in ("archive", "adapter", "converted"))
    archive.write_bytes(zip_of(mlx_files()))
    found = await checkers.validate(folder, card, LIMITS, archive=archive, converted=converted)
    assert (found.scale, set(os.listdir(converted))) == (20.0, {CONFIG, WEIGHTS})
    assert "MLX" in str(await refused(checkers, folder, card))


async def test_everything_that_is_wrong_is_told_at_once(checkers: Checkers, adapter: Path, card: ModelCard) -> None:
    stranger = TENSOR.format("C")
    (adapter / CONFIG).write_bytes(config_of(use_qalora=True))
    (adapter / WEIGHTS).write_bytes(weights_of(**{stranger: (4, 4)}))
    error = await refused(checkers, adapter, card)
    assert {problem.where for problem in error.problems} == {"use_qalora", stranger}


async def test_values_and_ranks(checkers: Checkers, adapter: Path, card: ModelCard) -> None:
    (adapter / WEIGHTS).write_bytes(weights_of(float("inf")))
    assert "NaN or infinite" in str(await refused(checkers, adapter, card))
    (adapter / CONFIG).write_bytes(config_of(r=32))
    (adapter / WEIGHTS).write_bytes(weights_of(rank=32))
    assert "rank 32 > limit 16" in str(await refused(checkers, adapter, card))


async def test_ten_thousand_wrong_tensors_are_told_in_a_bounded_answer(
    checkers: Checkers, adapter: Path, card: ModelCard
) -> None:
    (adapter / WEIGHTS).write_bytes(weights_of(**{f"x{index}": (1, 1) for index in range(10_000)}))
    error = await refused(checkers, adapter, card)
    assert len(error.problems) <= 101
    assert "more problems" in str(error.problems[-1])


async def test_half_a_surrogate_pair_in_the_config(checkers: Checkers, adapter: Path, card: ModelCard) -> None:
    (adapter / CONFIG).write_bytes(config_of(base_model_name_or_path="\ud800"))
    assert "cannot be read" in str(await refused(checkers, adapter, card))
    (adapter / CONFIG).write_bytes(config_of())
    assert (await checkers.validate(adapter, card, LIMITS)).rank == 2


async def test_more_memory_than_they_are_given(checkers: Checkers, adapter: Path, card: ModelCard) -> None:
    header = b"[" + b"[]," * (1 << 20) + b"[]]"
    (adapter / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header)
    taken = CheckLimits(max_bytes=1 << 30, memory=1 << 20)
    assert "takes more memory" in str(await refused(checkers, adapter, card, taken))


async def test_more_time_than_they_are_given(checkers: Checkers, adapter: Path, card: ModelCard) -> None:
    limits = CheckLimits(max_bytes=1 << 20, seconds=0.02)
    archive = adapter.parent / "archive"
    os.mkfifo(archive)
    with pytest.raises(AdapterError, match="takes more time"):
        await checkers.validate(adapter, card, limits, archive=archive)
    assert servers()[0].children() == []


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (-signal.SIGXCPU, "more time"),
        (-signal.SIGALRM, "more time"),
        (-signal.SIGKILL, "more time or memory"),
        (-signal.SIGSEGV, "cannot be read"),
        (1, "cannot be read"),
    ],
)
def test_an_adapter_that_ends_its_process_is_refused(code: int, says: str) -> None:
    with pytest.raises(AdapterError, match=says):
        read_verdict(code, b"")


def test_a_process_that_could_not_be_made_is_no_verdict() -> None:
    with pytest.raises(ApiError) as caught:
        read_verdict(NOT_STARTED, b"")
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (503, "5")


async def test_a_server_that_dies_is_replaced(checkers: Checkers, adapter: Path, card: ModelCard) -> None:
    await checkers.validate(adapter, card, LIMITS)
    archive = adapter.parent / "archive"
    os.mkfifo(archive)
    stuck = asyncio.create_task(checkers.validate(adapter, card, LIMITS, archive=archive))
    (server,) = servers()

    async def forked() -> bool:
        return bool(server.children())

    await eventually(forked)
    (fork,) = server.children()
    server.kill()
    with pytest.raises(ApiError, match="just now"):
        await stuck

    async def gone() -> bool:
        return not fork.is_running()

    await eventually(gone)
    for name, content in files().items():
        (adapter / name).write_bytes(content)
    assert (await checkers.validate(adapter, card, LIMITS)).rank == 2


async def test_no_server_to_be_had(
    checkers: Checkers, adapter: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation.sys, "executable", "/nonexistent")
    with pytest.raises(ApiError) as caught:
        await checkers.validate(adapter, card, LIMITS)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (503, "5")


async def test_they_know_nothing_of_the_servers_secrets(
    checkers: Checkers, adapter: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLYGRAFT_KEY_PEPPER", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    await checkers.validate(adapter, card, LIMITS)
    environment = servers()[0].environ()
    assert "secret" not in environment.values()
    assert "POLYGRAFT_KEY_PEPPER" not in environment
