"""Engines whose base model lies in 8 bits."""

from __future__ import annotations

import pytest
from tests.engine.bench import Bench, mixed, run

from polygraft_engine.types import EngineError


def test_native_and_reference_agree(bench: Bench) -> None:
    generations = mixed(bench)
    expected = run(bench.engine(quantization="int8"), generations)
    got = run(bench.engine(quantization="int8", kernels="native"), generations)
    assert {id: each.tokens for id, each in got.items()} == {id: each.tokens for id, each in expected.items()}
    assert any(each.tokens for each in got.values())


def test_it_is_another_numerics(bench: Bench) -> None:
    prompts = mixed(bench, prompt_logprobs=0)
    plain, quantized = bench.engine(), bench.engine(quantization="int8")
    assert plain.info.numerics_id != quantized.info.numerics_id
    assert run(plain, prompts) != run(quantized, prompts)


def test_an_unknown_quantization_is_named(bench: Bench) -> None:
    with pytest.raises(EngineError, match="'int3' is not one of int8"):
        bench.engine(quantization="int3")
