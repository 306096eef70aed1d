"""Operands that do not fit are refused with a message, not read out of bounds."""

from __future__ import annotations

import pytest
import torch

from polygraft_kernels.api import Affine, Backend, DecoderLayer, LoraGroups, LoraLinear, LoraPair, StepTensors
from polygraft_kernels.checks import InvalidOperand
from polygraft_kernels.native import create_isa
from polygraft_kernels.quantization import Int8Weight
from polygraft_kernels.registry import choose

CPU = torch.device("cpu")


@pytest.fixture(params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Both backends refuse alike."""
    return choose(request.param, CPU, torch.float32).backend


@pytest.fixture
def native() -> Backend:
    """The portable unit, which runs everywhere."""
    return create_isa("portable")


def pair(rank: int = 2, inputs: int = 8, outputs: int = 16) -> LoraPair:
    return LoraPair(torch.ones(rank, inputs), torch.ones(outputs, rank), 1.0)


def test_weights(backend: Backend) -> None:
    with pytest.raises(InvalidOperand, match=r"\[N, K\]"):
        backend.pack_linear(torch.ones(3))
    with pytest.raises(InvalidOperand, match="bias"):
        backend.pack_linear(torch.ones(3, 2), torch.ones(2))
    with pytest.raises(InvalidOperand, match=r"x \[4, 3\]"):
        backend.linear(torch.ones(4, 3), backend.pack_linear(torch.ones(5, 2)))


def test_int8_weights(backend: Backend) -> None:
    q, scale = torch.ones(5, 2, dtype=torch.int8), torch.ones(5)
    for weight, message in [
        (Int8Weight(q.float(), scale), "not torch.float32 and"),
        (Int8Weight(q, scale.double()), "not torch.int8 and torch.float64"),
        (Int8Weight(q, scale[:4]), r"scale \[4\] does not fit N=5"),
        (Int8Weight(q[0], scale), r"\[N, K\]"),
    ]:
        with pytest.raises(InvalidOperand, match=message):
            backend.pack_int8(weight)


def test_pairs(backend: Backend) -> None:
    bank = backend.lora_bank(8, (16, 24), 2, torch.float32)
    for slot, pairs, message in [
        (2, [None, None], "slot 2"),
        (0, [pair()], "1 pairs"),
        (0, [pair(outputs=15), None], "do not fit"),
        (0, [pair(inputs=7), None], "do not fit"),
        (0, [LoraPair(torch.ones(0, 8), torch.ones(16, 0), 1.0), None], "do not fit"),
        (0, [LoraPair(torch.ones(3, 8), torch.ones(16, 2), 1.0), None], "do not fit"),
    ]:
        with pytest.raises(InvalidOperand, match=message):
            bank.load(slot, pairs)
    with pytest.raises(InvalidOperand, match="slot -1"):
        bank.clear(-1)
    bank.check()


def test_affines(backend: Backend) -> None:
    bank = backend.lora_bank(8, (16, 24), 2, torch.float32)
    for affines, message in [
        ([None], "1 affines given for 2"),
        ([Affine(torch.ones(15), None), None], "gain of an affine is not a vector of 16"),
        ([None, Affine(torch.ones(24), torch.ones(1, 24))], "shift of an affine is not a vector of 24"),
        ([Affine(torch.ones(16, dtype=torch.int32), None), None], "gain .* 16 floats"),
    ]:
        with pytest.raises(InvalidOperand, match=message):
            bank.load(0, [None, None], affines)
    bank.check()


@pytest.mark.parametrize(
    "groups",
    [
        LoraGroups((0,), (0,)),
        LoraGroups((2,), (0, 4)),
        LoraGroups((-1,), (0, 4)),
        LoraGroups((0,), (0, 5)),
        LoraGroups((0, 1), (0, 3, 2)),
    ],
    ids=["no end", "no such slot", "base as a slot", "too many rows", "descending"],
)
def test_groups(backend: Backend, groups: LoraGroups) -> None:
    bank = backend.lora_bank(8, (16,), 2, torch.float32)
    with pytest.raises(InvalidOperand):
        backend.lora(torch.ones(4, 16), torch.ones(4, 8), bank, groups)


def test_dtypes_and_devices(native: Backend) -> None:
    with pytest.raises(InvalidOperand, match="float16"):
        native.silu_mul(torch.ones(2, 4, dtype=torch.float16))
    with pytest.raises(InvalidOperand, match="meta"):
        native.silu_mul(torch.ones(2, 4, device="meta"))
    with pytest.raises(InvalidOperand, match="bfloat16"):
        native.linear(torch.ones(2, 4), native.pack_linear(torch.ones(3, 4, dtype=torch.bfloat16)))
    with pytest.raises(InvalidOperand, match="float64"):
        native.kv_cache(4, 16, 1, 16, torch.float64)


def test_cache_shapes(native: Backend) -> None:
    for block_size, head_dim in ((12, 16), (16, 12), (512, 16), (16, 1024)):
        with pytest.raises(InvalidOperand, match="multiples of 8"):
            native.kv_cache(4, block_size, 1, head_dim, torch.float32)


def test_heads_and_indices(native: Backend) -> None:
    cache = native.kv_cache(4, 16, 2, 16, torch.float32)
    k = torch.ones(3, 2, 16)
    with pytest.raises(InvalidOperand, match="slot_mapping"):
        native.store_kv(k, k, cache, torch.zeros(3, dtype=torch.int32))
    with pytest.raises(InvalidOperand, match="differ in rows"):
        native.store_kv(k, k, cache, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(InvalidOperand, match=r"v \[3, 1, 16\]"):
        native.store_kv(k, k[:, :1], cache, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InvalidOperand, match="rope table"):
        native.rope(k, k.clone(), torch.zeros(3, dtype=torch.int64), torch.ones(4, 2, 16))


def test_a_fused_layer_is_checked_like_its_operations(native: Backend) -> None:
    def layer(num_slots: int) -> DecoderLayer:
        def linear(outputs: int, inputs: int) -> LoraLinear:
            bank = native.lora_bank(inputs, (outputs,), num_slots, torch.float32)
            return LoraLinear(native.pack_linear(torch.ones(outputs, inputs)), bank)

        norm, gate_up, down = torch.ones(16), linear(16, 16), linear(16, 8)
        return DecoderLayer(norm, linear(48, 16), None, None, linear(16, 16), norm, gate_up, down, 1, 1, 16, 1e-5, None)

    def step(groups: LoraGroups) -> StepTensors:
        rows = torch.arange(2)
        ends = torch.tensor([0, 2], dtype=torch.int32)
        return StepTensors(rows, rows, ends, ends[1:], torch.zeros(1, 1, dtype=torch.int32), groups)

    cache = native.kv_cache(1, 16, 1, 16, torch.float32)
    table = torch.ones(4, 2, 8)
    x = torch.ones(2, 16)
    for groups, message in [
        (LoraGroups((2,), (0, 2)), "do not all have the slots"),
        (LoraGroups((0,), (0, 3)), "2 rows"),
        (LoraGroups((-1,), (0, 2)), "numbers from 0"),
    ]:
        with pytest.raises(InvalidOperand, match=message):
            native.decoder_layer(x, layer(2), cache, step(groups), table)
    other = native.kv_cache(1, 16, 2, 16, torch.float32)
    with pytest.raises(InvalidOperand, match="other heads"):
        native.decoder_layer(x, layer(2), other, step(LoraGroups((), (2,))), table)
    with pytest.raises(InvalidOperand, match="rope table"):
        native.decoder_layer(x, layer(2), cache, step(LoraGroups((), (2,))), torch.ones(4, 2, 16))
    assert native.decoder_layer(x, layer(2), cache, step(LoraGroups((1,), (0, 2))), table).isfinite().all()
