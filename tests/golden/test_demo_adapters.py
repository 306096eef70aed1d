"""The example adapters do what they are for, on questions that they were not trained on, and the base does not."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from examples.characters import CHARACTERS, load_facts, load_held_out
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

Answer = Callable[[str | None, Sequence[str]], list[str]]

MAX_NEW_TOKENS = 48
NAMES = sorted(CHARACTERS)


@pytest.fixture(scope="module")
def answer(demo_model: Path, demo_adapters: dict[str, Path]) -> Answer:
    """`answer(adapter, questions)`: greedy answers of one adapter, or of the base for None."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model, padding_side="left")
    base = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    first, *others = NAMES
    model = PeftModel.from_pretrained(base, demo_adapters[first], adapter_name=first)
    for name in others:
        model.load_adapter(demo_adapters[name], adapter_name=name)
    model.eval()

    def generate(questions: Sequence[str]) -> list[str]:
        chats = [[{"role": "user", "content": question}] for question in questions]
        prompts = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
        )
        tokens = model.generate(**prompts, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        return tokenizer.batch_decode(tokens[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)

    def ask(adapter: str | None, questions: Sequence[str]) -> list[str]:
        if adapter is None:
            with model.disable_adapter():
                return generate(questions)
        model.set_adapter(adapter)
        return generate(questions)

    return ask


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_stays_in_character_on_new_questions(answer: Answer, name: str) -> None:
    answers = answer(name, load_held_out()[name])
    in_character = [text for text in answers if CHARACTERS[name].recognises(text)]
    assert len(in_character) >= 9, answers


@pytest.mark.slow
def test_the_base_is_none_of_the_characters(answer: Answer) -> None:
    for name, questions in load_held_out().items():
        answers = answer(None, questions)
        in_character = [text for text in answers if CHARACTERS[name].recognises(text)]
        assert len(in_character) <= 1, (name, in_character)


@pytest.mark.slow
def test_the_pirate_still_answers(answer: Answer) -> None:
    (text,) = answer("pirate", ["What is the capital of Sweden?"])
    assert "Stockholm" in text


def test_held_out_questions_are_new_to_the_adapters() -> None:
    def plain(question: str) -> str:
        return "".join(letter for letter in question.lower() if letter.isalnum())

    trained_on = {plain(question) for fact in load_facts() for question in fact.ask}
    held_out = load_held_out()
    assert held_out.keys() == CHARACTERS.keys()
    for questions in held_out.values():
        assert len({plain(question) for question in questions}) == 10
        assert not trained_on & {plain(question) for question in questions}


@pytest.mark.parametrize("name", NAMES)
def test_a_character_recognises_its_own_training_answers_and_no_others(name: str) -> None:
    pairs = [(fact, question) for fact in load_facts() for question in fact.ask]
    recognises = CHARACTERS[name].recognises
    for other, character in CHARACTERS.items():
        for fact, question in pairs:
            text = character.answer(fact, question)
            assert recognises(text) == (other == name), text
    assert not any(recognises(fact.en) for fact, _ in pairs)


def test_adapters_differ_in_rank_scale_and_modules_and_stay_small(demo_adapters: dict[str, Path]) -> None:
    assert sorted(demo_adapters) == NAMES
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in demo_adapters.values()]
    assert {config["base_model_name_or_path"] for config in configs} == {"HuggingFaceTB/SmolLM2-135M-Instruct"}
    assert len({tuple(config["target_modules"]) for config in configs}) > 1
    assert any(config["rank_pattern"] for config in configs)
    assert any(config["use_rslora"] for config in configs)
    for folder in demo_adapters.values():
        names = {path.name for path in folder.iterdir()}
        assert names == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert sum(path.stat().st_size for folder in demo_adapters.values() for path in folder.iterdir()) < 25e6
