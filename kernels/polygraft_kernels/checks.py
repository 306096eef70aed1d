"""What every backend refuses, said the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise

import torch
from torch import Tensor

from polygraft_kernels.api import Affine, KernelError, LoraBank, LoraGroups, LoraPair, SampleTensors
from polygraft_kernels.quantization import Int8Weight


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


def check_int8(weight: Int8Weight, bias: Tensor | None) -> None:
    """q int8 [N, K], scale float32 [N], bias [N] or None."""
    check_weight(weight.q, bias)
    fits = weight.q.dtype == torch.int8 and weight.scale.dtype == torch.float32
    require(fits, f"int8 weights are int8 with scales in float32, not {weight.q.dtype} and {weight.scale.dtype}")
    fits = tuple(weight.scale.shape) == (weight.q.shape[0],)
    require(fits, f"scale {list(weight.scale.shape)} does not fit N={weight.q.shape[0]}")


def check_rows(x: Tensor, name: str, width: int) -> None:
    """x [T, width], unit stride over its rows."""
    fits = x.dim() == 2 and x.shape[1] == width and (x.stride(1) == 1 or width == 1)
    require(fits, f"{name} {list(x.shape)} is not [T, {width}] with unit stride over its rows")


def check_heads(x: Tensor, name: str, heads: int, dim: int) -> None:
    """x [T, heads, dim], unit stride over heads."""
    fits = x.dim() == 3 and x.shape[1] == heads and x.shape[2] == dim and x.stride(2) == 1
    require(fits, f"{name} {list(x.shape)} is not [T, {heads}, {dim}] with unit stride over heads")


def check_table(table: Tensor, dim: int) -> None:
    """A rope table, contiguous float32 [P, 2, dim / 2]."""
    fits = table.dtype == torch.float32 and table.is_contiguous() and tuple(table.shape[1:]) == (2, dim // 2)
    require(fits and dim % 2 == 0, f"the rope table is not contiguous float32 [P, 2, {dim} / 2]")


def check_vector(x: Tensor, name: str, dtype: torch.dtype, count: int | None = None) -> None:
    """x contiguous, of `dtype`, and of `count` rows if that is given."""
    require(x.dtype == dtype and x.is_contiguous(), f"{name} is not contiguous {dtype}")
    require(count is None or x.shape[0] == count, f"{name} has {x.shape[0]} rows, not {count}")


def check_sampling(logits: Tensor, how: SampleTensors) -> None:
    """logits float32 [R, V] and contiguous settings for R rows, all on one device."""
    require(logits.dtype == torch.float32, f"logits are {logits.dtype}, not float32")
    require(logits.dim() == 2 and logits.shape[1] > 0, f"logits {list(logits.shape)} are not [R, V]")
    for field in fields(how):
        setting: Tensor = getattr(how, field.name)
        check_vector(setting, field.name, torch.int64 if field.name == "top_k" else torch.float32, logits.shape[0])
        require(setting.device == logits.device, f"{field.name} is on {setting.device}, logits on {logits.device}")


def check_slot(bank: LoraBank, slot: int) -> None:
    """`slot` is one of `bank`'s."""
    require(0 <= slot < bank.num_slots, f"slot {slot} is not one of {bank.num_slots}")


def check_pairs(bank: LoraBank, pairs: Sequence[LoraPair | None]) -> None:
    """One pair or None per segment of `bank`, each a [r, K] with b [N_seg, r] and r >= 1."""
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


def check_affines(bank: LoraBank, affines: Sequence[Affine | None] | None) -> None:
    """None, or one affine or None per segment of `bank`, with gain and shift of floats [N_seg]."""
    if affines is None:
        return
    require(len(affines) == len(bank.segments), f"{len(affines)} affines given for {len(bank.segments)} segments")
    for affine, width in zip(affines, bank.segments, strict=True):
        if affine is None:
            continue
        for name, vector in (("gain", affine.gain), ("shift", affine.shift)):
            fits = vector is None or (tuple(vector.shape) == (width,) and vector.is_floating_point())
            require(fits, f"the {name} of an affine is not a vector of {width} floats")


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
