"""An adapter's numbers in host memory, which the engine fills its slots from. The one module here that needs torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from polygraft_adapters.digest import ContentsDigest
from polygraft_adapters.header import TensorEntry
from polygraft_adapters.inspection import checked_adapter, not_finite
from polygraft_adapters.pairs import BoundModule, about
from polygraft_adapters.tables import BoundTable
from polygraft_adapters.types import AdapterError, AdapterInfo, ModuleKey, ModuleShapes, Problem

_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModuleDelta:
    """One module's LoRA: y += scale * (B (A x) + bias), with a [r, in_features], b [out_features, r] and bias
    [out_features]; with a magnitude [out_features], DoRA: y = magnitude / ||W + scale B A|| * (W x + scale B (A x)),
    with a norm per row, and then the base's bias.

    The scale is never folded into the weights. The tensors are contiguous, belong to the adapter and are never written
    to again: whoever wants another layout makes a copy.
    """

    a: Tensor
    b: Tensor
    scale: float
    magnitude: Tensor | None = None
    bias: Tensor | None = None

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All that there are."""
        return (tensor for tensor in (self.a, self.b, self.magnitude, self.bias) if tensor is not None)


@dataclass(frozen=True, slots=True)
class TokenRows:
    """rows [n, hidden] stand in for a table's rows `ids`."""

    ids: tuple[int, ...]
    rows: Tensor


@dataclass(frozen=True, slots=True)
class TableDelta:
    """What an adapter does to embed_tokens or lm_head, in this order: another weight [vocabulary, hidden], rows of it,
    and LoRA, whose matrices for embed_tokens are those of its transpose: a [r, vocabulary], b [hidden, r], and a
    magnitude [hidden].
    """

    weight: Tensor | None = None
    tokens: TokenRows | None = None
    lora: ModuleDelta | None = None

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All that there are."""
        if self.weight is not None:
            yield self.weight
        if self.tokens is not None:
            yield self.tokens.rows
        if self.lora is not None:
            yield from self.lora.tensors


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A whole adapter, immutable: the same for every slot and every time that it is loaded from here."""

    info: AdapterInfo
    pairs: Mapping[ModuleKey, ModuleDelta]
    """LoRA on modules of the layers."""
    biases: Mapping[ModuleKey, Tensor] = field(default_factory=lambda: MappingProxyType({}))
    """Biases that replace those of the base."""
    tables: Mapping[str, TableDelta] = field(default_factory=lambda: MappingProxyType({}))
    """By name: embed_tokens, lm_head."""

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All that there are, a shared one every time that it is used."""
        for pair in self.pairs.values():
            yield from pair.tensors
        yield from self.biases.values()
        for table in self.tables.values():
            yield from table.tensors

    @property
    def nbytes(self) -> int:
        """Host memory that the tensors take."""
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self.tensors}.values())

    def check(self) -> None:
        """Assert the invariants of what `load_adapter` returns."""
        deltas = [*self.pairs.values(), *(table.lora for table in self.tables.values() if table.lora is not None)]
        assert max((delta.a.shape[0] for delta in deltas), default=0) == self.info.rank
        assert {key.target for key in (*self.pairs, *self.biases)} | self.tables.keys() == set(self.info.targets)
        for delta in deltas:
            assert delta.a.dim() == delta.b.dim() == 2
            assert delta.a.shape[0] == delta.b.shape[1] >= 1
            width = (delta.b.shape[0],)
            assert delta.magnitude is None or delta.magnitude.shape == width
            assert delta.bias is None or delta.bias.shape == width
        tensors = list(self.tensors)
        assert tensors, "an adapter changes at least one module"
        assert len({tensor.dtype for tensor in tensors}) == 1
        assert all(tensor.is_contiguous() and bool(torch.isfinite(tensor).all()) for tensor in tensors)


def load_adapter(path: Path, modules: ModuleShapes, max_rank: int, dtype: torch.dtype) -> AdapterWeights:
    """Check the PEFT folder at `path` and read it, converted to `dtype`, on the CPU.

    The file is read once, and the digest is taken of the very bytes that are returned. Raises AdapterError with
    everything that is wrong, non-finite values included.
    """
    with checked_adapter(path, modules, max_rank) as adapter:
        digest = ContentsDigest(adapter.settings)
        tensors: dict[str, Tensor] = {}
        problems = adapter.unequal_copies()
        for entry in adapter.entries:
            raw = bytearray().join(adapter.read(entry))
            digest.add(entry, [raw])
            tensors[entry.name] = _tensor(entry, raw).to(dtype)
            if not bool(torch.isfinite(tensors[entry.name]).all()):
                problems.append(_not_finite(entry, raw, dtype))
        if problems:
            raise AdapterError(problems)
        binding = adapter.binding

        def named(entry: TensorEntry) -> Tensor:
            return tensors[entry.name]

        return AdapterWeights(
            info=adapter.info(digest.value()),
            pairs=MappingProxyType({key: _delta(module, named) for key, module in binding.modules.items()}),
            biases=MappingProxyType({key: named(entry) for key, entry in binding.biases.items()}),
            tables=MappingProxyType({name: _table(table, named) for name, table in binding.tables.items()}),
        )


def _delta(module: BoundModule, named: Callable[[TensorEntry], Tensor]) -> ModuleDelta:
    return ModuleDelta(
        a=named(module.a),
        b=named(module.b),
        scale=module.scale,
        magnitude=None if module.magnitude is None else named(module.magnitude),
        bias=None if module.bias is None else named(module.bias),
    )


def _table(table: BoundTable, named: Callable[[TensorEntry], Tensor]) -> TableDelta:
    return TableDelta(
        weight=None if table.weight is None else named(table.weight),
        tokens=None if table.tokens is None else TokenRows(table.tokens.ids, named(table.tokens.entry)),
        lora=None if table.lora is None else _delta(table.lora, named),
    )


def _tensor(entry: TensorEntry, raw: bytearray) -> Tensor:
    """A view of `raw`, which it keeps alive."""
    assert sys.byteorder == "little", "safetensors data is little-endian"
    return torch.frombuffer(raw, dtype=_TORCH_DTYPES[entry.dtype]).view(entry.shape)


def _not_finite(entry: TensorEntry, raw: bytearray, dtype: torch.dtype) -> Problem:
    if bool(torch.isfinite(_tensor(entry, raw)).all()):
        what = f"has values that {str(dtype).removeprefix('torch.')} cannot hold"
        return about(entry, what, "serve with --dtype bfloat16 or float32")
    return not_finite(entry)
