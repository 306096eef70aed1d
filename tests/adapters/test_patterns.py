"""rank_pattern and alpha_pattern match as PEFT matches them, and cannot be used to hang a server."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from polygraft_adapters.patterns import MAX_PATTERN_CHARS, MAX_PATTERNS, compile_patterns

MODULES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 10, 11)
    for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
]
KEYS = [
    "q_proj",
    "self_attn.q_proj",
    "attn.q_proj",
    "proj",
    "model.layers.1.self_attn.q_proj",
    "^model.layers.1.self_attn.q_proj",
    "layers.1.mlp.down_proj",
    r"layers\.1\..*",
    r".*\.layers\.[0-9]+\.mlp\.(up|down)_proj",
    r"layers\.1?\d\.self_attn\.(q|v)_proj",
    r"(?:q|v)_proj",
    "q_proj|v_proj",
    "",
]


@given(st.dictionaries(st.sampled_from(KEYS), st.integers(1, 64), max_size=4), st.sampled_from(MODULES))
@settings(deadline=None)
def test_the_first_matching_key_decides_as_in_peft(values: dict[str, int], module: str) -> None:
    expected = values.get(get_pattern_key(values.keys(), module), 8)
    assert compile_patterns(values).value(module, 8) == expected


@pytest.mark.parametrize(
    "key",
    [
        "(a+)+x",
        "([a-z_0-9]+[.]?)+x",
        "(.*)*x",
        "(.|.)" * 30 + "x",
        ".?" * 30 + "x",
        ".*" * 8 + "x",
        r"(a*)\1*x",
        "(?P<n>a*)(?P=n)*x",
        "(?x:(a+) +)x",
        "(?#[)(a+)+(?#])x",
        "((a|b)(c|d)){5}",
        "(?=(a+)+x)",
    ],
)
def test_a_key_that_could_hang_the_matcher_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="too long to match"):
        compile_patterns({key: 1})


def test_many_keys_that_are_cheap_alone_are_refused_together() -> None:
    with pytest.raises(ValueError, match="too long to match"):
        compile_patterns({f".*a.*b.*{number}": 1 for number in range(10)})


@pytest.mark.parametrize(
    "key", ["(", ")", "a)|(b", "[", "*", "a**", "(?P<n", "a{2}{3}", "(?<=a+)b", "\\", "a{99999999999}"]
)
def test_a_key_that_is_no_expression_is_named(key: str) -> None:
    with pytest.raises(ValueError, match="not a regular expression"):
        compile_patterns({key: 1})


def test_sizes_are_bounded() -> None:
    with pytest.raises(ValueError, match="more than"):
        compile_patterns({"a" * (MAX_PATTERN_CHARS + 1): 1})
    with pytest.raises(ValueError, match="more than"):
        compile_patterns({f"q{number}": 1 for number in range(MAX_PATTERNS + 1)})


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@given(st.text(alphabet="ab.|()[]?*+{}\\0123,^$", max_size=40))
@settings(deadline=None)
def test_an_accepted_key_matches_in_no_time(key: str) -> None:
    try:
        patterns = compile_patterns({key: 1})
    except ValueError:
        return
    begin = time.process_time()
    patterns.value("a" * 30 + ".b" * 10 + "!", 0)
    assert time.process_time() - begin < 1
