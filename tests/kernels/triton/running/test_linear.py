"""Our own linear kernel: weights of 8 bits, float32 results, few rows and many."""

from __future__ import annotations

import pytest
import torch
from tests.conformance.oracle import assert_close, random

from polygraft_kernels.quantization import quantize
from polygraft_kernels.triton import InvariantBackend, TritonBackend


@pytest.mark.parametrize("kind", [TritonBackend, InvariantBackend])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(0, 70, 130), (1, 70, 130), (17, 3, 64), (40, 65, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_int8_and_logits(kind: type[TritonBackend], rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    backend = kind(torch.get_default_device())
    x, weight, bias = (
        random(rows, inputs, dtype=dtype),
        random(outputs, inputs, dtype=dtype),
        random(outputs, dtype=dtype),
    )
    quantized = quantize(weight)
    expected = x.double() @ quantized.dequantized().double().T + bias.double()
    packed = backend.pack_int8(quantized, bias)
    assert_close(backend.linear(x, packed), expected, steps=2)
    logits = backend.logits(x, packed)
    assert logits.dtype == torch.float32
    assert_close(logits, expected, steps=2)
    plain = backend.logits(x, backend.pack_linear(weight))
    assert plain.dtype == torch.float32
    assert_close(plain, x.double() @ weight.double().T, steps=2)
