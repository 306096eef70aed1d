"""The operations again, independent of any backend: float64, loops where they are clearest; and how close is close."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polygraft_kernels.api import Affine, LoraGroups, LoraPair, StepTensors

ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def assert_close(got: Tensor, expected: Tensor, steps: float = 1.0) -> None:
    """got (of its dtype) is the float64 `expected`, but for `steps` roundings and float32 sums of the largest."""
    assert got.shape == expected.shape
    if got.numel() == 0:
        return
    error = (got.double() - expected).abs()
    allowed = steps * ULP[got.dtype] * expected.abs() + 1e-5 * expected.abs().max()
    worst = (error - allowed).argmax()
    assert bool((error <= allowed).all()), f"{got.flatten()[worst]} is not {expected.flatten()[worst]}"


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Normal numbers of `dtype`."""
    return (torch.randn(*shape) * scale).to(dtype)


def lora(y: Tensor, x: Tensor, slots: Sequence[Sequence[LoraPair | None]], groups: LoraGroups) -> Tensor:
    """y plus the deltas; `slots` are what the bank's slots hold. Float64."""
    out = y.double()
    for group, slot in enumerate(groups.slots):
        for row in range(groups.starts[group], groups.starts[group + 1]):
            first = 0
            for pair, width in zip(slots[slot], _widths(slots), strict=True):
                if pair is not None:
                    delta = pair.scale * (pair.b.double() @ (pair.a.double() @ x[row].double()))
                    out[row, first : first + width] += delta
                first += width
    return out


def affine(
    y: Tensor, slots: Sequence[Sequence[Affine | None] | None], segments: Sequence[int], groups: LoraGroups
) -> Tensor:
    """gain * y + shift; `slots` are the affines that the bank's slots hold. Float64."""
    out = y.clone()
    for group, slot in enumerate(groups.slots):
        first = 0
        for mine, width in zip(slots[slot] or (), segments, strict=False):
            part = out[groups.starts[group] : groups.starts[group + 1], first : first + width]
            if mine is not None and mine.gain is not None:
                part *= mine.gain.float().double()
            if mine is not None and mine.shift is not None:
                part += mine.shift.float().double()
            first += width
    return out


def _widths(slots: Sequence[Sequence[LoraPair | None]]) -> list[int]:
    return [next(pairs[i].b.shape[0] for pairs in slots if pairs[i] is not None) for i in range(len(slots[0]))]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of a step: `stored` tokens were there before, `new` come now; keys and values of all of them."""

    stored: tuple[int, ...]
    new: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def rows(self) -> int:
        return sum(self.new)


def sequences(stored: Sequence[int], new: Sequence[int], kv_heads: int, head_dim: int, dtype: torch.dtype) -> Sequences:
    """Random ones."""
    totals = [a + b for a, b in zip(stored, new, strict=True)]
    keys = tuple(random(total, kv_heads, head_dim, dtype=dtype) for total in totals)
    values = tuple(random(total, kv_heads, head_dim, dtype=dtype) for total in totals)
    return Sequences(tuple(stored), tuple(new), keys, values)


def step_of(all_of: Sequences, block_size: int, num_blocks: int, groups: LoraGroups | None = None) -> StepTensors:
    """The step that computes the new tokens, over scattered blocks. Block 0 belongs to nobody."""
    ids = (torch.randperm(num_blocks - 1) + 1).tolist()
    totals = [a + b for a, b in zip(all_of.stored, all_of.new, strict=True)]
    widest = max(-(-total // block_size) for total in totals)
    tables = torch.zeros(len(totals), widest, dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    for sequence, total in enumerate(totals):
        mine = [ids.pop() for _ in range(-(-total // block_size))]
        tables[sequence, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        for position in range(all_of.stored[sequence], total):
            positions.append(position)
            slots.append(mine[position // block_size] * block_size + position % block_size)
    starts = torch.tensor([0, *all_of.new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return StepTensors(
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(slots, dtype=torch.int64),
        starts,
        torch.tensor(totals, dtype=torch.int32),
        tables,
        LoraGroups() if groups is None else groups,
    )


def slots_of(step: StepTensors, sequence: int, positions: range, block_size: int) -> Tensor:
    """Where these positions of a sequence are stored."""
    at = torch.tensor(list(positions), dtype=torch.int64)
    return step.block_tables[sequence].long()[at // block_size] * block_size + at % block_size


def attention(q: Tensor, all_of: Sequences, window: int | None) -> Tensor:
    """[T, H, D] float64, one query vector at a time."""
    out = torch.empty(q.shape, dtype=torch.float64)
    row = 0
    for stored, new, keys, values in zip(all_of.stored, all_of.new, all_of.keys, all_of.values, strict=True):
        share = q.shape[1] // keys.shape[1]
        for position in range(stored, stored + new):
            first = 0 if window is None else max(0, position - window + 1)
            for head in range(q.shape[1]):
                seen = keys[first : position + 1, head // share].double()
                scores = seen @ q[row, head].double() / math.sqrt(q.shape[2])
                out[row, head] = scores.softmax(0) @ values[first : position + 1, head // share].double()
            row += 1
    return out


def rope(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """[T, heads, D] float64 rotated, as a product of complex numbers."""
    half = x.shape[2] // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:].double())
    turn = torch.complex(table[positions, 0].double(), table[positions, 1].double()).unsqueeze(1)
    return torch.cat(((turned * turn).real, (turned * turn).imag), dim=-1)


def rope_table(positions: int, head_dim: int) -> Tensor:
    """float32 [P, 2, D / 2], base 10000."""
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return torch.stack((angles.cos(), angles.sin()), dim=1).float().contiguous()
