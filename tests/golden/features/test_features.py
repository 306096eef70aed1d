"""Everything PEFT's LoRA can write, all in one batch with the base, computes what PEFT computes alone, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from tests.engine.bench import Result, generation, run
from tests.golden.features.conftest import FEATURES, MODELS, VOCABULARY, Golden

from polygraft_adapters.inspection import inspect_adapter
from polygraft_adapters.weights import load_adapter
from polygraft_engine.adapter_source import DictSource
from polygraft_engine.build import build_engine
from polygraft_engine.engine import Engine
from polygraft_engine.models.architecture import read_spec
from polygraft_engine.options import EngineOptions

NEW_TOKENS = 4
CASES = [None, *FEATURES]


def prompts(features: Iterable[str | None]) -> dict[str | None, tuple[int, ...]]:
    """All begin alike, as tenants' prompts do, and hold tokens that some adapters retrained."""
    generator = torch.Generator().manual_seed(3)
    shared = (5, 17, *torch.randint(3, VOCABULARY, (30,), generator=generator).tolist())
    return {feature: shared[: 6 + index] for index, feature in enumerate(features)}


def build(
    golden: Golden,
    kernels: str,
    features: Iterable[str | None] = CASES,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> tuple[Engine, dict[str | None, str | None]]:
    """An engine with all adapters in its slots and the digest of each; they were prepared as a worker does it."""
    modules = read_spec(golden.folder).module_shapes("tiny")
    names = [feature for feature in features if feature is not None]
    source = DictSource()
    engine = build_engine(
        EngineOptions(
            model=str(golden.folder),
            kernels=kernels,
            dtype=str(dtype).removeprefix("torch."),
            max_loras=len(names),
            block_size=8,
            max_lora_rank=16,
            kv_cache_memory=2**24,
            **{"max_num_batched_tokens": 2048, **options},  # type: ignore[arg-type]
        ),
        source,
    )
    digests: dict[str | None, str | None] = {None: None}
    for name in names:
        weights = load_adapter(golden.adapters[name], modules, 16, dtype)
        weights.check()
        assert weights.info == inspect_adapter(golden.adapters[name], modules, 16)
        digests[name] = source.put(engine.prepare(weights))
    return engine, digests


def largest_difference(result: Result, expected: torch.Tensor) -> float:
    """Of the distributions over the whole vocabulary of all rows, the prompt's and the output's, by the row's largest
    logit.
    """
    assert result.prompt_logprobs is not None
    entries = [*result.prompt_logprobs, *result.logprobs]
    assert len(entries) == len(expected)
    differences = []
    for entry, row in zip(entries, expected, strict=True):
        ids, logprobs = zip(*sorted(entry.top), strict=True)
        assert ids == tuple(range(VOCABULARY))
        differences.append((torch.tensor(logprobs) - row.log_softmax(-1)).abs().max() / row.abs().max())
    return float(max(differences))


def ask(engine: Engine, digests: dict[str | None, str | None], **params: object) -> dict[str, Result]:
    return run(
        engine,
        [
            generation(
                str(feature),
                prompt,
                digests[feature],
                max_tokens=NEW_TOKENS,
                logprobs=VOCABULARY,
                prompt_logprobs=VOCABULARY,
                **params,
            )
            for feature, prompt in prompts(digests).items()
        ],
    )


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("name", MODELS)
def test_one_batch_of_everything_equals_peft_alone(golden: Callable[[str], Golden], name: str, kernels: str) -> None:
    reference = golden(name)
    engine, digests = build(reference, kernels)
    results = ask(engine, digests)
    assert engine.stats().forward_passes == NEW_TOKENS, "the batch was not mixed"
    for feature, prompt in prompts(digests).items():
        result = results[str(feature)]
        expected = reference.logits(feature, [*prompt, *result.tokens])[:-1]
        difference = largest_difference(result, expected)
        assert difference <= 1e-4, f"{feature} is off by {difference}"
        assert result.tokens == expected[len(prompt) - 1 :].argmax(-1).tolist(), feature
