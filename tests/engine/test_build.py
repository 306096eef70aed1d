"""Options to an engine: dtypes, sizes and their refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.engine.bench import Bench, generation, run

from polygraft_engine.build import block_bytes, build_engine, resolve_device, resolve_dtype
from polygraft_engine.memory import DEFAULT_KV_BYTES, available_memory, pool_blocks
from polygraft_engine.options import EngineOptions
from polygraft_engine.types import EngineError
from polygraft_kernels.api import BackendUnavailable, KernelError
from polygraft_kernels.reference import ReferenceBackend


@pytest.mark.parametrize(
    ("asked", "stored", "computed"),
    [
        ("auto", "float32", "float32"),
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "bfloat16"),
        ("float32", "bfloat16", "float32"),
        ("float16", "float32", "float16"),
    ],
)
def test_half_precision_checkpoints_compute_in_bfloat16(asked: str, stored: str, computed: str) -> None:
    assert resolve_dtype(asked, stored) == computed


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(EngineError, match="'int8' is not one of auto, float32, bfloat16, float16"):
        resolve_dtype("int8", "float32")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(EngineError, match="no GPU"):
        resolve_device("cuda")


def test_the_pool_is_never_larger_than_all_sequences_need() -> None:
    assert pool_blocks(2**40, 1000, 16, max_model_len=100, max_num_seqs=3, available=2**40) == 21


def test_the_default_pool_is_a_share_of_what_is_available() -> None:
    huge = {"block_size": 16, "max_model_len": 2**30, "max_num_seqs": 64}
    assert pool_blocks(None, 1024, **huge, available=2**40) == DEFAULT_KV_BYTES // 1024
    assert pool_blocks(None, 1024, **huge, available=2**30) == int(2**30 * 0.3) // 1024


def test_a_pool_without_a_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(EngineError, match=r"999 bytes .* one block of 16 tokens, which takes 1000 bytes"):
        pool_blocks(999, 1000, 16, max_model_len=100, max_num_seqs=3, available=2**40)


def test_available_memory_is_plausible() -> None:
    assert 2**20 < available_memory() < 2**50


def test_a_block_is_keys_and_values_of_all_layers(bench: Bench) -> None:
    assert block_bytes(bench.spec, 16, torch.bfloat16) == 2 * 2 * 16 * 2 * 24 * 2


def test_the_context_is_the_models_unless_told_otherwise(bench: Bench) -> None:
    assert bench.engine().limits.max_model_len == 256
    assert bench.engine(max_model_len=64).limits.max_model_len == 64
    with pytest.raises(EngineError, match="300 is more than the 256 positions"):
        bench.engine(max_model_len=300)


def test_a_cache_that_the_kernels_cannot_make_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise KernelError("blocks of 16 are odd")

    monkeypatch.setattr(ReferenceBackend, "kv_cache", refuse)
    with pytest.raises(EngineError, match="the reference kernels cannot make this KV cache: blocks of 16 are odd"):
        bench.engine()


def test_unknown_kernels_are_refused(bench: Bench) -> None:
    with pytest.raises(BackendUnavailable, match="abacus"):
        bench.engine(kernels="abacus")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_and_says_so(make_model: Callable[..., Path], dtype: str) -> None:
    bench = Bench(make_model(dtype=dtype))
    adapter = bench.adapter("a1")
    engine = bench.engine(dtype=dtype)
    assert engine.info.dtype == dtype
    assert engine.info.backend == "reference"
    assert engine.info.numerics_id.startswith(f"reference/{dtype}/")
    result = run(engine, [generation("a", bench.prompt(20)), generation("b", bench.prompt(9), adapter)])
    assert all(len(each.tokens) == 8 for each in result.values())


def test_threads_are_set_when_told(bench: Bench) -> None:
    before = torch.get_num_threads()
    try:
        build_engine(
            EngineOptions(model=str(bench.folder), kernels="reference", kv_cache_memory=2**20, threads=1),
            bench.source(),
        )
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
