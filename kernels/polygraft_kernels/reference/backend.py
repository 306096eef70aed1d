"""The operations of `api.Backend`, each as close to its formula as torch allows. Clear before fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from polygraft_kernels.api import Backend, KVCache, LoraBank, LoraGroups, PackedLinear, SampleTensors, StepTensors
from polygraft_kernels.checks import check_groups, check_int8, check_weight, require
from polygraft_kernels.quantization import Int8Weight
from polygraft_kernels.reference.sampling import sample
from polygraft_kernels.reference.storage import Held, ReferenceBank, ReferenceCache, ReferenceLinear

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class ReferenceBackend(Backend):
    """Plain torch on any device."""

    name: ClassVar[str] = "reference"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.dtypes = DTYPES

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> ReferenceLinear:
        check_weight(weight, bias)
        copied = None if bias is None else bias.detach().to(self.device, copy=True)
        return ReferenceLinear(weight.detach().to(self.device, copy=True), copied)

    def pack_int8(self, weight: Int8Weight, bias: Tensor | None = None) -> ReferenceLinear:
        check_int8(weight, bias)
        copied = None if bias is None else bias.detach().to(self.device, copy=True)
        q, scale = (each.to(self.device, copy=True) for each in (weight.q, weight.scale))
        return ReferenceLinear(q, copied, scale)

    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        assert isinstance(weight, ReferenceLinear)
        require(
            x.dim() == 2 and x.shape[1] == weight.in_features, f"x {list(x.shape)} is not [T, {weight.in_features}]"
        )
        if weight.scale is not None:
            return self.logits(x, weight).to(x.dtype)
        return functional.linear(x, weight.weight, weight.bias)

    def logits(self, x: Tensor, weight: PackedLinear) -> Tensor:
        assert isinstance(weight, ReferenceLinear)
        y = functional.linear(x.float(), weight.weight.float())
        if weight.scale is not None:
            y = y * weight.scale
        return y if weight.bias is None else y + weight.bias.float()

    def lora_bank(self, in_features: int, segments: Sequence[int], num_slots: int, dtype: torch.dtype) -> ReferenceBank:
        return ReferenceBank(in_features, segments, num_slots, self.device, dtype)

    def lora(self, y: Tensor, x: Tensor, bank: LoraBank, groups: LoraGroups) -> None:
        assert isinstance(bank, ReferenceBank)
        check_groups(groups, bank, x.shape[0])
        for slot, start, end in zip(groups.slots, groups.starts, groups.starts[1:], strict=False):
            first = 0
            for held, width in zip(bank.held(slot), bank.segments, strict=True):
                out = y[start:end, first : first + width]
                out.copy_(_adapted(out.float(), x[start:end], held))
                first += width

    def kv_cache(
        self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> ReferenceCache:
        return ReferenceCache(num_blocks, block_size, kv_heads, head_dim, self.device, dtype)

    def store_kv(self, k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        assert isinstance(cache, ReferenceCache)
        cache.keys.flatten(0, 1)[slot_mapping] = k
        cache.values.flatten(0, 1)[slot_mapping] = v

    def attention(self, q: Tensor, cache: KVCache, step: StepTensors, window: int | None) -> Tensor:
        assert isinstance(cache, ReferenceCache)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        starts, lengths = step.query_starts.tolist(), step.context_lens.tolist()
        for sequence, length in enumerate(lengths):
            rows = slice(starts[sequence], starts[sequence + 1])
            blocks = step.block_tables[sequence, : -(-length // cache.block_size)].long()
            keys = cache.keys[blocks].flatten(0, 1)[:length]
            values = cache.values[blocks].flatten(0, 1)[:length]
            out[rows] = _attend(q[rows], keys, values, step.positions[rows], window)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (scaled * weight.float()).to(x.dtype)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> None:
        cos, sin = table[positions].unsqueeze(2).unbind(1)
        for heads in (q, k):
            first, second = heads.float().chunk(2, dim=-1)
            heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(gate_up.dtype)

    def sample(self, logits: Tensor, how: SampleTensors) -> Tensor:
        return sample(logits, how)


def _adapted(y: Tensor, x: Tensor, held: Held) -> Tensor:
    """gain * (y + scale * B (A x)) + shift, float32; y [R, N_seg], x [R, K]."""
    pair, affine = held.pair, held.affine
    if pair is not None:
        y = y + pair.scale * (x.float() @ pair.a.float().T @ pair.b.float().T)
    if affine.gain is not None:
        y = affine.gain * y
    return y if affine.shift is None else y + affine.shift


def _attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """One sequence: q [Q, H, D], keys and values [L, G, D], positions [Q] -> float32 [Q, H, D]."""
    share = q.shape[1] // keys.shape[1]
    keys, values = (each.float().repeat_interleave(share, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,jhd->hqj", q.float(), keys) * q.shape[-1] ** -0.5
    age = positions[:, None] - torch.arange(keys.shape[0], device=q.device)
    unseen = age < 0
    if window is not None:
        unseen = unseen | (age >= window)
    weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqj,jhd->qhd", weights, values)
