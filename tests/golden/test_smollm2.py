"""The demo model and its adapters, mixed in one batch, say what transformers + PEFT say alone."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from polygraft_engine import LLM, SamplingParams

QUESTIONS = (
    "What is the capital of France?",
    "Which planet is the largest?",
    "How many legs does a spider have, and how many does an ant have? Answer in one sentence.",
)
NEW_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, seed=0, temperature=0.0, ignore_eos=True, skip_special_tokens=False)


@pytest.mark.slow
def test_the_demo_model_mixed_with_its_adapters(demo_model: Path, demo_adapters: dict[str, Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
        for question in QUESTIONS
    ]
    names = [None, *demo_adapters]
    jobs = [(name, prompt) for prompt in prompts for name in names]

    llm = LLM(demo_model, dtype="float32", max_num_batched_tokens=64, kv_cache_memory=2**28)
    folders = [None if name is None else demo_adapters[name] for name, _ in jobs]
    asked = [prompt for _, prompt in jobs]
    cold = llm.generate(asked, GREEDY, folders)
    hot = llm.generate(asked, GREEDY, folders)
    assert sum(map(len, asked)) > 64, "nothing was chunked"
    assert all(output.cached_tokens > 0 for output in hot)

    expected = reference(demo_model, demo_adapters, jobs)
    assert [list(output.token_ids) for output in cold] == expected
    assert [list(output.token_ids) for output in hot] == expected


@torch.inference_mode()
def reference(folder: Path, adapters: dict[str, Path], jobs: list[tuple[str | None, list[int]]]) -> list[list[int]]:
    """Greedy tokens of each job, alone, by transformers and PEFT."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with warnings.catch_warnings():
        # PEFT reads an attribute that transformers renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        for index, (name, path) in enumerate(adapters.items()):
            if index == 0:
                model = PeftModel.from_pretrained(model, path, adapter_name=name)
            else:
                model.load_adapter(path, adapter_name=name)
    model.eval()
    answers = []
    for name, prompt in jobs:
        if name is None:
            with model.disable_adapter():
                answers.append(greedy(model, prompt))
        else:
            model.set_adapter(name)
            answers.append(greedy(model, prompt))
    return answers


def greedy(model: PeftModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    tokens = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tokens[0, len(prompt) :].tolist()
