"""Bodies: types, ranges, defaults, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polygraft.errors import ApiError
from polygraft.openai.body import parse
from polygraft.openai.schemas import ChatBody, CompletionBody

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatBody:
    return parse(json.dumps({"model": "m", "messages": HI} | fields).encode(), ChatBody)


def completion(**fields: Any) -> CompletionBody:
    return parse(json.dumps({"model": "m", "prompt": "x"} | fields).encode(), CompletionBody)


def refusal(**fields: Any) -> ApiError:
    """The 400 that a chat with these fields gets; a prompt makes it a completion."""
    with pytest.raises(ApiError) as refused:
        completion(**fields) if "prompt" in fields else chat(**fields)
    assert refused.value.status == 400
    assert refused.value.type == "invalid_request_error"
    return refused.value


@pytest.mark.parametrize(
    ("field", "legal"),
    [
        ("temperature", [0, -0.0, 5e-324, 1e-30, 1e-6, 1, 2, 2.0]),
        ("top_p", [0, 0.5, 1]),
        ("top_k", [-1, 0, 1, 10**30]),
        ("min_p", [0, 1]),
        ("presence_penalty", [-2, 2]),
        ("frequency_penalty", [-2, 2]),
        ("repetition_penalty", [0.01, 1, 2]),
        ("n", [1, 128]),
        ("seed", [0, -(2**63), 2**63 - 1]),
        ("max_tokens", [1, 2**31, 10**30]),
        ("max_completion_tokens", [1]),
        ("stop", ["x", ["a", "b"], [], ["s"] * 16, "é" * 512]),
        ("stop_token_ids", [[], [1, 2]]),
        ("logit_bias", [{}, {"5": -100, "6": 100.0}]),
    ],
)
def test_legal_values(field: str, legal: list[Any]) -> None:
    for value in legal:
        assert getattr(chat(**{field: value}), field) is not None


@pytest.mark.parametrize(
    ("field", "illegal"),
    [
        ("temperature", [-1, 2.1, "hot", "1", True, [1]]),
        ("top_p", [1.0001, -0.1, "0.5"]),
        ("top_k", [-2, 1.5, "3"]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [2.1, -2.1]),
        ("frequency_penalty", [2.1, "x"]),
        ("repetition_penalty", [0, -1, 2.5]),
        ("n", [0, -1, 129, 10**9, "2", 1.5, True]),
        ("seed", [2**63, -(2**63) - 1, "7", 1.5]),
        ("max_tokens", [0, -1, "5", 1.5]),
        ("max_completion_tokens", [0, -1]),
        ("min_tokens", [-1]),
        ("stop", ["", [""], ["s"] * 17, "s" * 10**6, ["é" * 513], 5, [5], {}]),
        ("stop_token_ids", [5, ["1"], [1.5], [True], [1] * 129]),
        ("logit_bias", [{"abc": 1}, {"5": 1e9}, {"5": "1"}, {"5": True}, {"1.5": 1}, {"²": 1}, [], {"9" * 5000: 1}]),
        ("stream", ["yes", 1]),
        ("stream_options", [5, []]),
        ("top_logprobs", [21, -1, 2 * 10**9]),
        ("logprobs", [1, "yes"]),
        ("messages", ["hi", [], {}, [5], ["hi"], [{}]]),
        ("model", [5, ["m"], "m" * 513]),
        ("chat_template_kwargs", [5, []]),
    ],
)
def test_illegal_values_are_400_and_named(field: str, illegal: list[Any]) -> None:
    for value in illegal:
        error = refusal(**{"logprobs": True, "stream": True} | {field: value})
        assert error.param is not None
        assert error.param.startswith(field)
        assert f"`{error.param}`" in error.message


def test_a_number_beyond_all_floats_is_400() -> None:
    with pytest.raises(ApiError, match="`temperature`"):
        parse(b'{"model":"m","prompt":"x","temperature":1e999}', CompletionBody)


def test_null_is_the_default_for_every_field() -> None:
    names = set(ChatBody.model_fields) - {"model", "messages"}
    assert chat(**dict.fromkeys(names)) == chat()
    names = set(CompletionBody.model_fields) - {"model", "prompt"}
    assert completion(**dict.fromkeys(names)) == completion()


@pytest.mark.parametrize("field", ["model", "messages"])
def test_required_fields(field: str) -> None:
    for body in ({"model": "m", "messages": HI} | {field: None}, {"model": "m", "messages": HI}):
        body.pop(field) if body[field] is not None else None
        with pytest.raises(ApiError, match=f"`{field}` is required") as refused:
            parse(json.dumps(body).encode(), ChatBody)
        assert refused.value.param == field


def test_fields_that_change_nothing_are_not_read() -> None:
    assert chat(metadata={"a": "b"}, store=True, service_tier="auto", cache_salt="x", nonsense=[1]) == chat()


@pytest.mark.parametrize(
    ("field", "harmless", "refused"),
    [
        ("tools", [None, []], [[{"type": "function", "function": {"name": "f"}}], {}, ""]),
        ("tool_choice", [None, "none"], ["auto", "required", {}, ""]),
        ("functions", [None, []], [[{}]]),
        ("function_call", [None, "none"], ["auto"]),
        (
            "response_format",
            [None, {"type": "text"}],
            [{}, "", [], {"type": "nope"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": None}],
        ),
        ("structured_outputs", [None], [{}, {"choice": []}, {"regex": ""}]),
        ("guided_json", [None], ["", {}, False]),
        ("guided_regex", [None], ["", "a**"]),
        ("logits_processors", [None, []], [["x"]]),
        ("modalities", [None, ["text"]], [["text", "audio"], []]),
        ("audio", [None], [{}]),
        ("prediction", [None], [{"type": "content"}]),
        ("web_search_options", [None], [{}]),
        ("suffix", [None, ""], ["end"]),
        ("use_beam_search", [None, False], [True]),
        ("continue_final_message", [None, False], [True]),
        ("chat_template", [None], ["{{ x }}", ""]),
        ("prompt_logprobs", [None], [0, 1, -1]),
        ("best_of", [None, 1], [2, 0, -1]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(field: str, harmless: list[Any], refused: list[Any]) -> None:
    for value in harmless:
        chat(**{field: value})
    for value in refused:
        error = refusal(**{field: value})
        assert error.param == field
        assert f"`{field}`" in error.message


def test_best_of_may_equal_n() -> None:
    assert completion(n=3, best_of=3).n == 3
    assert refusal(n=3, best_of=2).param == "best_of"


def test_stream_options_need_a_stream() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={}).include_usage
    assert not chat(stream=True, stream_options={"include_usage": False}).include_usage
    assert refusal(stream_options={}).param == "stream_options"
    assert refusal(stream=False, stream_options={"include_usage": True}).param == "stream_options"


def test_top_logprobs_need_logprobs() -> None:
    assert refusal(top_logprobs=2).param == "top_logprobs"
    assert chat(logprobs=True, top_logprobs=20).top_logprobs == 20


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("x", ("x",)),
        (["x", "y"], ("x", "y")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts(prompt: Any, parsed: Any) -> None:
    assert completion(prompt=prompt).prompt == parsed


@pytest.mark.parametrize("prompt", [[], 5, {}, [1, "x"], [[1], "x"], [1.5], [True], [[1], [True]], [None], None])
def test_prompts_of_other_forms_are_400(prompt: Any) -> None:
    assert refusal(prompt=prompt).param == "prompt"


def test_one_call_has_a_bounded_number_of_choices() -> None:
    completion(prompt=["x"] * 8, n=128)
    assert "1152 choices" in refusal(prompt=["x"] * 9, n=128).message


def test_completions_have_their_own_bounds() -> None:
    assert completion(max_tokens=0, logprobs=5).max_tokens == 0
    for fields in ({"max_tokens": -1}, {"logprobs": 6}, {"logprobs": -1}, {"logprobs": True}):
        assert refusal(prompt="x", **fields).param in fields


@pytest.mark.parametrize(
    "content",
    [None, [], 5, {}, [{"type": "text"}], [{"type": "text", "text": 5}], ["x"], [{}], [{"type": "image_url"}]],
)
def test_contents_that_are_no_text_are_400(content: Any) -> None:
    error = refusal(messages=[*HI, {"role": "user", "content": content}])
    assert error.param == "messages[1].content"


def test_a_missing_content_is_400() -> None:
    assert refusal(messages=[{"role": "user"}]).param == "messages[0].content"
    assert refusal(messages=[{"role": "assistant", "content": None}]).param == "messages[0].content"


def test_an_assistant_may_say_nothing_when_it_calls_tools() -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert chat(messages=[turn]).messages[0].content == ""


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"5",
        b'"x"',
        b"null",
        b"{",
        b"",
        b"\xff\xfe{}",
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b"[" * 100_000,
        b'{"metadata":' * 100_000,
    ],
    ids=["list", "number", "string", "null", "open", "empty", "utf16", "surrogate", "nan", "deep", "deep-objects"],
)
def test_bodies_that_are_no_json_objects_are_400(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse(body, ChatBody)
    assert refused.value.status == 400
    assert len(refused.value.message) < 200


def test_bodies_that_would_keep_everybody_waiting_are_refused_early() -> None:
    assert refusal(messages=HI * 4097).param == "messages"
    assert refusal(prompt=[1] * (2**18 + 1)).param == "prompt"
