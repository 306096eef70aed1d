"""Weights and adapters take what they need of the arena, and give it back."""

from __future__ import annotations

import torch

from polygraft_kernels.api import Affine, LoraPair
from polygraft_kernels.native.pages import LINE, Arena
from polygraft_kernels.native.storage import NativeBank, NativeLinear


def test_pairs_and_affines_lie_in_the_arena_until_cleared() -> None:
    arena = Arena()
    bank = NativeBank(8, (16, 24), 2, torch.bfloat16, 8, arena)
    pair = LoraPair(torch.ones(3, 8), torch.ones(24, 3), 1.0)
    bank.load(1, [None, pair], [Affine(torch.ones(16)), Affine(None, torch.ones(24))])
    bank.check()
    a, b = 8 * 8, 24 * 4  # panels of whole vectors, of pairs of inputs
    assert bank.numbers(1) == a + b + 16 + 24
    assert arena.used == sum(-(-size // LINE) * LINE for size in (2 * a, 2 * b, 4 * 16, 4 * 24))
    bank.load(1, [None, None], [None, Affine(torch.ones(24), torch.ones(24))])
    bank.check()
    assert bank.numbers(1) == 2 * 24
    bank.clear(1)
    bank.check()
    assert bank.numbers(1) == 0
    assert arena.used == 0


def test_a_weight_gives_its_panels_back() -> None:
    arena = Arena()
    kept = NativeLinear(torch.ones(16, 8), None, None, torch.float32, 8, arena)
    dropped = NativeLinear(torch.ones(4096, 576), None, None, torch.float32, 8, arena)
    assert arena.used == kept.nbytes + dropped.nbytes
    del dropped
    assert arena.used == kept.nbytes
