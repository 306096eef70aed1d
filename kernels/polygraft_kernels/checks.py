"""What every backend refuses, said the same way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from polygraft_kernels.api import KernelError, LoraBank, LoraGroups, LoraPair


class InvalidOperand(KernelError):
    """An operation was given a tensor or number it cannot work with; the message names it."""


def require(condition: bool, message: str) -> None:
    """Raise InvalidOperand(message) unless `condition` holds."""
    if not condition:
        raise InvalidOperand(message)


def check_weight(weight: Tensor, bias: Tensor | None) -> None:
    """weight [N, K] and bias [N] or None."""
    require(weight.dim() == 2, f"a linear weight is [N, K], not {list(weight.shape)}")
    if bias is not None:
        require(tuple(bias.shape) == (weight.shape[0],), f"bias {list(bias.shape)} does not fit N={weight.shape[0]}")


def check_pairs(bank: LoraBank, slot: int, pairs: Sequence[LoraPair | None]) -> None:
    """One pair or None per segment of `bank`, each a [r, K] with b [N_seg, r] and r >= 1."""
    require(0 <= slot < bank.num_slots, f"slot {slot} is not one of {bank.num_slots}")
    require(len(pairs) == len(bank.segments), f"{len(pairs)} pairs given for {len(bank.segments)} segments")
    for pair, width in zip(pairs, bank.segments, strict=True):
        if pair is None:
            continue
        require(pair.a.dim() == 2 and pair.b.dim() == 2, "LoRA A and B are matrices")
        rank = pair.a.shape[0]
        fits = rank >= 1 and pair.a.shape[1] == bank.in_features and tuple(pair.b.shape) == (width, rank)
        require(
            fits,
            f"A {list(pair.a.shape)} and B {list(pair.b.shape)} do not fit [r, {bank.in_features}] and [{width}, r]",
        )


def check_groups(groups: LoraGroups, bank: LoraBank, rows: int) -> None:
    """Groups lie in order within `rows` and name slots of `bank`."""
    check_starts(groups, rows)
    known = not groups.slots or max(groups.slots) < bank.num_slots
    require(known, f"slots {groups.slots} are not all below {bank.num_slots}")


def check_starts(groups: LoraGroups, rows: int) -> None:
    """Groups lie in order within `rows`; slots are numbers from 0."""
    slots, starts = groups.slots, groups.starts
    require(len(starts) == len(slots) + 1, f"{len(slots)} groups need {len(slots) + 1} starts, not {len(starts)}")
    if slots:
        ascending = starts[0] >= 0 and all(a <= b for a, b in pairwise(starts))
        require(ascending and starts[-1] <= rows, f"group starts {starts} do not ascend within {rows} rows")
        require(min(slots) >= 0, f"slots {slots} are not all numbers from 0")
