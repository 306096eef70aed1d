"""Panels: the layout that native/tile.h reads."""

from __future__ import annotations

import pytest
import torch

from polygraft_kernels.native.layouts import pack_panels


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (8, 4), (16, 5), (24, 7), (40, 6)])
def test_bfloat16_panels_hold_pairs_of_inputs_side_by_side(outputs: int, inputs: int) -> None:
    lanes = 8
    matrix = torch.arange(outputs * inputs).view(outputs, inputs).to(torch.bfloat16)
    flat = pack_panels(matrix, lanes, torch.zeros).tolist()
    depth = inputs + inputs % 2
    vectors = -(-outputs // lanes)
    assert len(flat) == vectors * lanes * depth
    for n in range(outputs):
        panel, width = n // (2 * lanes), 2 if n // (2 * lanes) * 2 + 2 <= vectors else 1
        for k in range(inputs):
            vector = n // lanes % 2
            at = panel * 2 * lanes * depth + ((k // 2 * width + vector) * lanes + n % lanes) * 2 + k % 2
            assert flat[at] == matrix[n, k].item()


def test_float32_panels() -> None:
    matrix = torch.arange(12 * 3.0).view(12, 3)
    flat = pack_panels(matrix, 4, torch.zeros)
    assert torch.equal(flat[:24].view(3, 8), matrix[:8].T)
    assert torch.equal(flat[24:].view(3, 4), matrix[8:].T)


def test_padding_is_zero() -> None:
    flat = pack_panels(torch.ones(9, 3, dtype=torch.bfloat16), 8, torch.zeros)
    assert flat.float().sum() == 27
    assert flat.numel() == 16 * 4
