"""Slots hold adapters at their exact ranks; operands that do not fit are refused."""

from __future__ import annotations

import pytest
import torch

from polygraft_kernels.api import Affine, BackendUnavailable, LoraGroups, LoraPair
from polygraft_kernels.checks import InvalidOperand
from polygraft_kernels.registry import choose
from polygraft_kernels.triton import TritonBackend

CPU = torch.device("cpu")


@pytest.fixture
def backend() -> TritonBackend:
    return TritonBackend(CPU)


def pair(rank: int, outputs: int = 16) -> LoraPair:
    return LoraPair(torch.ones(rank, 8), torch.ones(outputs, rank), 1.0)


def test_memory_is_the_adapters_own(backend: TritonBackend) -> None:
    bank = backend.lora_bank(8, (16, 24), 3, torch.float32)
    bank.load(1, [pair(3), None])
    assert bank.ranks.tolist() == [[0, 0], [3, 0], [0, 0]]
    assert bank.elements == 3 * (8 + 16)
    bank.check()
    bank.load(2, [None, None], [Affine(torch.ones(16)), Affine(torch.ones(24), torch.ones(24))])
    assert bank.ranks[2].tolist() == [0, 0]
    assert bank.elements == 3 * (8 + 16) + 16 + 2 * 24
    bank.check()
    bank.clear(1)
    bank.clear(2)
    assert bank.elements == 0
    bank.check()


def test_groups_and_shapes_are_checked(backend: TritonBackend) -> None:
    bank = backend.lora_bank(8, (16,), 2, torch.float32)
    for groups in (LoraGroups((2,), (0, 4)), LoraGroups((-1,), (0, 4)), LoraGroups((0,), (0, 5))):
        with pytest.raises(InvalidOperand):
            backend.lora(torch.ones(4, 16), torch.ones(4, 8), bank, groups)
    with pytest.raises(InvalidOperand, match="slot -1"):
        bank.clear(-1)
    with pytest.raises(InvalidOperand, match=r"x \[4, 3\]"):
        backend.linear(torch.ones(4, 3), backend.pack_linear(torch.ones(5, 2)))
    with pytest.raises(InvalidOperand, match="float64"):
        backend.kv_cache(4, 16, 1, 16, torch.float64)
    cache = backend.kv_cache(4, 16, 2, 16, torch.float32)
    k = torch.ones(3, 2, 16)
    with pytest.raises(InvalidOperand, match=r"v \[3, 1, 16\]"):
        backend.store_kv(k, k[:, :1], cache, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InvalidOperand, match="rope table"):
        backend.rope(k, k.clone(), torch.zeros(3, dtype=torch.int64), torch.ones(4, 2, 16))


def test_asked_for_by_name_it_runs_or_says_why_not() -> None:
    assert choose("triton", CPU, torch.bfloat16).backend.name == "triton"
    assert choose("triton-invariant", CPU, torch.bfloat16).backend.name == "triton-invariant"
    with pytest.raises(BackendUnavailable, match="float16"):
        choose("triton", CPU, torch.float16)
    with pytest.raises(BackendUnavailable, match="not on meta"):
        choose("triton", torch.device("meta"), torch.float32)
    assert choose("auto", CPU, torch.float32).backend.name != "triton"
