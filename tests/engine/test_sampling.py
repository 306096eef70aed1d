"""What sampling parameters do, seen from outside the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.engine.bench import Bench, Result, generation, run

from polygraft_engine.build import build_engine
from polygraft_engine.options import EngineOptions
from polygraft_engine.types import InvalidRequest

GREEDY = {"temperature": 0.0}


def one(bench: Bench, prompt: tuple[int, ...], **params: object) -> Result:
    return run(bench.engine(), [generation("x", prompt, **params)])["x"]


def choices(bench: Bench, n: int, neighbours: int = 0, **params: object) -> list[list[int]]:
    """The tokens of n choices of one request, among other sampled requests."""
    prompt = bench.prompt(10)
    asked = [generation(str(choice), prompt, n=n, choice=choice, max_tokens=20, **params) for choice in range(n)]
    others = [
        generation(f"other {index}", bench.prompt(12, seed=index + 1), temperature=1.0, seed=index)
        for index in range(neighbours)
    ]
    results = run(bench.engine(num_blocks=256), [*others, *asked])
    return [results[str(choice)].tokens for choice in range(n)]


def test_choices_differ_and_repeat(bench: Bench) -> None:
    drawn = choices(bench, 4, temperature=1.0, seed=7)
    assert len({tuple(tokens) for tokens in drawn}) == 4
    assert choices(bench, 4, temperature=1.0, seed=7) == drawn
    assert choices(bench, 4, neighbours=30, temperature=1.0, seed=7) == drawn
    assert choices(bench, 1, temperature=1.0, seed=7) == drawn[:1]
    assert choices(bench, 4, temperature=1.0, seed=8) != drawn


def test_greedy_choices_are_equal(bench: Bench) -> None:
    drawn = choices(bench, 4, temperature=0.0, seed=7)
    assert drawn == drawn[:1] * 4


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 5e-324, 0.0, -0.0])
def test_tiny_temperatures_are_greedy(bench: Bench, temperature: float) -> None:
    prompt = bench.prompt(10)
    bias = {"logit_bias": ((5, -100.0),)}
    assert one(bench, prompt, temperature=temperature).tokens == one(bench, prompt).tokens
    assert one(bench, prompt, temperature=temperature, **bias).tokens == one(bench, prompt, **bias).tokens


@pytest.mark.parametrize("narrow", [{"top_p": 0.0}, {"top_k": 1}, {"min_p": 1.0}])
def test_the_narrowest_choice_is_the_likeliest(bench: Bench, narrow: dict[str, float]) -> None:
    prompt = bench.prompt(10)
    assert one(bench, prompt, temperature=1.5, **narrow).tokens == one(bench, prompt).tokens


@pytest.mark.parametrize("off", [{"top_p": 1.0}, {"top_k": 0}, {"top_k": -1}, {"top_k": 129}, {"min_p": 0.0}])
def test_limits_that_are_off_change_nothing(bench: Bench, off: dict[str, float]) -> None:
    prompt = bench.prompt(10)
    assert one(bench, prompt, temperature=1.5, **off).tokens == one(bench, prompt, temperature=1.5).tokens


def test_top_k_draws_among_the_likeliest_only(bench: Bench) -> None:
    prompt = bench.prompt(10)
    for seed in range(8):
        result = one(bench, prompt, temperature=2.0, top_k=3, logprobs=3, seed=seed)
        for token, entry in zip(result.tokens, result.logprobs, strict=True):
            assert token in {id for id, _ in entry.top}


def test_frequency_and_presence_penalties_spare_the_prompt(bench: Bench) -> None:
    likeliest = one(bench, bench.prompt(10)).tokens[0]
    prompt = (*bench.prompt(10), likeliest, likeliest, likeliest)
    plain = one(bench, prompt)
    for penalty in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert one(bench, prompt, **penalty).tokens[0] == plain.tokens[0]


def test_frequency_grows_with_the_count_and_presence_does_not(bench: Bench) -> None:
    prompt = bench.prompt(10)
    # a favoured token comes again and again until its penalty outweighs the favour
    bias = ((9, 60.0),)
    repeated = one(bench, prompt, logit_bias=bias, max_tokens=12).tokens
    assert repeated == [9] * 12
    frequency = one(bench, prompt, logit_bias=bias, frequency_penalty=6.0, max_tokens=12).tokens
    presence = one(bench, prompt, logit_bias=bias, presence_penalty=6.0, max_tokens=12).tokens
    assert presence == repeated
    assert frequency[:2] == [9, 9]
    assert frequency != repeated


def test_the_repetition_penalty_reaches_the_prompt(bench: Bench) -> None:
    prompt = bench.prompt(10)
    plain = one(bench, prompt).tokens[0]
    prompt = (plain, *prompt)
    likeliest = one(bench, prompt).tokens[0]
    assert one(bench, (likeliest, *prompt), repetition_penalty=1e6).tokens[0] not in {likeliest, *prompt}


def test_logit_bias_bans_and_forces(bench: Bench) -> None:
    prompt = bench.prompt(10)
    first = one(bench, prompt).tokens[0]
    assert one(bench, prompt, logit_bias=((first, -100.0),)).tokens[0] != first
    assert one(bench, prompt, logit_bias=((77, 100.0),)).tokens == [77] * 8


def test_logprobs_are_of_the_raw_distribution(bench: Bench) -> None:
    prompt = bench.prompt(10)
    plain = one(bench, prompt, logprobs=4, max_tokens=1).logprobs[0]
    changed = one(
        bench, prompt, logprobs=4, max_tokens=1, logit_bias=((77, 100.0),), temperature=1.7, top_k=1, min_tokens=1
    ).logprobs[0]
    assert changed.token_id == 77
    assert changed.top == plain.top
    assert changed.logprob < plain.logprob
    assert [logprob for _, logprob in plain.top] == sorted((logprob for _, logprob in plain.top), reverse=True)
    assert plain.top[0] == (plain.token_id, plain.logprob)


def test_zero_alternatives_still_give_the_tokens_own_logprob(bench: Bench) -> None:
    result = one(bench, bench.prompt(10), logprobs=0)
    assert [entry.token_id for entry in result.logprobs] == result.tokens
    assert all(entry.top == () for entry in result.logprobs)
    assert one(bench, bench.prompt(10)).logprobs == []


def test_an_end_token_ends_the_output(bench: Bench) -> None:
    prompt = bench.prompt(10)
    third = one(bench, prompt).tokens[2]
    stopped = one(bench, prompt, stop_token_ids=(third,))
    assert stopped.tokens[-1] == third
    assert stopped.finish_reason == "stop"
    assert len(stopped.tokens) <= 3


def test_min_tokens_holds_every_end_back(bench: Bench) -> None:
    prompt = bench.prompt(10)
    eos = bench.spec.eos_token_ids[0]
    ends = {"ignore_eos": False, "logit_bias": ((eos, 100.0), (44, 90.0)), "stop_token_ids": (44,)}
    assert one(bench, prompt, **ends).tokens == [eos]
    held = one(bench, prompt, min_tokens=5, **ends).tokens
    assert held[-1] == eos
    assert len(held) == 6
    assert not {eos, 44} & set(held[:5])


def test_ignore_eos_goes_on(bench: Bench) -> None:
    eos = bench.spec.eos_token_ids[0]
    assert one(bench, bench.prompt(10), logit_bias=((eos, 100.0),)).tokens == [eos] * 8


def test_scoring_a_prompt_generates_nothing(bench: Bench) -> None:
    prompt = bench.prompt(70)
    engine = bench.engine(max_num_batched_tokens=32)
    for turn in range(2):
        result = run(engine, [generation(f"{turn}", prompt, max_tokens=0, prompt_logprobs=2)])[f"{turn}"]
        assert result.tokens == []
        assert result.finish_reason == "length"
        assert result.prompt_logprobs is not None
        assert [entry.token_id for entry in result.prompt_logprobs] == list(prompt[1:])
        assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in result.prompt_logprobs)
        assert result.cached_tokens == 0, "scores need every row"


def test_a_prompt_of_one_token_has_no_scores_and_says_so(bench: Bench) -> None:
    assert one(bench, (5,), max_tokens=0, prompt_logprobs=1).prompt_logprobs == ()


def test_max_tokens_zero_without_scores_ends_at_once(bench: Bench) -> None:
    result = one(bench, bench.prompt(10), max_tokens=0)
    assert (result.tokens, result.finish_reason, result.prompt_logprobs) == ([], "length", None)


@pytest.mark.parametrize(
    ("param", "changes"),
    [
        ("prompt", {"prompt": (0, 9999999)}),
        ("prompt", {"prompt": (-1,)}),
        ("prompt", {"prompt": (3, 5279552648203111001)}),
        ("prompt", {"prompt": (128,)}),
        ("logit_bias", {"logit_bias": ((9999999, 5.0),)}),
        ("logit_bias", {"logit_bias": ((-1, 5.0),)}),
        ("logit_bias", {"logit_bias": ((1, float("nan")),)}),
        ("stop_token_ids", {"stop_token_ids": (128,)}),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused_and_neighbours_unharmed(
    bench: Bench, param: str, changes: dict[str, object]
) -> None:
    engine = bench.engine()
    neighbour = generation("neighbour", bench.prompt(10))
    engine.add(neighbour)
    with pytest.raises(InvalidRequest) as refused:
        engine.add(generation("bad", **{"prompt": (1, 2), **changes}))  # type: ignore[arg-type]
    assert refused.value.param == param
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tokens == run(bench.engine(), [neighbour])["neighbour"].tokens


def test_the_last_token_of_the_vocabulary_is_valid(bench: Bench) -> None:
    assert one(bench, (127,), logit_bias=((127, 100.0),)).tokens == [127] * 8


def test_a_growing_sequence_ends_at_the_context(make_model: Callable[..., Path]) -> None:
    folder = make_model(max_position_embeddings=32)
    torch.manual_seed(0)
    options = EngineOptions(model=str(folder), kernels="reference", kv_cache_memory=2**20, max_loras=0)
    engine = build_engine(options, Bench(folder).source())
    result = run(engine, [generation("x", range(3, 23), max_tokens=100)])["x"]
    assert result.finish_reason == "length"
    assert len(result.tokens) == 12
    with pytest.raises(InvalidRequest, match="32") as refused:
        engine.add(generation("y", [5] * 32, max_tokens=1))
    assert refused.value.code == "context_length_exceeded"
