"""An adapter's numbers in host memory, as the engine puts them into its slots. The one module here that needs torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from polygraft_adapters.digest import ContentsDigest
from polygraft_adapters.header import TensorEntry
from polygraft_adapters.inspection import checked_adapter, not_finite
from polygraft_adapters.types import AdapterError, AdapterInfo, ModuleKey, ModuleShapes, Problem
from polygraft_adapters.wording import shown

_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class ModuleDelta:
    """One module's delta: y += scale * B (A x), with a [r, in_features] and b [out_features, r], both contiguous.

    The scale is never folded into the weights. The tensors belong to the adapter and are never written to again:
    whoever wants another layout makes a copy.
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """A whole adapter, immutable: the same for every slot and every time that it is loaded from here."""

    info: AdapterInfo
    pairs: Mapping[ModuleKey, ModuleDelta]

    @property
    def nbytes(self) -> int:
        """Host memory that the tensors take."""
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())

    def check(self) -> None:
        """Assert the invariants of what `load_adapter` returns."""
        assert self.pairs, "an adapter adds to at least one module"
        ranks = [pair.a.shape[0] for pair in self.pairs.values()]
        assert max(ranks) == self.info.rank
        assert {key.target for key in self.pairs} == set(self.info.targets)
        for key, pair in self.pairs.items():
            assert pair.a.dim() == pair.b.dim() == 2, key
            assert pair.a.shape[0] == pair.b.shape[1] >= 1, key
            assert pair.a.is_contiguous(), key
            assert pair.b.is_contiguous(), key
            assert pair.a.dtype == pair.b.dtype, key
            assert bool(torch.isfinite(pair.a).all()), key
            assert bool(torch.isfinite(pair.b).all()), key


def load_adapter(path: Path, modules: ModuleShapes, max_rank: int, dtype: torch.dtype) -> AdapterWeights:
    """Check the PEFT folder at `path` and read it, converted to `dtype`, on the CPU.

    The file is read once, and the digest is taken of the very bytes that are returned. Raises AdapterError with
    everything that is wrong, non-finite values included.
    """
    with checked_adapter(path, modules, max_rank) as adapter:
        digest = ContentsDigest(adapter.settings)
        tensors: dict[str, Tensor] = {}
        problems: list[Problem] = []
        for entry in adapter.entries:
            raw = bytearray().join(adapter.read(entry))
            digest.add(entry, [raw])
            tensors[entry.name] = _tensor(entry, raw).to(dtype)
            if not bool(torch.isfinite(tensors[entry.name]).all()):
                problems.append(_not_finite(entry, raw, dtype))
        if problems:
            raise AdapterError(problems)
        pairs = {
            key: ModuleDelta(tensors[module.a.name], tensors[module.b.name], module.scale)
            for key, module in adapter.modules.items()
        }
        return AdapterWeights(adapter.info(digest.value()), MappingProxyType(pairs))


def _tensor(entry: TensorEntry, raw: bytearray) -> Tensor:
    """A view of `raw`, which it keeps alive."""
    assert sys.byteorder == "little", "safetensors data is little-endian"
    return torch.frombuffer(raw, dtype=_TORCH_DTYPES[entry.dtype]).view(entry.shape)


def _not_finite(entry: TensorEntry, raw: bytearray, dtype: torch.dtype) -> Problem:
    if bool(torch.isfinite(_tensor(entry, raw)).all()):
        what = f"has values that {str(dtype).removeprefix('torch.')} cannot hold"
        return Problem(shown(entry.name), what, "serve with --dtype bfloat16 or float32")
    return not_finite(entry)
