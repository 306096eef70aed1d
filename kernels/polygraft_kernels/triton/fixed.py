"""A step whose tensors stay where they are: each replay of a captured graph finds the numbers of its own step there."""

from __future__ import annotations

import torch

from polygraft_kernels.api import StepTensors
from polygraft_kernels.triton.tiles import NO_TILE, FixedGroups, most_tiles, tensor_of, tiles_of


class FixedStep:
    """Room for `rows` sequences of one row each, with `blocks` blocks. Rows without a sequence compute nothing of use
    and store nothing: they own no rows of `query_starts`, their slot mapping is -1, and no tile covers them.
    """

    def __init__(self, rows: int, blocks: int, adapters: bool, device: torch.device) -> None:
        self.rows = rows
        self.blocks = blocks
        none = torch.tensor([NO_TILE] * most_tiles(rows), dtype=torch.int32, device=device)
        self.tensors = StepTensors(
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            slot_mapping=torch.full((rows,), -1, dtype=torch.int64, device=device),
            query_starts=torch.zeros(rows + 1, dtype=torch.int32, device=device),
            context_lens=torch.zeros(rows, dtype=torch.int32, device=device),
            block_tables=torch.zeros((rows, blocks), dtype=torch.int32, device=device),
            groups=FixedGroups((0,) if adapters else (), (0, rows) if adapters else (rows,), tiles=none),
        )

    def fill(self, step: StepTensors) -> None:
        """Take over a step of at most `rows` sequences, one row each. The host does not wait."""
        mine, count = self.tensors, step.positions.shape[0]
        sequences, width = step.block_tables.shape
        assert count == sequences <= self.rows, "a captured step has one row a sequence"
        assert width <= self.blocks, "a captured step has room for the blocks of every sequence"
        mine.positions[:count].copy_(step.positions)
        mine.slot_mapping[:count].copy_(step.slot_mapping)
        mine.slot_mapping[count:].fill_(-1)
        mine.query_starts[: count + 1].copy_(step.query_starts)
        mine.query_starts[count + 1 :].fill_(count)
        mine.context_lens[:count].copy_(step.context_lens)
        mine.block_tables[:count, :width].copy_(step.block_tables)
        if mine.groups.slots:
            assert isinstance(mine.groups, FixedGroups)
            tiles = tiles_of(step.groups)
            tiles += [NO_TILE] * (most_tiles(self.rows) - len(tiles))
            mine.groups.tiles.copy_(tensor_of(tiles, mine.groups.tiles.device), non_blocking=True)
        else:
            assert not step.groups.slots, "captured without adapters"
