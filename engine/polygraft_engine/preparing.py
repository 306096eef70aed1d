"""From an adapter as its file has it to what the kernels add: everything that takes long, done once and off the step
loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from threading import Lock
from types import MappingProxyType

import torch
from torch import Tensor

from polygraft_adapters.types import EMBEDDING, HEAD, ModuleKey
from polygraft_adapters.weights import AdapterWeights, ModuleDelta, TableDelta
from polygraft_engine.lora import AdapterBanks
from polygraft_engine.models.decoder import BaseModule, Decoder
from polygraft_engine.models.packing import PackWeight
from polygraft_engine.prepared import PROJECTIONS, PreparedAdapter
from polygraft_engine.tables import EmbeddingLora, EmbeddingPatch, HeadPatch, HeadRows, TableRows
from polygraft_kernels.api import Affine, Backend, LoraBank, LoraPair, PackedLinear, PackedLora

PROBES = 4
"""Random vectors that tell two heads apart."""
TABLE_ROWS = 4096
"""Rows of an embedding that exist in float32 at once."""


class Preparer:
    """Prepares adapters of one model, one at a time, on any thread and beside a running step.

    The formulas are those of PEFT's unmerged forward pass. DoRA's norm of a row n of W + s B A is taken without ever
    making that matrix: |W_n|^2 + 2 s B_n (A W_n^T) + s^2 B_n (A A^T) B_n^T, where A W^T is what the layer computes for
    the rows of A.
    """

    def __init__(self, decoder: Decoder, banks: AdapterBanks, pack: PackWeight) -> None:
        self._decoder = decoder
        self._backend: Backend = decoder.backend
        self._device = decoder.backend.device
        self._banks = banks
        self._pack = pack
        self._lock = Lock()
        """Held while weights are packed, whose memory is one thread's at a time."""

    @torch.inference_mode()
    def __call__(self, weights: AdapterWeights) -> PreparedAdapter:
        """`weights` as slots take them; what has been prepared before is returned as it is."""
        if isinstance(weights, PreparedAdapter):
            return weights
        tables = weights.tables
        layers = tuple(self._layer(weights, index) for index in range(self._decoder.spec.layers))
        with self._lock:
            embedding = self._embedding(tables[EMBEDDING]) if EMBEDDING in tables else None
            head = self._head(tables[HEAD]) if HEAD in tables else None
        return PreparedAdapter(weights.info, MappingProxyType({}), layers=layers, embedding=embedding, head=head)

    def _layer(self, weights: AdapterWeights, index: int) -> Mapping[str, PackedLora]:
        packed: dict[str, PackedLora] = {}
        for projection, targets in PROJECTIONS.items():
            keys = [ModuleKey(index, target) for target in targets]
            deltas = [weights.pairs.get(key) for key in keys]
            affines = [
                self._affine(delta, key, weights.biases.get(key)) for key, delta in zip(keys, deltas, strict=True)
            ]
            pairs = [None if delta is None else LoraPair(delta.a, delta.b, delta.scale) for delta in deltas]
            if any(each is not None for each in (*pairs, *affines)):
                bank: LoraBank = getattr(self._banks.layers[index], projection)
                packed[projection] = bank.pack(pairs, affines)
        return MappingProxyType(packed)

    def _affine(self, delta: ModuleDelta | None, key: ModuleKey, bias: Tensor | None) -> Affine | None:
        if bias is None and (delta is None or (delta.magnitude is None and delta.bias is None)):
            return None
        return self._affine_of(delta, self._decoder.modules[key], None if bias is None else self._vector(bias))

    def _affine_of(self, delta: ModuleDelta | None, base: BaseModule, bias: Tensor | None) -> Affine | None:
        """What turns gain * (W x + old + s B A x) + shift into PEFT's gain * (W x + s B A x) + new + s lora_bias, where
        old is the base's bias and new `bias`, or the old one where that is None.
        """
        gain = None if delta is None or delta.magnitude is None else self._gain(delta, delta.magnitude, base)
        shift: Tensor | None = None
        if bias is not None or (gain is not None and base.bias is not None):
            assert base.bias is not None, "a bias binds only where the base has one"
            shift = (base.bias if bias is None else bias) - (base.bias if gain is None else gain * base.bias)
        if delta is not None and delta.bias is not None:
            lora_bias = delta.scale * self._vector(delta.bias)
            shift = lora_bias if shift is None else shift + lora_bias
        return None if gain is None and shift is None else Affine(gain, shift)

    def _gain(self, delta: ModuleDelta, magnitude: Tensor, base: BaseModule) -> Tensor:
        """float32 [N]: m / ||W + s B A||, row by row."""
        a, b = delta.a.to(self._device), delta.b.to(self._device)
        products = self._backend.logits(a, base.linear)[:, base.first : base.first + base.width]
        if base.bias is not None:
            products = products - base.bias
        return self._vector(magnitude) / _norms(base.squares, products.T, a, b, delta.scale)

    def _embedding(self, delta: TableDelta) -> EmbeddingPatch | None:
        weight = self._decoder.embedding
        table = None if delta.weight is None else delta.weight.to(self._device)
        if table is not None and torch.equal(table, weight):
            table = None  # a copy of the base's, which PEFT saves along
        tokens = None
        if delta.tokens is not None:
            ids, order = torch.tensor(delta.tokens.ids, dtype=torch.int64, device="cpu").sort()
            tokens = TableRows(ids.to(self._device), delta.tokens.rows[order].to(self._device))
        lora, gain = None, None
        if delta.lora is not None:
            a, b = delta.lora.a.T.contiguous().to(self._device), delta.lora.b
            lora = EmbeddingLora(a, self._backend.pack_linear(b), delta.lora.scale)
            if delta.lora.magnitude is not None:
                norms = self._column_norms(weight if table is None else table, a, b.to(self._device), delta.lora.scale)
                gain = self._vector(delta.lora.magnitude) / norms
        if table is None and tokens is None and lora is None:
            return None
        return EmbeddingPatch(table, tokens, lora, gain, _table_bytes(delta, table is not None))

    def _column_norms(self, table: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """float32 [K]: the norms over the vocabulary of table + s a B^T; a [V, r], b [K, r]."""
        squares = torch.zeros(table.shape[1], dtype=torch.float64, device=self._device)
        products = torch.zeros((table.shape[1], a.shape[1]), dtype=torch.float64, device=self._device)
        for rows, shrunk in zip(torch.split(table, TABLE_ROWS), torch.split(a, TABLE_ROWS), strict=True):
            wide = rows.float()
            squares += wide.square().sum(dim=0)
            products += wide.T @ shrunk.float()
        return _norms(squares, products, a.T, b, scale)

    def _head(self, delta: TableDelta) -> HeadPatch | None:
        base = self._decoder.head
        replaced = False
        if delta.weight is not None:
            packed = self._pack(delta.weight, None)
            replaced = not self._computes_as_base(packed.linear)
            if replaced:
                base = BaseModule(packed.linear, 0, packed.squares, None)
        tokens = None
        if delta.tokens is not None:
            ids = torch.tensor(delta.tokens.ids, dtype=torch.int64, device=self._device)
            tokens = HeadRows(ids, self._pack(delta.tokens.rows, None).linear)
        lora = None
        if delta.lora is not None:
            pair = LoraPair(delta.lora.a, delta.lora.b, delta.lora.scale)
            lora = self._banks.tables.pack_head(pair, self._affine_of(delta.lora, base, None))
        if not replaced and tokens is None and lora is None:
            return None
        nbytes = _table_bytes(replace(delta, lora=None), replaced) + (0 if lora is None else lora.nbytes)
        return HeadPatch(base.linear if replaced else None, tokens, lora, nbytes)

    def _computes_as_base(self, linear: PackedLinear) -> bool:
        """Whether a head is the base's, which PEFT saves along with LoRA on it. A difference that random vectors do not
        show is lost in rounding anyway.
        """
        generator = torch.Generator("cpu").manual_seed(0)
        shape = (PROBES, self._decoder.spec.hidden)
        probes = torch.randn(shape, generator=generator, device="cpu").to(self._device, self._decoder.dtype)
        base = self._decoder.head.linear
        return torch.equal(self._backend.logits(probes, linear), self._backend.logits(probes, base))

    def _vector(self, vector: Tensor) -> Tensor:
        return vector.to(self._device, torch.float32)


def _norms(squares: Tensor, products: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """float32 [N]: sqrt(squares + 2 s sum(products * b) + s^2 b (A A^T) b^T), row by row, where products [N, r] are
    W A^T; a [r, K], b [N, r].
    """
    wide_a, wide_b = a.double(), b.double()
    cross = (products.double() * wide_b).sum(dim=1)
    own = ((wide_b @ (wide_a @ wide_a.T)) * wide_b).sum(dim=1)
    return (squares.double() + 2 * scale * cross + scale * scale * own).clamp_(min=0).sqrt_().float()


def _table_bytes(delta: TableDelta, replaced: bool) -> int:
    kept = delta if replaced else replace(delta, weight=None)
    return sum(tensor.nbytes for tensor in kept.tensors)
