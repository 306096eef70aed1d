"""Rows of logits to tokens."""

from __future__ import annotations

import pytest
import torch
from tests.engine.bench import generation

from polygraft_engine.kv.pool import BlockPool
from polygraft_engine.kv.table import BlockTable
from polygraft_engine.request import Sequence
from polygraft_engine.sampler import Sampler, score
from polygraft_engine.types import LOGPROB_FLOOR
from polygraft_kernels.reference import ReferenceBackend

VOCABULARY = 200
EOS = 2


def request(
    prompt: tuple[int, ...] = (5,), output: tuple[int, ...] = (), choice: int = 0, **params: object
) -> Sequence:
    tokens = list(prompt)
    sequence = Sequence(
        generation("x", prompt, choice=choice, **params), tokens, BlockTable(BlockPool(1, 16), tokens, None), 0, 0.0
    )
    tokens.extend(output)
    return sequence


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(ReferenceBackend(torch.device("cpu")), [EOS])


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3


def tokens(sampler: Sampler, logits: torch.Tensor, requests: list[Sequence]) -> list[int | None]:
    return [None if each is None else each.token_id for each in sampler.sample(logits, requests)]


KINDS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.3, "min_p": 0.2, "logprobs": 3},
    {"repetition_penalty": 1.5, "logprobs": 0},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.9},
    {"logit_bias": ((3, 4.0), (9, -100.0))},
    {"min_tokens": 9, "ignore_eos": False},
]


def test_a_rows_token_is_the_same_alone_and_among_thirty_others(sampler: Sampler) -> None:
    requests = [
        request((5, 6, 7), (8, 9, 8)[: index % 4], seed=index, choice=index % 3, **KINDS[index % len(KINDS)])
        for index in range(31)
    ]
    logits = rows(31)
    together = sampler.sample(logits, requests)
    for index, each in enumerate(requests):
        assert sampler.sample(logits[index : index + 1], [each])[0] == together[index]


def test_logits_are_left_as_they_are(sampler: Sampler) -> None:
    logits = rows(len(KINDS))
    before = logits.clone()
    sampler.sample(logits, [request(output=(1,), **kind) for kind in KINDS])
    assert torch.equal(logits, before)


def test_of_equal_logits_the_lowest_token_wins(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [150, 40, 90]] = 1.0
    assert tokens(sampler, logits, [request()]) == [40]


def test_penalties_are_the_published_formulas(sampler: Sampler) -> None:
    logits = torch.zeros(1, 8)
    logits[0] = torch.tensor([4.0, -1.0, 3.9, 0.0, 3.0, 3.5, 0.0, 0.0])
    # divides 4 by 2, so that 3.9 is the largest; multiplies -1
    assert tokens(sampler, logits, [request((0, 1), repetition_penalty=2.0)]) == [2]
    # token 0 was generated once, token 2 twice: 4 - (0.2 + 0.2) against 3.9 - (0.2 + 0.4) against 3.5
    counted = {"presence_penalty": 0.2, "frequency_penalty": 0.2}
    assert tokens(sampler, logits, [request((1,), (2, 0, 2), **counted)]) == [0]
    assert tokens(sampler, logits, [request((1,), (0, 0, 0, 2, 2), **counted)]) == [5]
    # bias comes on top of a penalised logit: 4 / 2 + 2 = 4
    assert tokens(sampler, logits, [request((0,), repetition_penalty=2.0, logit_bias=((0, 2.0),))]) == [0]


def test_min_tokens_bans_until_it_is_reached(sampler: Sampler) -> None:
    logits = torch.zeros(1, 8)
    logits[0, EOS], logits[0, 5], logits[0, 6] = 9.0, 8.0, 7.0
    ends = {"min_tokens": 2, "ignore_eos": False, "stop_token_ids": (5,)}
    assert tokens(sampler, logits, [request(output=(1,), **ends)]) == [6]
    assert tokens(sampler, logits, [request(output=(1, 1), **ends)]) == [EOS]
    assert tokens(sampler, logits, [request(output=(1,), min_tokens=2, ignore_eos=True)]) == [EOS]


def test_nothing_left_to_draw_is_no_token(sampler: Sampler) -> None:
    everything = {"min_tokens": 1, "stop_token_ids": tuple(range(8)), "ignore_eos": True}
    for temperature in (0.0, 1.0):
        assert tokens(sampler, torch.zeros(1, 8), [request(temperature=temperature, **everything)]) == [None]


def test_sampling_follows_the_distribution(sampler: Sampler) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    logits = probabilities.log().expand(4000, 4).contiguous()
    drawn = tokens(sampler, logits, [request(seed=seed, temperature=1.0) for seed in range(4000)])
    counts = torch.bincount(torch.tensor(drawn), minlength=4) / 4000
    torch.testing.assert_close(counts, probabilities, atol=0.03, rtol=0)


def test_scores_are_log_softmax_with_the_likeliest_first() -> None:
    logits = rows(3)
    expected = logits.log_softmax(-1)
    entries = score(logits, [4, 5, 6], [0, 2, VOCABULARY + 5])
    for row, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[row, 4 + row]))
    assert [len(entry.top) for entry in entries] == [0, 2, VOCABULARY]
    assert [token for token, _ in entries[1].top] == expected[1].argsort(descending=True)[:2].tolist()


def test_minus_infinity_never_leaves() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 1] = float("-inf")
    (entry,) = score(logits, [1], [4])
    assert entry.logprob == LOGPROB_FLOOR
    assert min(logprob for _, logprob in entry.top) == LOGPROB_FLOOR
