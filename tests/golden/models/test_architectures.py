"""Every architecture, mixed with adapters in one batch, computes what transformers + PEFT compute alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.engine.bench import Result, generation, run
from tests.golden.models.conftest import ADAPTERS, CONFIGS, VOCABULARY, Golden

from polygraft_adapters.weights import load_adapter
from polygraft_engine.adapter_source import DictSource
from polygraft_engine.build import build_engine
from polygraft_engine.engine import Engine
from polygraft_engine.models.architecture import read_spec
from polygraft_engine.options import EngineOptions

BUDGET = 24
"""Tokens per step: less than most prompts, so that they are computed in chunks."""
NEW_TOKENS = 8
PROMPT_LENGTHS = {None: 50, "all-r4": 61, "qv-r8": 5, "mlp-r3-rslora": 33, "kod-r16": 18, "patterned": 47}
TOLERANCE = 1e-4
"""Of the row's largest logit."""


QUICK = ("qwen3",)
"""The plainest architecture and the one with most beside it; all of them take minutes on a busy machine."""


def prompts() -> dict[str | None, tuple[int, ...]]:
    """One prompt per adapter; all share their beginning, as tenants' prompts do."""
    generator = torch.Generator().manual_seed(3)
    shared = torch.randint(3, VOCABULARY, (max(PROMPT_LENGTHS.values()),), generator=generator).tolist()
    return {adapter: tuple(shared[:length]) for adapter, length in PROMPT_LENGTHS.items()}


def build(golden: Golden, kernels: str) -> tuple[Engine, dict[str | None, str | None]]:
    """An engine and the digest of each adapter."""
    modules = read_spec(golden.folder).module_shapes("tiny")
    weights = {name: load_adapter(path, modules, 16, torch.float32) for name, path in golden.adapters.items()}
    options = EngineOptions(
        model=str(golden.folder),
        kernels=kernels,
        max_num_batched_tokens=BUDGET,
        block_size=8,
        max_loras=len(weights),
        max_lora_rank=16,
        kv_cache_memory=2**24,
    )
    digests = {None: None, **{name: each.info.digest for name, each in weights.items()}}
    return build_engine(options, DictSource(weights.values())), digests


def assert_rows_agree(result: Result, prompt: tuple[int, ...], expected: torch.Tensor) -> None:
    """Every row's distribution over the whole vocabulary, prompt rows included where they were asked for."""
    entries = [*(() if result.prompt_logprobs is None else result.prompt_logprobs), *result.logprobs]
    rows = expected[-len(entries) :]
    for entry, row in zip(entries, rows, strict=True):
        ids, logprobs = zip(*sorted(entry.top), strict=True)
        assert ids == tuple(range(VOCABULARY))
        difference = (torch.tensor(logprobs) - row.log_softmax(-1)).abs().max()
        assert difference <= TOLERANCE * row.abs().max()


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CONFIGS]
)
def test_a_mixed_batch_equals_transformers_and_peft_alone(
    golden: Callable[[str], Golden], name: str, kernels: str
) -> None:
    reference = golden(name)
    engine, digests = build(reference, kernels)
    asked = prompts()
    assert max(map(len, asked.values())) > 2 * BUDGET, "nothing would be chunked"

    def ask(**params: int) -> dict[str, Result]:
        before = engine.stats().forward_passes
        generations = [
            generation(str(adapter), prompt, digests[adapter], max_tokens=NEW_TOKENS, logprobs=VOCABULARY, **params)
            for adapter, prompt in asked.items()
        ]
        results = run(engine, generations)
        passes = engine.stats().forward_passes - before
        assert passes < len(asked) * NEW_TOKENS, "the batch was not mixed"
        return results

    cold, hot = ask(prompt_logprobs=VOCABULARY), ask()
    assert all(result.cached_tokens == 0 for result in cold.values())
    for adapter, prompt in asked.items():
        expected = reference.greedy(adapter, prompt, NEW_TOKENS)
        logits = reference.logits(adapter, [*prompt, *expected])[:-1]
        first, second = logits[len(prompt) - 1 :].topk(2).values.unbind(-1)
        assert (first - second).min() > 1e-3, "the greedy choice is a matter of rounding: take another seed"
        for results in (cold, hot):
            result = results[str(adapter)]
            assert result.tokens == expected
            assert_rows_agree(result, prompt, logits)
        assert hot[str(adapter)].cached_tokens == (len(prompt) - 1) // 8 * 8


def test_adapters_change_what_the_model_says(golden: Callable[[str], Golden]) -> None:
    reference = golden("llama")
    prompt = prompts()["all-r4"]
    answers = {tuple(reference.greedy(adapter, prompt, NEW_TOKENS)) for adapter in (None, *ADAPTERS)}
    assert len(answers) == len(ADAPTERS) + 1


def test_the_models_are_sharded(golden: Callable[[str], Golden]) -> None:
    folder: Path = golden("llama").folder
    assert len(list(folder.glob("model-*.safetensors"))) > 1
