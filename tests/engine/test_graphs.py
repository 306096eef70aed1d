"""Which decode steps have graphs, and that replays see their own step's numbers. The device is a stand-in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.engine.bench import Bench, generation, run
from tests.engine.test_batch import chunk
from torch import Tensor

from polygraft_adapters.weights import AdapterWeights, TableDelta, TokenRows
from polygraft_engine import runner
from polygraft_engine.batch import Batch, build_batch
from polygraft_engine.graphs import SIZES, CapturableBackend, Compute, DecodeGraphs
from polygraft_engine.models.decoder import Decoder
from polygraft_kernels.api import KVCache, StepTensors
from polygraft_kernels.triton.fixed import FixedStep

CPU = torch.device("cpu")


class Device:
    """A backend that captures, and counts captures: a captured computation is computed again."""

    device = CPU
    captures = True

    def __init__(self) -> None:
        self.capture_key = 16
        self.captured = 0
        self.seen: list[StepTensors] = []

    def fixed_step(self, rows: int, blocks: int, adapters: bool) -> FixedStep:
        return FixedStep(rows, blocks, adapters, CPU)

    def capture(self, compute: Compute) -> Compute:
        self.captured += 1
        compute()
        return compute

    def forward(self, token_ids: Tensor, step: StepTensors) -> Tensor:
        """Rows that tell of everything a row has."""
        self.seen.append(step)
        last = step.block_tables.gather(1, ((step.context_lens.long() - 1).clamp(min=0) // 4)[:, None])
        parts = (token_ids, step.positions, step.slot_mapping, step.context_lens, last[:, 0])
        return torch.stack([part.long() for part in parts], dim=1)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def graphs(device: Device) -> DecodeGraphs:
    assert isinstance(device, CapturableBackend)
    return DecodeGraphs(device.forward, device, 4, device.capture)


def decode(*rows: tuple[int, int]) -> Batch:
    """(position, slot) of each sequence, a block per four tokens."""
    chunks = [
        chunk(str(index), position, 1, tuple(range(index, index + position // 4 + 1)), slot, True)
        for index, (position, slot) in enumerate(rows)
    ]
    return build_batch(chunks, 4, CPU)


def test_only_steps_of_one_row_a_sequence_have_graphs(graphs: DecodeGraphs) -> None:
    assert graphs.cover(decode((5, -1), (9, 0)))
    assert not graphs.cover(build_batch([chunk("prefill", 0, 3, (0,), -1, True)], 4, CPU))
    assert graphs.cover(decode(*[(1, -1)] * SIZES[-1]))
    assert not graphs.cover(decode(*[(1, -1)] * (SIZES[-1] + 1)))


def test_a_replay_computes_its_own_steps_rows(graphs: DecodeGraphs, device: Device) -> None:
    for rows in ([(5, -1), (9, 0), (2, 3)], [(30, 1), (7, 1), (8, 1), (9, 1)], [(1, 0), (40, 2), (2, 5)]):
        batch = decode(*rows)
        assert torch.equal(graphs.forward(batch), device.forward(batch.token_ids, batch.step))
    assert len(graphs) == device.captured == 1


def test_rows_without_a_sequence_store_nothing_and_have_no_tile(graphs: DecodeGraphs, device: Device) -> None:
    graphs.forward(decode((5, 0), (9, 0), (2, 3), (3, 3)))
    graphs.forward(decode((6, -1), (2, 2), (3, 2)))
    step = device.seen[-1]
    assert step.slot_mapping.tolist()[3:] == [-1]
    assert step.query_starts.tolist() == [0, 1, 2, 3, 3]
    assert step.groups.tiles.tolist() == [[2, 1, 2], [-1, 0, 0], [-1, 0, 0], [-1, 0, 0]]


def test_sizes_contexts_and_adapters_have_graphs_of_their_own(graphs: DecodeGraphs) -> None:
    for rows, count in (
        ([(5, -1)], 1),
        ([(9, -1)], 1),
        ([(5, 0)], 2),
        ([(5, -1), (5, -1)], 3),
        ([(2047, -1)], 3),
        ([(2048, -1)], 4),
        ([(4000, -1)], 4),
    ):
        graphs.forward(decode(*rows))
        assert len(graphs) == count, rows


def test_a_larger_rank_makes_all_graphs_anew(graphs: DecodeGraphs, device: Device) -> None:
    graphs.forward(decode((5, 0)))
    graphs.forward(decode((5, -1)))
    device.capture_key = 32
    graphs.forward(decode((6, 0)))
    assert len(graphs) == 1
    assert device.captured == 3


def test_steps_that_cannot_be_captured_run_as_they_are(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(compute: Compute) -> Compute:
        device.captured += 1
        raise RuntimeError("out of memory")

    graphs = DecodeGraphs(device.forward, device, 4, refuse)
    for rows in ([(5, -1), (9, 0)], [(6, -1), (10, 0)]):
        batch = decode(*rows)
        assert torch.equal(graphs.forward(batch), device.forward(batch.token_ids, batch.step))
    assert len(graphs) == 0
    assert device.captured == 1
    assert "cannot be captured" in caplog.text


def test_rows_that_embed_otherwise_than_the_base_run_without_a_graph(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Graphs:
        """Counts the decode steps that it is given, and computes them as they are."""

        def __init__(self, decoder: Decoder, caches: Sequence[KVCache]) -> None:
            self._decoder, self._caches = decoder, caches
            self.steps = 0

        def cover(self, batch: Batch) -> bool:
            return batch.rows == len(batch.chunks)

        def forward(self, batch: Batch) -> Tensor:
            self.steps += 1
            return self._decoder.forward(self._decoder.embed(batch.token_ids), batch.step, self._caches)

    made: list[Graphs] = []

    def graphs(decoder: Decoder, caches: Sequence[KVCache]) -> Graphs:
        made.append(Graphs(decoder, caches))
        return made[-1]

    monkeypatch.setattr(runner, "_decode_graphs", graphs)
    source = bench.source()
    engine = bench.engine(source=source)
    token = TokenRows((5,), torch.ones(1, bench.spec.hidden))
    plain = bench.weights("a1")
    source.put(plain)
    info = replace(plain.info, digest="retrained")
    source.put(AdapterWeights(info, plain.pairs, tables={"embed_tokens": TableDelta(tokens=token)}))

    def steps(*adapters: str | None) -> int:
        before = made[0].steps
        run(engine, [generation(str(adapter), (5, 6, 7), adapter, max_tokens=4) for adapter in adapters])
        return made[0].steps - before

    assert steps(None, plain.info.digest) == 3
    assert steps(None, "retrained") == 0
    assert steps("retrained", plain.info.digest) == 0
