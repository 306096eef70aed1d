"""A tiny random Llama, adapters for it, and a bench to run engines on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from polygraft_adapters.types import ModuleKey
from polygraft_adapters.weights import AdapterWeights, load_adapter
from polygraft_engine.adapter_source import AdapterSource, DictSource
from polygraft_engine.build import build_engine
from polygraft_engine.engine import Engine
from polygraft_engine.models.architecture import ModelSpec, read_spec
from polygraft_engine.models.checkpoint import expected_tensors
from polygraft_engine.options import EngineOptions
from polygraft_engine.types import FinishReason, Generation, SamplingParams, TokenLogprob

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


ADAPTERS = (None, "a1", "a2", "a3", "a4")
"""Names for `Bench.adapter`, and the base."""


@dataclass
class Result:
    """Everything the engine said of one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None


class Bench:
    """A model folder, its adapters, and the shortest way to run sequences on them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec: ModelSpec = read_spec(folder)
        self._adapters: dict[str, AdapterWeights] = {}

    def adapter(self, name: str) -> str:
        """The digest of a random adapter; the name decides its rank, modules, scale and numbers."""
        if name not in self._adapters:
            seed = sum(map(ord, name))
            path = write_adapter(self.folder.parent / name, self.spec, seed)
            modules = self.spec.module_shapes(self.folder.name)
            self._adapters[name] = load_adapter(path, modules, 64, torch.float32)
        return self._adapters[name].info.digest

    def weights(self, name: str) -> AdapterWeights:
        self.adapter(name)
        return self._adapters[name]

    def source(self) -> DictSource:
        """All adapters made so far."""
        return DictSource(self._adapters.values())

    def engine(self, *, source: AdapterSource | None = None, **options: object) -> Engine:
        """A small engine on the reference kernels; `options` are EngineOptions'."""
        blocks = options.pop("num_blocks", 64)
        size = options.get("block_size", 16)
        assert isinstance(blocks, int)
        assert isinstance(size, int)
        bytes_per_block = 2 * self.spec.layers * size * self.spec.kv_heads * self.spec.head_dim * 4
        settings = {"kernels": "reference", "max_lora_rank": 16, "kv_cache_memory": blocks * bytes_per_block}
        return build_engine(
            EngineOptions(model=str(self.folder), **{**settings, **options}),
            self.source() if source is None else source,
        )

    def prompt(self, length: int, seed: int = 0) -> tuple[int, ...]:
        """Random token ids, none of them special."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(3, self.spec.vocab, (length,), generator=generator).tolist())


def generation(
    id: str,
    prompt: Sequence[int],
    adapter: str | None = None,
    *,
    choice: int = 0,
    namespace: str = "",
    **params: object,
) -> Generation:
    """Greedy, eight tokens, never ended by a special token, unless told otherwise."""
    settings = {"max_tokens": 8, "seed": 0, "temperature": 0.0, "ignore_eos": True, **params}
    return Generation(
        id=id,
        prompt=tuple(prompt),
        params=SamplingParams(**settings),  # type: ignore[arg-type]
        adapter=adapter,
        cache_namespace=namespace,
        choice=choice,
    )


def mixed(bench: Bench, **params: object) -> list[Generation]:
    """One sequence per adapter and the base, of different lengths, half of them sampled."""
    return [
        generation(
            str(name),
            bench.prompt(20 + 9 * index, seed=index),
            None if name is None else bench.adapter(name),
            temperature=0.8 * (index % 2),
            seed=index,
            logprobs=5,
            **params,
        )
        for index, name in enumerate(ADAPTERS)
    ]


def run(engine: Engine, generations: Iterable[Generation]) -> dict[str, Result]:
    """Everything to its end, in one batch; the engine's invariants are checked after every step."""
    results: dict[str, Result] = {}
    for each in generations:
        engine.add(each)
        results[each.id] = Result()
    while engine.has_work:
        for output in engine.step():
            result = results[output.id]
            assert result.finish_reason is None, "an output after the last"
            result.tokens.extend(output.token_ids)
            result.logprobs.extend(output.logprobs)
            if output.prompt_logprobs is not None:
                assert result.prompt_logprobs is None, "prompt logprobs come once"
                result.prompt_logprobs = output.prompt_logprobs
            result.cached_tokens = output.cached_tokens
            result.finish_reason, result.error = output.finish_reason, output.error
        engine.check()
    return results


def write_model(folder: Path, config: Mapping[str, object], seed: int = 0) -> Path:
    """A model folder of random weights, large enough that greedy choices are well apart."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_spec(folder)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * shape[-1] ** -0.5 * 2
        for name, shape in expected_tensors(spec).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_adapter(folder: Path, spec: ModelSpec, seed: int) -> Path:
    """A PEFT folder: rank 2 to 16, some or all modules, layers and scales, as `seed` has it."""
    generator = torch.Generator().manual_seed(seed)
    rank = (2, 4, 8, 16)[seed % 4]
    shapes = spec.module_shapes("").shapes
    targets = (tuple(shapes), ("q_proj", "v_proj"), ("k_proj", "o_proj", "down_proj"), ("gate_proj", "up_proj"))[
        seed % 3
    ]
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(spec.layers):
        for target in targets:
            out_features, in_features = shapes[target]
            prefix = f"base_model.model.{ModuleKey(layer, target).path}"
            a = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
            tensors[f"{prefix}.lora_A.weight"] = a
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": seed % 2 == 1,
        "target_modules": list(targets),
        "base_model_name_or_path": "tiny",
    }
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
