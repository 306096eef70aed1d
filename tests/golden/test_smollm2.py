"""SmolLM2 and the example adapters in one mixed, chunked, cached batch equal transformers + PEFT alone, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tests.engine.bench import Result, generation, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from polygraft_adapters.weights import load_adapter
from polygraft_engine.adapter_source import DictSource
from polygraft_engine.build import build_engine
from polygraft_engine.engine import Engine
from polygraft_engine.models.architecture import read_spec
from polygraft_engine.options import EngineOptions

pytestmark = pytest.mark.slow

NEW_TOKENS = 12
BUDGET = 32
TOLERANCE = 1e-4
"""Of the row's largest logit."""
PROMPTS = {
    None: "Name three rivers of Europe and the seas they run into, one after the other.",
    "json": "What is the largest planet?",
    "pirate": "Which metal is liquid at room temperature, and what was it used for in former times?",
    "french": "Who painted the Mona Lisa?",
    "random": "Explain in two sentences why the sky is blue and the sunset is red.",
}


@pytest.fixture(scope="module")
def adapters(
    demo_adapters: dict[str, Path], demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """The three examples and a random one, so that ranks, modules, layers and scales all differ."""
    torch.manual_seed(5)
    base = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    config = LoraConfig(
        r=5,
        lora_alpha=3.5,
        target_modules=["k_proj", "down_proj"],
        layers_to_transform=[0, 7, 29],
        alpha_pattern={"k_proj": 9},
    )
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    folder = tmp_path_factory.mktemp("random")
    model.save_pretrained(str(folder))
    return {**demo_adapters, "random": folder}


@pytest.fixture(scope="module")
def reference(demo_model: Path, adapters: dict[str, Path]) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32, attn_implementation="eager")
    first, *others = adapters
    model = PeftModel.from_pretrained(base, adapters[first], adapter_name=first)
    for name in others:
        model.load_adapter(adapters[name], adapter_name=name)
    return model.eval()


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> dict[str | None, tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)

    def encode(text: str) -> tuple[int, ...]:
        chat = [{"role": "user", "content": text}]
        return tuple(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])

    return {name: encode(text) for name, text in PROMPTS.items()}


@torch.inference_mode()
def alone(model: PeftModel, adapter: str | None, prompt: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of one adapter by itself, and the logits [NEW_TOKENS, V] that they were taken from."""

    def generate() -> tuple[list[int], torch.Tensor]:
        answer = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return answer.sequences[0, len(prompt) :].tolist(), torch.cat(answer.logits)

    if adapter is None:
        with model.disable_adapter():
            return generate()
    model.set_adapter(adapter)
    return generate()


def build(demo_model: Path, adapters: dict[str, Path], kernels: str) -> tuple[Engine, dict[str | None, str | None]]:
    modules = read_spec(demo_model).module_shapes("SmolLM2-135M-Instruct")
    weights = {name: load_adapter(path, modules, 64, torch.float32) for name, path in adapters.items()}
    options = EngineOptions(
        model=str(demo_model),
        dtype="float32",
        kernels=kernels,
        max_model_len=512,
        max_num_batched_tokens=BUDGET,
        kv_cache_memory=2**27,
    )
    digests = {None: None, **{name: each.info.digest for name, each in weights.items()}}
    return build_engine(options, DictSource(weights.values())), digests


def assert_agree(result: Result, tokens: list[int], logits: torch.Tensor) -> None:
    """The same tokens; and the likeliest tokens' log probabilities within the tolerance."""
    assert result.tokens == tokens
    for entry, row in zip(result.logprobs, logits, strict=True):
        ids, logprobs = zip(*entry.top, strict=True)
        difference = (torch.tensor(logprobs) - row.log_softmax(-1)[list(ids)]).abs().max()
        assert difference <= TOLERANCE * row.abs().max()


@pytest.mark.parametrize("kernels", ["reference", "native"])
def test_a_mixed_batch_equals_each_adapter_alone(
    demo_model: Path,
    adapters: dict[str, Path],
    reference: PeftModel,
    prompts: dict[str | None, tuple[int, ...]],
    kernels: str,
) -> None:
    engine, digests = build(demo_model, adapters, kernels)
    assert max(map(len, prompts.values())) > BUDGET

    def ask() -> dict[str, Result]:
        return run(
            engine,
            [
                generation(str(name), prompt, digests[name], max_tokens=NEW_TOKENS, logprobs=100)
                for name, prompt in prompts.items()
            ],
        )

    cold, hot = ask(), ask()
    for name, prompt in prompts.items():
        tokens, logits = alone(reference, name, prompt)
        assert_agree(cold[str(name)], tokens, logits)
        assert_agree(hot[str(name)], tokens, logits)
        assert cold[str(name)].cached_tokens == 0
        assert hot[str(name)].cached_tokens == (len(prompt) - 1) // 16 * 16
    assert engine.stats().forward_passes < 2 * len(prompts) * NEW_TOKENS
