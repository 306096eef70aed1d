"""What is worked out of an adapter before it goes into a slot: by formulas written out, and beside a running step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.bench import TINY_CONFIG, Bench, generation, run, write_model
from torch import Tensor

from polygraft_adapters.types import EMBEDDING, HEAD, ModuleKey
from polygraft_adapters.weights import AdapterWeights, ModuleDelta, TableDelta, TokenRows
from polygraft_engine.adapter_source import DictSource
from polygraft_engine.engine import Engine
from polygraft_engine.preparing import PreparedAdapter
from polygraft_kernels.quantization import quantize

KEY = ModuleKey(1, "k_proj")
DOWN = ModuleKey(0, "down_proj")


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A tiny Llama whose projections all have biases."""
    config = {**TINY_CONFIG, "attention_bias": True, "mlp_bias": True}
    return Bench(write_model(tmp_path_factory.mktemp("models") / "biased", config))


@pytest.fixture(scope="module")
def base(biased: Bench) -> dict[str, Tensor]:
    """The numbers of that model."""
    return load_file(biased.folder / "model.safetensors")


def delta(bench: Bench, target: str, rank: int = 4, **more: Tensor) -> ModuleDelta:
    out_features, in_features = bench.spec.module_shapes("").shapes[target]
    return ModuleDelta(rand(rank, in_features, seed=1), rand(out_features, rank, seed=2) * 0.3, 1.5, **more)


def adapter(
    bench: Bench,
    pairs: dict[ModuleKey, ModuleDelta],
    *,
    biases: dict[ModuleKey, Tensor] | None = None,
    tables: dict[str, TableDelta] | None = None,
    digest: str = "sha256:made",
) -> AdapterWeights:
    info = replace(bench.weights("a1").info, digest=digest, rank=4)
    none: dict[ModuleKey, Tensor] = {}
    return AdapterWeights(
        info,
        MappingProxyType(pairs),
        biases=MappingProxyType(none if biases is None else biases),
        tables=MappingProxyType({} if tables is None else tables),
    )


def prepared(engine: Engine, weights: AdapterWeights) -> PreparedAdapter:
    found = engine.prepare(weights)
    assert isinstance(found, PreparedAdapter)
    assert engine.prepare(found) is found
    return found


def test_plain_lora_is_left_as_it_is(bench: Bench) -> None:
    weights = bench.weights("a1")
    assert bench.engine().prepare(weights) is weights


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_gain_of_dora_is_the_magnitude_over_the_norm_of_the_whole_matrix(
    biased: Bench, base: dict[str, Tensor], kernels: str, quantization: str | None
) -> None:
    engine = biased.engine(kernels=kernels, quantization=quantization)
    pairs = {
        key: delta(biased, key.target, magnitude=rand(biased.spec.module_shapes("").shapes[key.target][0], seed=3))
        for key in (KEY, DOWN)
    }
    found = prepared(engine, adapter(biased, pairs))
    for key, pair in pairs.items():
        weight, bias = base[f"{key.path}.weight"], base[f"{key.path}.bias"]
        weight = weight if quantization is None else quantize(weight).dequantized()
        assert pair.magnitude is not None
        gain = (
            pair.magnitude / torch.linalg.norm(weight.double() + pair.scale * (pair.b @ pair.a).double(), dim=1).float()
        )
        affine = found.affines[key]
        assert affine.gain is not None
        assert affine.shift is not None
        tolerance = {"rtol": 1e-2, "atol": 1e-3} if quantization else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(affine.gain, gain, **tolerance)
        torch.testing.assert_close(affine.shift, (1 - affine.gain) * bias)
    assert all(pair.magnitude is None for pair in found.pairs.values())


def test_biases_shift_and_are_not_gained(biased: Bench, base: dict[str, Tensor]) -> None:
    engine = biased.engine()
    width = biased.spec.module_shapes("").shapes["k_proj"][0]
    lora_bias, new = rand(width, seed=4), rand(width, seed=5)
    old = base[f"{KEY.path}.bias"]

    def shift(pair: ModuleDelta | None, bias: Tensor | None) -> Tensor | None:
        pairs = {} if pair is None else {KEY: pair}
        affine = prepared(engine, adapter(biased, pairs, biases=None if bias is None else {KEY: bias})).affines[KEY]
        assert affine.gain is None
        return affine.shift

    torch.testing.assert_close(shift(delta(biased, "k_proj", bias=lora_bias), None), 1.5 * lora_bias)
    torch.testing.assert_close(shift(None, new), new - old)
    torch.testing.assert_close(shift(delta(biased, "k_proj", bias=lora_bias), new), new - old + 1.5 * lora_bias)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_copies_of_the_bases_own_tables_take_no_memory(
    make_model: Callable[..., Path], kernels: str, tied: bool
) -> None:
    bench = Bench(make_model(tie_word_embeddings=tied))
    numbers = load_file(bench.folder / "model.safetensors")
    embedding = numbers["model.embed_tokens.weight"]
    head = numbers.get("lm_head.weight", embedding)
    vocabulary, hidden = embedding.shape
    lora = ModuleDelta(rand(2, hidden), rand(vocabulary, 2), 1.0)
    engine = bench.engine(kernels=kernels)

    def prepare(embedding: Tensor, head: Tensor) -> PreparedAdapter:
        tables = {EMBEDDING: TableDelta(weight=embedding.clone()), HEAD: TableDelta(weight=head.clone(), lora=lora)}
        return prepared(engine, adapter(bench, {}, tables=tables))

    same = prepare(embedding, head)
    assert same.embedding is None
    assert same.head is not None
    assert same.head.weight is None
    assert same.nbytes == lora.a.nbytes + lora.b.nbytes
    changed_embedding, changed_head = embedding.clone(), head.clone()
    changed_embedding[5, 7] += 1e-3
    changed_head[5, 7] += 1e-3
    other = prepare(changed_embedding, changed_head)
    assert other.embedding is not None
    assert other.head is not None
    assert other.head.weight is not None
    assert other.nbytes == same.nbytes + embedding.nbytes + head.nbytes
    assert not other.tables


def with_tables(bench: Bench, seed: int) -> AdapterWeights:
    """An adapter of everything that has to be prepared."""
    vocabulary, hidden = bench.spec.vocab, bench.spec.hidden
    q = bench.spec.module_shapes("").shapes["q_proj"][0]
    tables = {
        EMBEDDING: TableDelta(tokens=TokenRows((9, 3), rand(2, hidden, seed=seed))),
        HEAD: TableDelta(weight=rand(vocabulary, hidden, seed=seed) * 0.2),
    }
    pairs = {ModuleKey(0, "q_proj"): delta(bench, "q_proj", magnitude=rand(q, seed=seed))}
    return adapter(bench, pairs, tables=tables, digest=f"sha256:{seed}")


def test_an_adapter_that_was_not_prepared_is_served_the_same(bench: Bench) -> None:
    weights, prompt = with_tables(bench, 1), (9, 3, 11, 5)
    results = []
    for prepares in (True, False):
        source = DictSource()
        engine = bench.engine(source=source)
        digest = source.put(engine.prepare(weights) if prepares else weights)
        results.append(run(engine, [generation("x", prompt, digest, logprobs=5)])["x"])
    assert results[0] == results[1]
    base = run(bench.engine(), [generation("x", prompt, logprobs=5)])["x"]
    assert results[0].tokens != base.tokens


def test_preparing_goes_on_beside_running_steps(bench: Bench) -> None:
    source = DictSource()
    engine = bench.engine(source=source, kernels="native")
    expected = run(engine, [generation("x", bench.prompt(30), max_tokens=40)])["x"].tokens
    first = prepared(engine, with_tables(bench, 2))
    with ThreadPoolExecutor(4) as threads:
        under_way = [threads.submit(prepared, engine, with_tables(bench, 2)) for _ in range(40)]
        for turn in range(4):
            assert run(engine, [generation(f"{turn}", bench.prompt(30), max_tokens=40)])[f"{turn}"].tokens == expected
        for future in under_way:
            found = future.result()
            for key, affine in first.affines.items():
                assert torch.equal(found.affines[key].gain, affine.gain)  # type: ignore[arg-type]


def test_sequences_of_one_group_may_hold_retrained_tokens_and_others(bench: Bench) -> None:
    source = DictSource()
    engine = bench.engine(source=source, kernels="native", prefix_caching=False)
    digest = source.put(engine.prepare(with_tables(bench, 3)))
    prompts = {"both": (9, 3, 3, 9), "one": (4, 9, 5), "none": (4, 5, 6, 7, 8)}
    together = run(engine, [generation(id, prompt, digest, logprobs=3) for id, prompt in prompts.items()])
    for id, prompt in prompts.items():
        assert run(engine, [generation(id, prompt, digest, logprobs=3)])[id] == together[id]
