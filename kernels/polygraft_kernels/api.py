"""The operations every backend offers, as formulas with shapes.

Letters: T token rows of a step, S sequences of a step, K input features, N output features, H query heads,
G key/value heads, D head size, I intermediate size, V vocabulary, r LoRA rank, R rows that are sampled.
Activations have the model's dtype; sums are accumulated in float32. The plain torch backend in `reference/` is
the specification; the conformance suite holds every other backend to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from polygraft_kernels.quantization import Int8Weight


class KernelError(Exception):
    """Base of every error this package raises."""


class BackendUnavailable(KernelError):
    """A backend that was asked for by name cannot run here; the message says why."""


class PackedLinear(ABC):
    """A weight [N, K] with an optional bias [N], in the layout its backend reads fastest. Immutable."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class LoraPair:
    """One module's delta: y += scale * B (A x), with a [r, K] and b [N, r], both contiguous, r >= 1."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Affine:
    """What follows one module's delta: y = gain * y + shift, both [N] of any float dtype, kept as float32.

    An absent gain is 1, an absent shift 0. It says what DoRA (gain = m / ||W + scale B A||), a bias beside B and a
    replaced bias of the base do to a module's outputs, each of which is scaled and moved by a number of its own.
    """

    gain: Tensor | None = None
    shift: Tensor | None = None


class PackedLora(ABC):
    """What one adapter adds to one bank, in the layout its backend reads fastest. Immutable."""

    nbytes: int


class LoraBank(ABC):
    """The adapter slots of one (possibly fused) projection: `segments` are the output widths it concatenates.

    q, k and v share one bank with three segments, gate and up one with two; their deltas land side by side in y.
    The bank copies what it is given, packed once, at its exact rank: absent modules and affines take no memory and no
    time.
    """

    in_features: int
    segments: tuple[int, ...]
    num_slots: int

    @abstractmethod
    def pack(self, pairs: Sequence[LoraPair | None], affines: Sequence[Affine | None] | None = None) -> PackedLora:
        """Copy one pair and one affine per segment. This is the part that takes time: it may run on any thread, beside
        a running step, and any bank of the same shape may hold the result.

        None is no pair, or no affine, in that segment; `affines` None is none in any. A segment may have an affine
        and no pair. A segment with neither is one that the adapter leaves alone.
        """

    @abstractmethod
    def place(self, slot: int, packed: PackedLora) -> None:
        """Make `slot` hold exactly `packed`, which is shared where memory can be, not copied again."""

    def load(self, slot: int, pairs: Sequence[LoraPair | None], affines: Sequence[Affine | None] | None = None) -> None:
        """Both at once."""
        self.place(slot, self.pack(pairs, affines))

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Empty `slot`."""

    @abstractmethod
    def check(self) -> None:
        """Assert the bank's own invariants."""


@dataclass(frozen=True, slots=True)
class LoraGroups:
    """Which rows use which slot: group g covers rows starts[g]:starts[g+1] and uses slots[g].

    Rows are ordered by slot and base rows come first, so rows [0, starts[0]) are base and touched by no adapter.
    The lists are plain host integers: no backend needs a device sync to read them. Empty `slots` means a step of base
    rows only.
    """

    slots: tuple[int, ...] = ()
    starts: tuple[int, ...] = (0,)


class KVCache(ABC):
    """One layer's paged keys and values; the layout inside a block is its backend's own secret."""

    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int

    @abstractmethod
    def read(self, block_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Copies of keys and values of these blocks, each [len(block_ids) * block_size, G, D]. For tests and
        debugging only.
        """


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The index tensors of one step, built once on the host and shared by every layer.

    positions       int64 [T]       position of each token row in its sequence
    slot_mapping    int64 [T]       block_id * block_size + offset at which the row's K and V are stored
    query_starts    int32 [S + 1]   sequence s owns rows query_starts[s]:query_starts[s+1]
    context_lens    int32 [S]       tokens of the sequence after this step (stored before plus its rows now)
    block_tables    int32 [S, B]    block ids, padded with 0
    groups          rows by adapter slot
    """

    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    groups: LoraGroups


@dataclass(frozen=True, slots=True)
class LoraLinear:
    """A linear layer and the adapter slots that add to it (None: no adapters are served)."""

    weight: PackedLinear
    bank: LoraBank | None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Everything one pre-norm decoder layer computes with.

    h  = x + O(attention(rope(norm(QKV(rms_norm(x))))))
    x' = h + DOWN(silu_mul(GATE_UP(rms_norm(h))))

    qkv has rows [q: H*D | k: G*D | v: G*D], gate_up has rows [gate: I | up: I]. q_norm and k_norm [D] normalise each
    head before rope (Qwen3) and are None elsewhere. `window` counts the keys a query sees including itself; None: all.
    """

    input_norm: Tensor
    qkv: LoraLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: LoraLinear
    post_norm: Tensor
    gate_up: LoraLinear
    down: LoraLinear
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    window: int | None


@dataclass(frozen=True, slots=True)
class SampleTensors:
    """How each of R logits rows is sampled. All on the logits' device.

    temperature float32 [R]: below 1e-5 is greedy. top_k int64 [R]: 0 is off. top_p float32 [R]: 1 is off, 0 keeps
    the likeliest token. min_p float32 [R]: 0 is off. uniform float32 [R] in [0, 1).
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor


class Backend(ABC):
    """One implementation of all operations. Stateless but for what `pack_linear`, `lora_bank` and `kv_cache` return."""

    name: ClassVar[str]
    device: torch.device
    dtypes: frozenset[torch.dtype]

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """weight [N, K], bias [N]; both are copied."""

    @abstractmethod
    def pack_int8(self, weight: Int8Weight, bias: Tensor | None = None) -> PackedLinear:
        """The same for W[n, k] = scale[n] * q[n, k]. q stays 8 bits in memory; the scale multiplies the sum over k."""

    @abstractmethod
    def linear(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """y[t, n] = sum_k x[t, k] W[n, k] + bias[n]; x [T, K] -> y [T, N] of x's dtype. T may be 0."""

    def logits(self, x: Tensor, weight: PackedLinear) -> Tensor:
        """`linear` with float32 results [R, N], which a backend that can does not round to x's dtype on the way: that
        would make ties of near ties.
        """
        return self.linear(x, weight).float()

    @abstractmethod
    def lora_bank(self, in_features: int, segments: Sequence[int], num_slots: int, dtype: torch.dtype) -> LoraBank:
        """An empty bank of `num_slots` slots whose pairs are stored in `dtype`."""

    @abstractmethod
    def lora(self, y: Tensor, x: Tensor, bank: LoraBank, groups: LoraGroups) -> None:
        """In place: y[t, seg] = gain_seg * (y[t, seg] + scale * B_seg (A_seg x[t])) + shift_seg for every group's rows
        and every segment its slot holds, with the pair, the gain and the shift of the slot. One that is absent is left
        out of the formula.

        x [T, K], y [T, sum(segments)]. A x is kept in float32 between shrink and expand, and the formula is computed in
        float32 from y as it is stored and rounded to y's dtype once. Base rows are not touched.
        """

    @abstractmethod
    def kv_cache(self, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVCache:
        """A zeroed cache for one layer: 2 * num_blocks * block_size * G * D elements and no more."""

    @abstractmethod
    def store_kv(self, k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """cache[slot_mapping[t]] = k[t], v[t]; k and v [T, G, D] (may be strided views with unit stride over D)."""

    @abstractmethod
    def attention(self, q: Tensor, cache: KVCache, step: StepTensors, window: int | None) -> Tensor:
        """Causal paged attention. q [T, H, D] (unit stride over D) -> [T, H, D] contiguous.

        out[t, h] = softmax_j(q[t, h] . k[j, h // (H/G)] / sqrt(D)) v[j], over the keys j of t's own sequence with
        position[t] - window < j <= position[t]. The row's own key has been stored before. Keys are read where they lie.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last axis, in float32, result in x's dtype. x [..., K],
        weight [K].
        """

    @abstractmethod
    def rope(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> None:
        """Rotary embedding in place, halves paired (GPT-NeoX style): (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).

        q [T, H, D] and k [T, G, D] (unit stride over D); table float32 [P, 2, D / 2] holds cos then sin per position.
        """

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up; gate_up [T, 2 I] with gate first -> [T, I]."""

    @abstractmethod
    def sample(self, logits: Tensor, how: SampleTensors) -> Tensor:
        """One token per row: int64 [R] from float32 logits [R, V].

        Greedy rows take the lowest index among the largest logits. Others: p = softmax(logits / temperature), then
        keep the top_k likeliest, then the smallest nucleus whose mass reaches top_p, then those with
        p >= min_p * max(p); renormalise and invert the CDF, taken in order of token id, at `uniform`. Every row is
        sampled independently of its neighbours.
        """

    def lora_linear(self, x: Tensor, layer: LoraLinear, groups: LoraGroups) -> Tensor:
        """linear, plus the deltas of every adapter of the step in one call."""
        y = self.linear(x, layer.weight)
        if layer.bank is not None and groups.slots:
            self.lora(y, x, layer.bank, groups)
        return y

    def decoder_layer(
        self, x: Tensor, layer: DecoderLayer, cache: KVCache, step: StepTensors, rope_table: Tensor
    ) -> Tensor:
        """One whole layer, x [T, K] -> [T, K]; x itself may be overwritten. This default composes the single
        operations.
        """
        rows = x.shape[0]
        q_width, kv_width = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        qkv = self.lora_linear(self.rms_norm(x, layer.input_norm, layer.eps), layer.qkv, step.groups)
        q = qkv[:, :q_width].view(rows, layer.heads, layer.head_dim)
        k = qkv[:, q_width : q_width + kv_width].view(rows, layer.kv_heads, layer.head_dim)
        v = qkv[:, q_width + kv_width :].view(rows, layer.kv_heads, layer.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self.rms_norm(q, layer.q_norm, layer.eps)
            k = self.rms_norm(k, layer.k_norm, layer.eps)
        self.rope(q, k, step.positions, rope_table)
        self.store_kv(k, v, cache, step.slot_mapping)
        attended = self.attention(q, cache, step, layer.window).view(rows, q_width)
        x = x + self.lora_linear(attended, layer.o, step.groups)
        gate_up = self.lora_linear(self.rms_norm(x, layer.post_norm, layer.eps), layer.gate_up, step.groups)
        return x + self.lora_linear(self.silu_mul(gate_up), layer.down, step.groups)

    def decoder(
        self,
        x: Tensor,
        layers: Sequence[DecoderLayer],
        caches: Sequence[KVCache],
        step: StepTensors,
        rope_table: Tensor,
    ) -> Tensor:
        """All layers in turn, each with its own cache: x [T, K] -> [T, K]; x itself may be overwritten."""
        for layer, cache in zip(layers, caches, strict=True):
            x = self.decoder_layer(x, layer, cache, step, rope_table)
        return x
