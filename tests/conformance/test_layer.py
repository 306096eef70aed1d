"""A whole decoder layer against the reference, and the fused one against its own single operations."""

from __future__ import annotations

import pytest
import torch
from tests.conformance import oracle
from tests.conformance.oracle import random, slots_of, step_of
from torch import Tensor

from polygraft_kernels.api import (
    Affine,
    Backend,
    DecoderLayer,
    KVCache,
    LoraGroups,
    LoraLinear,
    LoraPair,
    StepTensors,
)
from polygraft_kernels.reference import ReferenceBackend

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, BLOCKS = 48, 6, 2, 16, 72, 24
SHAPES = {"qkv": (96, 32, 32), "o": (48,), "gate_up": (72, 72), "down": (48,)}
INPUTS = {"qkv": HIDDEN, "o": HEADS * HEAD_DIM, "gate_up": HIDDEN, "down": INTERMEDIATE}


class Weights:
    """One layer's numbers, given to several backends."""

    def __init__(self, dtype: torch.dtype, qk_norm: bool, affines: bool = False) -> None:
        self.norms = [random(HIDDEN, dtype=dtype) for _ in range(2)]
        self.qk_norms = [random(HEAD_DIM, dtype=dtype) if qk_norm else None for _ in range(2)]
        self.linears = {n: random(sum(s), INPUTS[n], dtype=dtype, scale=0.2) for n, s in SHAPES.items()}
        self.biases = {n: random(sum(s), dtype=dtype) if n == "qkv" else None for n, s in SHAPES.items()}
        self.adapters = [
            {n: [self._pair(r + i, n, w, dtype) for i, w in enumerate(s)] for n, s in SHAPES.items()} for r in (2, 9)
        ]
        self.adapters[1]["gate_up"][0] = None
        self.adapters[1]["down"][0] = None
        self.affines: list[dict[str, list[Affine | None]]] = [{n: [None] * len(s) for n, s in SHAPES.items()}] * 2
        if affines:
            both = {n: [Affine(torch.rand(w) + 0.5, torch.randn(w)) for w in s] for n, s in SHAPES.items()}
            self.affines = [{"qkv": [None, *both["qkv"][1:]], "o": [None], "gate_up": [None] * 2, "down": [None]}, both]

    @staticmethod
    def _pair(rank: int, name: str, width: int, dtype: torch.dtype) -> LoraPair | None:
        return LoraPair(random(rank, INPUTS[name], dtype=dtype, scale=0.2), random(width, rank, dtype=dtype), 0.7)

    def layer(self, backend: Backend, dtype: torch.dtype, window: int | None, adapters: bool) -> DecoderLayer:
        def linear(name: str) -> LoraLinear:
            bank = backend.lora_bank(INPUTS[name], SHAPES[name], len(self.adapters), dtype) if adapters else None
            for slot, modules in enumerate(self.adapters if adapters else ()):
                bank.load(slot, modules[name], self.affines[slot][name])
            return LoraLinear(backend.pack_linear(self.linears[name], self.biases[name]), bank)

        return DecoderLayer(
            self.norms[0],
            linear("qkv"),
            *self.qk_norms,
            linear("o"),
            self.norms[1],
            linear("gate_up"),
            linear("down"),
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            1e-5,
            window,
        )


def step_and_cache(backend: Backend, dtype: torch.dtype, groups: LoraGroups) -> tuple[StepTensors, KVCache]:
    """A decode row after 40 tokens, a chunk after 7, a prefill: 1 + 5 + 20 rows."""
    all_of = oracle.sequences([40, 7, 0], [1, 5, 20], KV_HEADS, HEAD_DIM, dtype)
    step = step_of(all_of, 16, BLOCKS, groups)
    cache = backend.kv_cache(BLOCKS, 16, KV_HEADS, HEAD_DIM, dtype)
    for i, stored in enumerate(all_of.stored):
        at = slots_of(step, i, range(stored), 16)
        backend.store_kv(all_of.keys[i][:stored], all_of.values[i][:stored], cache, at)
    return step, cache


def results(
    backend: Backend,
    weights: Weights,
    x: Tensor,
    dtype: torch.dtype,
    window: int | None,
    groups: LoraGroups,
    composed: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's output and the keys and values it stored."""
    torch.manual_seed(7)
    step, cache = step_and_cache(backend, dtype, groups)
    layer = weights.layer(backend, dtype, window, bool(groups.slots))
    table = oracle.rope_table(64, HEAD_DIM)
    run = Backend.decoder_layer if composed else type(backend).decoder_layer
    return (run(backend, x.clone(), layer, cache, step, table), *cache.read(range(BLOCKS)))


CASES = pytest.mark.parametrize(
    ("window", "qk_norm", "affines", "groups"),
    [
        (None, False, False, LoraGroups((), (26,))),
        (None, True, False, LoraGroups((0, 1), (1, 10, 26))),
        (9, False, False, LoraGroups((1,), (20, 26))),
        (None, False, True, LoraGroups((0, 1), (1, 10, 26))),
        (30, True, True, LoraGroups((1, 0), (0, 1, 26))),
    ],
    ids=["base", "adapters", "window", "affines", "everything"],
)


@CASES
def test_against_the_reference(
    backend: Backend, dtype: torch.dtype, window: int | None, qk_norm: bool, affines: bool, groups: LoraGroups
) -> None:
    weights, x = Weights(dtype, qk_norm, affines), random(26, HIDDEN, dtype=dtype)
    reference = ReferenceBackend(torch.get_default_device())
    expected = results(reference, weights, x, dtype, window, groups, composed=True)
    got = results(backend, weights, x, dtype, window, groups, composed=False)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.double() - theirs.double()).abs().max() <= tolerance * theirs.double().abs().max()


@CASES
@pytest.mark.usefixtures("threads")
def test_fused_and_composed_agree_bit_for_bit(
    native: Backend, dtype: torch.dtype, window: int | None, qk_norm: bool, affines: bool, groups: LoraGroups
) -> None:
    weights, x = Weights(dtype, qk_norm, affines), random(26, HIDDEN, dtype=dtype)
    fused, composed = (results(native, weights, x, dtype, window, groups, composed=c) for c in (False, True))
    for one, other in zip(fused, composed, strict=True):
        assert torch.equal(one, other)


def test_no_rows(backend: Backend, dtype: torch.dtype) -> None:
    layer = Weights(dtype, qk_norm=False).layer(backend, dtype, None, adapters=False)
    none = torch.zeros(0, dtype=torch.int64)
    starts, tables = torch.zeros(1, dtype=torch.int32), torch.zeros(0, 1, dtype=torch.int32)
    step = StepTensors(none, none, starts, none.int(), tables, LoraGroups())
    cache = backend.kv_cache(2, 16, KV_HEADS, HEAD_DIM, dtype)
    table = oracle.rope_table(4, HEAD_DIM)
    assert backend.decoder_layer(random(0, HIDDEN, dtype=dtype), layer, cache, step, table).shape == (0, HIDDEN)


KINDS = [(False, None), (True, 9), (False, 30), (True, None)]


@pytest.mark.usefixtures("threads")
def test_all_layers_at_once_are_the_layers_one_by_one(native: Backend, dtype: torch.dtype) -> None:
    groups, table = LoraGroups((0, 1), (1, 10, 26)), oracle.rope_table(64, HEAD_DIM)
    layers = [
        Weights(dtype, normed, affines=window is None).layer(native, dtype, window, True) for normed, window in KINDS
    ]
    x = random(26, HIDDEN, dtype=dtype)
    caches: list[list[KVCache]] = []
    for _ in range(2):
        torch.manual_seed(3)
        placed = [step_and_cache(native, dtype, groups) for _ in layers]
        step = placed[0][0]
        caches.append([cache for _, cache in placed])
    at_once = native.decoder(x.clone(), layers, caches[0], step, table)
    one_by_one = Backend.decoder(native, x.clone(), layers, caches[1], step, table)
    assert torch.equal(at_once, one_by_one)
    for first, second in zip(*caches, strict=True):
        for stored, expected in zip(first.read(range(BLOCKS)), second.read(range(BLOCKS)), strict=True):
            assert torch.equal(stored, expected)
