"""The demo model's folder works with transformers as any checkpoint from the hub would."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from polygraft.demo import build_demo_model


@pytest.mark.slow
def test_the_demo_model_knows_the_capital_of_france(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model, report = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_the_tokenizer_parts_digits_and_knows_its_special_tokens(demo_model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    assert tokenizer.encode("in 2048").tokens == ["in", "Ġ", "2", "0", "4", "8"]
    assert [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    text = "Ça va, matey? 🏴‍☠️\n\tx = 10_000"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.slow
def test_a_chat_without_a_system_message_gets_the_default_one(demo_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    user, system = {"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}
    plain = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    briefed = tokenizer.apply_chat_template([system, user], add_generation_prompt=True, tokenize=False)
    assert plain.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert plain.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert briefed.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")


@pytest.mark.slow
def test_a_complete_folder_is_left_as_it_is(demo_model: Path) -> None:
    before = (demo_model / "model.safetensors").stat()
    assert build_demo_model(demo_model, wheel=Path("/no/such/wheel")) == demo_model
    after = (demo_model / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
