"""The tile list of a step: which rows of which adapter slot one program works on. Made on the host, from host integers.

A tile is (slot, first row, rows): at most ROWS rows of one slot. How deep the work of a tile is, its adapter's exact
rank, the kernels read from the bank. The list is compact: as many tiles as the rows need, whatever slots exist. Lists
of a fixed length, for a captured graph, end with tiles of slot -1, at which a program stops at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polygraft_kernels.api import LoraGroups

ROWS = 16
"""Rows of a tile: the least that matrix units multiply."""

Tile = tuple[int, int, int]
NO_TILE: Tile = (-1, 0, 0)


def tiles_of(groups: LoraGroups) -> list[Tile]:
    """Tiles in the order of the rows; base rows and empty groups have none."""
    return [
        (slot, first, min(ROWS, end - first))
        for slot, start, end in zip(groups.slots, groups.starts, groups.starts[1:], strict=False)
        for first in range(start, end, ROWS)
    ]


def most_tiles(rows: int) -> int:
    """How many tiles `rows` rows can have at most: one each."""
    return rows


def tensor_of(tiles: Sequence[Tile], device: torch.device) -> Tensor:
    """int32 [tiles, 3] on `device`; the host does not wait."""
    return to_device(torch.tensor(tiles, dtype=torch.int32, device="cpu").view(-1, 3), device)


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy of `host` on `device`, made without waiting for it."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FixedGroups(LoraGroups):
    """Groups whose tile list lies in a buffer that later steps overwrite; slots and starts only say that there are
    some.
    """

    tiles: Tensor
    """int32 [most_tiles(rows), 3]"""
