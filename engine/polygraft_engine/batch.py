"""A Plan as the tensors of one step, built once on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polygraft_engine.plan import Chunk
from polygraft_kernels.api import LoraGroups, StepTensors


@dataclass(frozen=True, slots=True)
class Scored:
    """Rows first .. first + len(targets) - 1 of a step predict these prompt tokens, whose logprobs are wanted.

    No targets: the chunk holds the prompt's last token only, whose row predicts the output.
    """

    chunk: Chunk
    first: int
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Rows lie in the order of `chunks`: by adapter slot, the base model first."""

    chunks: tuple[Chunk, ...]
    token_ids: Tensor
    """int64 [T]"""
    step: StepTensors
    sampling: tuple[Chunk, ...]
    """The chunks whose last row yields a token."""
    sample_rows: Tensor
    """int64 [R], one row per chunk in `sampling`."""
    sample_groups: LoraGroups
    """Of these R rows."""
    scored: tuple[Scored, ...]

    @property
    def rows(self) -> int:
        """T: how many tokens the step computes."""
        return self.token_ids.shape[0]


def build_batch(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> Batch:
    """The Batch of `chunks`, which are ordered by slot with the base model first, and not empty."""
    counts = np.fromiter((len(chunk.token_ids) for chunk in chunks), np.int64, len(chunks))
    starts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    query_starts = np.zeros(len(chunks) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])
    token_ids = np.fromiter((token for chunk in chunks for token in chunk.token_ids), np.int64, int(query_starts[-1]))

    tables = np.zeros((len(chunks), max(len(chunk.blocks) for chunk in chunks)), np.int32)
    for row, chunk in zip(tables, chunks, strict=True):
        row[: len(chunk.blocks)] = chunk.blocks

    owner = np.repeat(np.arange(len(chunks)), counts)
    positions = np.arange(token_ids.shape[0]) + (starts - query_starts[:-1])[owner]
    slot_mapping = tables[owner, positions // block_size].astype(np.int64) * block_size + positions % block_size

    def tensor(array: np.ndarray) -> Tensor:
        host = torch.from_numpy(array)
        # from pinned memory the host need not wait for the copy
        return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)

    sampling = tuple(chunk for chunk in chunks if chunk.samples)
    last_rows = (query_starts[1:] - 1)[[chunk.samples for chunk in chunks]]
    return Batch(
        chunks=tuple(chunks),
        token_ids=tensor(token_ids),
        step=StepTensors(
            positions=tensor(positions),
            slot_mapping=tensor(slot_mapping),
            query_starts=tensor(query_starts.astype(np.int32)),
            context_lens=tensor((starts + counts).astype(np.int32)),
            block_tables=tensor(tables),
            groups=_groups(chunks, query_starts.tolist()),
        ),
        sampling=sampling,
        sample_rows=tensor(last_rows),
        sample_groups=_groups(sampling, range(len(sampling) + 1)),
        scored=_scored(chunks, query_starts.tolist()),
    )


def one_group(slot: int, rows: int) -> LoraGroups:
    """All of `rows` rows in one slot; -1 is the base."""
    return LoraGroups() if slot < 0 else LoraGroups((slot,), (0, rows))


def _groups(chunks: Sequence[Chunk], query_starts: Sequence[int]) -> LoraGroups:
    slots: list[int] = []
    starts: list[int] = []
    previous = -1
    for chunk, first in zip(chunks, query_starts, strict=False):
        assert chunk.slot >= previous, "chunks are not ordered by slot"
        if chunk.slot != previous:
            slots.append(chunk.slot)
            starts.append(first)
            previous = chunk.slot
    return LoraGroups(tuple(slots), (*starts, query_starts[-1]))


def _scored(chunks: Sequence[Chunk], query_starts: Sequence[int]) -> tuple[Scored, ...]:
    """Rows that predict prompt tokens, of sequences that asked for prompt logprobs and have no output yet."""
    scored: list[Scored] = []
    for chunk, first in zip(chunks, query_starts, strict=False):
        sequence = chunk.sequence
        if sequence.generation.params.prompt_logprobs is None or sequence.output_length > 0:
            continue
        last = min(chunk.start + chunk.count, sequence.prompt_length - 1)
        scored.append(Scored(chunk, first, tuple(sequence.tokens[chunk.start + 1 : last + 1])))
    return tuple(scored)
