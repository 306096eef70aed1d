"""A plan as tensors."""

from __future__ import annotations

import torch
from tests.engine.bench import generation

from polygraft_engine.batch import build_batch
from polygraft_engine.kv.pool import BlockPool
from polygraft_engine.kv.table import BlockTable
from polygraft_engine.plan import Chunk
from polygraft_engine.request import Sequence

CPU = torch.device("cpu")


def chunk(
    id: str, start: int, count: int, blocks: tuple[int, ...], slot: int, samples: bool, **params: object
) -> Chunk:
    """`count` tokens 10 * position, from `start` on, of a prompt as long as they reach."""
    tokens = [10 * position for position in range(start + count)]
    sequence = Sequence(generation(id, tokens, **params), tokens, BlockTable(BlockPool(1, 4), tokens, None), 0, 0.0)
    return Chunk(id, start, tuple(tokens[start:]), blocks, slot, samples, sequence)


def test_every_tensor_of_a_mixed_step() -> None:
    chunks = [
        chunk("base", 4, 1, (7, 2), -1, True),
        chunk("prefill", 0, 3, (5,), 0, False),
        chunk("same slot", 9, 1, (1, 3, 6), 0, True),
        chunk("other slot", 2, 4, (0, 9), 2, True),
    ]
    batch = build_batch(chunks, 4, CPU)
    assert batch.rows == 9
    assert batch.token_ids.tolist() == [40, 0, 10, 20, 90, 20, 30, 40, 50]
    assert batch.step.positions.tolist() == [4, 0, 1, 2, 9, 2, 3, 4, 5]
    assert batch.step.slot_mapping.tolist() == [8, 20, 21, 22, 25, 2, 3, 36, 37]
    assert batch.step.query_starts.tolist() == [0, 1, 4, 5, 9]
    assert batch.step.context_lens.tolist() == [5, 3, 10, 6]
    assert batch.step.block_tables.tolist() == [[7, 2, 0], [5, 0, 0], [1, 3, 6], [0, 9, 0]]
    assert batch.step.groups.slots == (0, 2)
    assert batch.step.groups.starts == (1, 5, 9)
    assert batch.sampling == (chunks[0], chunks[2], chunks[3])
    assert batch.sample_rows.tolist() == [0, 4, 8]
    assert batch.scored == ()


def test_dtypes_are_those_of_the_kernels() -> None:
    batch = build_batch([chunk("a", 0, 3, (0,), -1, True)], 4, CPU)
    step = batch.step
    assert {batch.token_ids.dtype, batch.sample_rows.dtype, step.positions.dtype, step.slot_mapping.dtype} == {
        torch.int64
    }
    assert {step.query_starts.dtype, step.context_lens.dtype, step.block_tables.dtype} == {torch.int32}


def test_base_rows_only_make_no_groups() -> None:
    groups = build_batch([chunk("a", 0, 3, (0,), -1, True), chunk("b", 0, 2, (1,), -1, True)], 4, CPU).step.groups
    assert groups.slots == ()


def test_adapter_rows_only_start_at_zero() -> None:
    groups = build_batch([chunk("a", 0, 3, (0,), 1, True)], 4, CPU).step.groups
    assert (groups.slots, groups.starts) == ((1,), (0, 3))


def test_scored_rows_predict_the_next_prompt_token() -> None:
    whole = chunk("whole", 0, 4, (0,), -1, True, prompt_logprobs=1)
    later = chunk("later", 2, 2, (1,), -1, True, prompt_logprobs=1)
    last = chunk("last", 3, 1, (2,), -1, True, prompt_logprobs=1)
    batch = build_batch([whole, later, last], 4, CPU)
    assert [(scored.chunk.id, scored.first, scored.targets) for scored in batch.scored] == [
        ("whole", 0, (10, 20, 30)),
        ("later", 4, (30,)),
        ("last", 6, ()),
    ]


def test_nothing_is_scored_once_there_is_output() -> None:
    decode = chunk("a", 3, 1, (0,), -1, True, prompt_logprobs=1)
    decode.sequence.tokens.append(5)
    assert build_batch([decode], 4, CPU).scored == ()
