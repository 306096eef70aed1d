"""Tokens a second of a whole engine, with captured graphs and without."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import save_file

from gpu.bench import Figure
from polygraft_adapters.types import AdapterInfo, ModuleKey
from polygraft_adapters.weights import AdapterWeights, ModuleDelta
from polygraft_engine.adapter_source import DictSource
from polygraft_engine.build import build_engine
from polygraft_engine.engine import Engine
from polygraft_engine.models.architecture import ModelSpec, read_spec
from polygraft_engine.models.checkpoint import expected_tensors
from polygraft_engine.options import EngineOptions
from polygraft_engine.types import Generation, SamplingParams
from polygraft_kernels.triton import TritonBackend

MODEL = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
MODEL |= {"intermediate_size": 8192, "vocab_size": 32000, "max_position_embeddings": 4096}
TINY_MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_MODEL |= {"intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 256}


def tokens_per_second(model: Path, smoke: bool) -> Iterator[Figure]:
    """A whole engine: base and eight adapters, with captured graphs and without."""
    spec = read_spec(model)
    prompt, new, batches = (8, 2, (2,)) if smoke else (128, 128, (1, 8, 16, 64))
    source = DictSource()
    digests = [
        source.put(random_adapter(spec, index, rank)) for index, rank in enumerate((8, 8, 16, 16, 32, 32, 64, 64))
    ]
    options = EngineOptions(
        model=str(model),
        kernels="triton",
        dtype="bfloat16",
        prefix_caching=False,
        kv_cache_memory=(1 << 20 if smoke else 8 << 30),
    )
    for captured in (False,) if smoke else (True, False):
        with patch.object(TritonBackend, "captures", captured):
            engine = build_engine(options, source)
        for name, adapters in (("base", []), ("8 adapters", digests)):
            for batch in batches:
                if not smoke:
                    _run(engine, batch, prompt, new, adapters)
                began = time.perf_counter()
                made = _run(engine, batch, prompt, new, adapters)
                rate = made / (time.perf_counter() - began)
                yield Figure("engine", name, batch, "graphs" if captured else "no graphs", rate, "tokens/s")
        del engine


def _run(engine: Engine, batch: int, prompt: int, new: int, adapters: Sequence[str]) -> int:
    draw = random.Random(0)
    params = SamplingParams(max_tokens=new, seed=0, temperature=0.0, ignore_eos=True)
    for row in range(batch):
        ids = tuple(draw.randrange(3, engine.spec.vocab) for _ in range(prompt))
        adapter = adapters[row % len(adapters)] if adapters else None
        engine.add(Generation(id=str(row), prompt=ids, params=params, adapter=adapter))
    made = 0
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            made += len(output.token_ids)
    return made


def random_adapter(spec: ModelSpec, index: int, rank: int) -> AdapterWeights:
    """On all seven modules."""
    modules = spec.module_shapes("")
    pairs = {
        ModuleKey(layer, target): ModuleDelta(
            (torch.randn(rank, inputs) * 0.01).bfloat16(), (torch.randn(outputs, rank) * 0.01).bfloat16(), 1.0
        )
        for layer in range(modules.layers)
        for target, (outputs, inputs) in modules.shapes.items()
    }
    return AdapterWeights(AdapterInfo(f"random-{index}", rank, 1.0, tuple(modules.shapes), 0, None, ()), pairs)


def random_model(folder: Path, smoke: bool) -> Path:
    """A Llama of random weights."""
    shape = TINY_MODEL if smoke else MODEL
    config = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    config |= {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16", **shape}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: (torch.ones(shape) if "norm" in name else torch.randn(shape) * shape[-1] ** -0.5).bfloat16()
        for name, shape in expected_tensors(read_spec(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
