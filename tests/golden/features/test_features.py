"""Everything PEFT's LoRA can write, all in one batch with the base, computes what PEFT computes alone, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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
    sizes = {"max_loras": len(names), "max_num_batched_tokens": 2048, "max_lora_rank": 16, "kv_cache_memory": 2**24}
    settings: dict[str, Any] = {"block_size": 8, **sizes, **options}
    dtype_name = str(dtype).removeprefix("torch.")
    engine = build_engine(
        EngineOptions(model=str(golden.folder), kernels=kernels, dtype=dtype_name, **settings), source
    )
    digests: dict[str | None, str | None] = {None: None}
    for name in names:
        weights = load_adapter(golden.adapters[name], modules, 16, dtype)
        weights.check()
        assert weights.info == inspect_adapter(golden.adapters[name], modules, 16)
        digests[name] = source.put(engine.prepare(weights))
    return engine, digests


def differences(result: Result, expected: torch.Tensor) -> torch.Tensor:
    """Of the distributions over the whole vocabulary of all rows, the prompt's and the output's: the largest of each
    row, by the row's largest logit.
    """
    assert result.prompt_logprobs is not None
    entries = [*result.prompt_logprobs, *result.logprobs]
    assert len(entries) == len(expected)
    found = []
    for entry, row in zip(entries, expected, strict=True):
        ids, logprobs = zip(*sorted(entry.top), strict=True)
        assert ids == tuple(range(VOCABULARY))
        found.append((torch.tensor(logprobs) - row.log_softmax(-1)).abs().max() / row.abs().max())
    return torch.stack(found)


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


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param("biased", "reference", marks=pytest.mark.slow),
        pytest.param("biased", "native"),
        pytest.param("plain", "reference", marks=pytest.mark.slow),
        pytest.param("plain", "native", marks=pytest.mark.slow),
        pytest.param("tied", "reference"),
        pytest.param("tied", "native", marks=pytest.mark.slow),
    ],
)
def test_one_batch_of_everything_equals_peft_alone(golden: Callable[[str], Golden], name: str, kernels: str) -> None:
    reference = golden(name)
    engine, digests = build(reference, kernels)
    results = ask(engine, digests)
    assert engine.stats().forward_passes == NEW_TOKENS, "the batch was not mixed"
    for feature, prompt in prompts(digests).items():
        result = results[str(feature)]
        expected = reference.logits(feature, [*prompt, *result.tokens])[:-1]
        difference = float(differences(result, expected).max())
        assert difference <= 1e-4, f"{feature} is off by {difference}"
        assert result.tokens == expected[len(prompt) - 1 :].argmax(-1).tolist(), feature


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_as_near_to_the_truth_as_pefts(golden: Callable[[str], Golden], name: str) -> None:
    reference = golden(name)
    engine, digests = build(reference, "native", dtype=torch.bfloat16)
    results = ask(engine, digests)
    for feature, prompt in prompts(digests).items():
        result = results[str(feature)]
        tokens = [*prompt, *result.tokens]
        exact = reference.logits(feature, tokens)[:-1]
        rounded = reference.logits(feature, tokens, torch.bfloat16)[:-1]
        of_peft = (rounded.log_softmax(-1) - exact.log_softmax(-1)).abs().amax(-1) / exact.abs().amax(-1)
        ours = float(differences(result, exact).median())  # some rows are a matter of rounding with any program
        assert ours <= 2 * float(of_peft.median()), f"{feature} is off by {ours}, and PEFT by {of_peft.median()}"


@pytest.mark.parametrize("name", MODELS)
def test_rows_do_not_depend_on_their_neighbours(golden: Callable[[str], Golden], name: str) -> None:
    """Bit for bit, which the native kernels promise."""
    reference = golden(name)
    engine, digests = build(reference, "native", prefix_caching=False)
    together = ask(engine, digests)
    for feature, prompt in prompts(digests).items():
        sequence = generation(
            "alone", prompt, digests[feature], max_tokens=NEW_TOKENS, logprobs=VOCABULARY, prompt_logprobs=VOCABULARY
        )
        assert run(engine, [sequence])["alone"] == together[str(feature)], feature


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_chunks_cached_prefixes_and_preemption_change_nothing(golden: Callable[[str], Golden], kernels: str) -> None:
    reference = golden("tied")
    features = [None, "dora", "embedding-dora", "tokens", "saved-both", "head", "bias-all"]
    block = 2 * 2 * 8 * 2 * 16 * 4
    options = {"max_num_batched_tokens": 16, "kv_cache_memory": 12 * block, "max_model_len": 64}
    engine, digests = build(reference, kernels, features, **options)
    shared = prompts(range(27))[26]  # type: ignore[arg-type]
    sequences = [
        generation(f"{feature} {turn}", shared, digests[feature], max_tokens=12, logprobs=1)
        for turn in range(2)
        for feature in features
    ]
    results = run(engine, sequences)
    stats = engine.stats().scheduler
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    for feature in features:
        tokens = results[f"{feature} 0"].tokens
        assert tokens == results[f"{feature} 1"].tokens
        logits = reference.logits(feature, [*shared, *tokens])[len(shared) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist(), feature


def test_nothing_stays_in_a_slot_and_what_left_comes_back(golden: Callable[[str], Golden]) -> None:
    reference = golden("biased")
    engine, digests = build(reference, "native", prefix_caching=False, max_loras=1)
    prompt = prompts(range(12))[11]  # type: ignore[arg-type]

    def ask_one(feature: str) -> Result:
        return run(engine, [generation("x", prompt, digests[feature], logprobs=VOCABULARY)])["x"]

    first = ask_one("lora")
    for feature in FEATURES:
        ask_one(feature)
        assert ask_one("lora") == first, feature


def test_every_feature_changes_what_the_model_says(golden: Callable[[str], Golden]) -> None:
    reference = golden("biased")
    prompt = (5, 17, 90, 4, 60, 1)
    said = {name: reference.logits(name, prompt)[-1] for name in CASES}
    same = [name for name, logits in said.items() if name and torch.allclose(logits, said[None], atol=1e-2)]
    assert same == []
