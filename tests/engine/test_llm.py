"""The offline interface."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engine.bench import Bench, generation, run, write_adapter
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

import polygraft_engine
from polygraft_adapters.types import AdapterError
from polygraft_engine import LLM, SamplingParams
from polygraft_engine.types import EngineError, InvalidRequest

VOCABULARY = 260
GREEDY = SamplingParams(max_tokens=8, seed=0, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(make_model: Callable[..., Path]) -> Path:
    """A tiny model with a tokenizer of single bytes."""
    folder = make_model(vocab_size=VOCABULARY)
    letters = {letter: index + 3 for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE({"<a>": 0, "<b>": 1, "<c>": 2, **letters}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, kernels="reference", kv_cache_memory=2**22, max_loras=2)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / f"a{seed}", Bench(folder).spec, seed) for seed in range(3)]


def test_importing_the_package_costs_no_torch() -> None:
    code = "import sys, polygraft_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="LLN"):
        _ = polygraft_engine.LLN


def test_a_text_is_completed_like_its_tokens(llm: LLM, folder: Path) -> None:
    (output,) = llm.generate("hello", GREEDY)
    assert output.prompt_token_ids == tuple(llm.tokenizer.encode("hello").ids)
    assert list(output.token_ids) == run(Bench(folder).engine(), [generation("x", output.prompt_token_ids)])["x"].tokens
    assert output.choices[0].finish_reason == "length"
    assert output.choices[0].completion_tokens == 8
    assert llm.generate([list(output.prompt_token_ids)], GREEDY)[0].text == output.text
    assert llm.generate(output.prompt_token_ids, GREEDY)[0].text == output.text


def test_each_prompt_has_its_own_adapter_and_params(llm: LLM, adapters: list[Path]) -> None:
    params = [SamplingParams(max_tokens=3 + index, seed=0, temperature=0.0, ignore_eos=True) for index in range(4)]
    together = llm.generate(["hello"] * 4, params, [None, *adapters])
    assert [len(output.token_ids) for output in together] == [3, 4, 5, 6]
    assert len({output.token_ids[:3] for output in together}) == 4
    for one_params, adapter, output in zip(params, [None, *adapters], together, strict=True):
        (alone,) = llm.generate("hello", one_params, adapter)
        assert alone.token_ids == output.token_ids


def test_choices_and_logprobs_are_carried_through(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, seed=3, n=3, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate("hello", params)
    assert len({choice.token_ids for choice in output.choices}) == 3
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) - 1
    assert [len(choice.logprobs) for choice in output.choices] == [len(choice.token_ids) for choice in output.choices]


def test_a_stop_string_ends_the_output_and_the_engine(llm: LLM) -> None:
    ascii_only = tuple((token, -100.0) for token in range(VOCABULARY) if not 36 <= token <= 96)
    params = {"max_tokens": 12, "seed": 0, "temperature": 0.0, "logit_bias": ascii_only}
    (whole,) = llm.generate("hello", SamplingParams(**params))
    stop = whole.text[3:5]
    (cut,) = llm.generate("hello", SamplingParams(**params, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", stop)
    assert not llm.engine.has_work
    llm.engine.check()


def test_no_prompts_are_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_lists_of_different_lengths_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="2 params were given for 1 prompts"):
        llm.generate("hello", [GREEDY, GREEDY])


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([[5, 6], [VOCABULARY]], GREEDY)
    assert not llm.engine.has_work
    with pytest.raises(AdapterError):
        llm.generate("hello", GREEDY, "no/such/adapter")


def test_an_engine_that_fails_raises(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no more memory")

    monkeypatch.setattr(llm.engine._runner, "forward", broken)
    with pytest.raises(EngineError, match="no more memory"):
        llm.generate("hello", GREEDY)
    assert not llm.engine.has_work
