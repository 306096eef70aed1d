"""What is worked out of an adapter before it goes into a slot: by formulas written out, and beside a running step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
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
from polygraft_engine.lora import AdapterBanks
from polygraft_engine.models.decoder import Decoder
from polygraft_engine.models.loading import load_decoder
from polygraft_engine.models.packing import weight_packer
from polygraft_engine.prepared import PreparedAdapter
from polygraft_engine.preparing import Preparer
from polygraft_kernels.api import LoraGroups
from polygraft_kernels.quantization import quantize
from polygraft_kernels.registry import choose

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
    found.check()
    assert engine.prepare(found) is found
    return found


@dataclass(frozen=True)
class Parts:
    """What an engine is made of, one adapter slot wide."""

    decoder: Decoder
    banks: AdapterBanks
    preparer: Preparer

    def output(self, weights: AdapterWeights, key: ModuleKey, x: Tensor) -> Tensor:
        """What the module `key` computes of x with the adapter."""
        self.banks.load(0, self.preparer(weights))
        layer = self.decoder.layers[key.layer]
        linear = layer.qkv if key.target == "k_proj" else layer.down
        y = self.decoder.backend.lora_linear(x, linear, LoraGroups((0,), (0, len(x))))
        base = self.decoder.modules[key]
        return y[:, base.first : base.first + base.width]


def parts(bench: Bench, kernels: str, quantization: str | None = None) -> Parts:
    backend = choose(kernels, torch.device("cpu"), torch.float32).backend
    banks = AdapterBanks(backend, bench.spec, 1, torch.float32)
    pack = weight_packer(backend, quantization)
    decoder = load_decoder(bench.folder, bench.spec, backend, torch.float32, pack, banks, 64)
    return Parts(decoder, banks, Preparer(decoder, banks, pack))


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_dora_divides_by_the_norm_of_the_whole_matrix_and_leaves_the_bias_alone(
    biased: Bench, base: dict[str, Tensor], kernels: str, quantization: str | None
) -> None:
    made = parts(biased, kernels, quantization)
    shapes = biased.spec.module_shapes("").shapes
    pairs = {key: delta(biased, key.target, magnitude=rand(shapes[key.target][0], seed=3)) for key in (KEY, DOWN)}
    for key, pair in pairs.items():
        x = rand(5, shapes[key.target][1], seed=7)
        weight, bias = base[f"{key.path}.weight"], base[f"{key.path}.bias"]
        weight = weight if quantization is None else quantize(weight).dequantized()
        whole = weight + pair.scale * pair.b @ pair.a
        assert pair.magnitude is not None
        expected = x @ (whole * (pair.magnitude / torch.linalg.norm(whole, dim=1))[:, None]).T + bias
        got = made.output(adapter(biased, pairs), key, x)
        tolerance = 0.1 if quantization == "int8" else 1e-4
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_biases_replace_the_bases_and_those_of_lora_b_are_scaled(
    biased: Bench, base: dict[str, Tensor], kernels: str
) -> None:
    made = parts(biased, kernels)
    width, in_features = biased.spec.module_shapes("").shapes["k_proj"]
    x, lora_bias, new = rand(5, in_features, seed=7), rand(width, seed=4), rand(width, seed=5)
    product, old = x @ base[f"{KEY.path}.weight"].T, base[f"{KEY.path}.bias"]
    pair = delta(biased, "k_proj", bias=lora_bias)
    added = 1.5 * (x @ pair.a.T @ pair.b.T + lora_bias)

    def output(pairs: dict[ModuleKey, ModuleDelta], biases: dict[ModuleKey, Tensor]) -> Tensor:
        return made.output(adapter(biased, pairs, biases=biases), KEY, x)

    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(output({KEY: pair}, {}), product + old + added)
    close(output({}, {KEY: new}), product + new)
    close(output({KEY: pair}, {KEY: new}), product + new + added)
    close(output({}, {DOWN: rand(biased.spec.hidden)}), product + old)


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
    assert lora.a.nbytes + lora.b.nbytes <= same.nbytes < embedding.nbytes / 2
    changed_embedding, changed_head = embedding.clone(), head.clone()
    changed_embedding[5, 7] += 1e-3
    changed_head[5, 7] += 1e-3
    other = prepare(changed_embedding, changed_head)
    assert other.embedding is not None
    assert other.head is not None
    assert other.head.weight is not None
    assert other.nbytes == same.nbytes + embedding.nbytes + head.nbytes


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
        found = [future.result() for future in under_way]
    digest = source.put(first)
    alone = run(engine, [generation("alone", bench.prompt(9), digest, logprobs=3)])["alone"]
    for each in found[::13]:
        assert engine.drop_adapter(digest)
        engine.flush_prefix_cache()
        source.put(each)
        assert run(engine, [generation("again", bench.prompt(9), digest, logprobs=3)])["again"] == alone


def test_sequences_of_one_group_may_hold_retrained_tokens_and_others(bench: Bench) -> None:
    source = DictSource()
    engine = bench.engine(source=source, kernels="native", prefix_caching=False)
    digest = source.put(engine.prepare(with_tables(bench, 3)))
    prompts = {"both": (9, 3, 3, 9), "one": (4, 9, 5), "none": (4, 5, 6, 7, 8)}
    together = run(engine, [generation(id, prompt, digest, logprobs=3) for id, prompt in prompts.items()])
    for id, prompt in prompts.items():
        assert run(engine, [generation(id, prompt, digest, logprobs=3)])[id] == together[id]
