"""Chat templates: as they are written for, with what they refuse in their own words, and never running wild."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from polygraft.card import ModelCard
from polygraft.errors import ApiError
from polygraft.openai.chat import ChatRenderer
from polygraft.openai.schemas import Message

from .conftest import CHAT, STRICT

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
PARTS = "{% for m in messages %}{% for part in m['content'] %}({{ part.text }}){% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.fixture
def rendered(renderer: ChatRenderer, cards: dict[str, ModelCard]) -> Any:
    async def rendered(
        template: str | None, *turns: dict[str, Any], prompt: bool = True, variables: dict[str, Any] | None = None
    ) -> str:
        card = msgspec.structs.replace(cards["bos"], chat_template=template)
        messages = [Message.model_validate(turn) for turn in turns]
        return await renderer.render(
            card, messages, add_generation_prompt=prompt, variables={} if variables is None else variables
        )

    return rendered


async def test_a_template_renders_the_conversation(rendered: Any) -> None:
    user = {"role": "user", "content": "hi"}
    assert await rendered(CHAT, user) == "<s><|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert await rendered(CHAT, user, prompt=False) == "<s><|start|>user\nhi<|end|>\n"


async def test_a_template_has_the_tools_that_it_is_written_for(rendered: Any) -> None:
    user = {"role": "user", "content": "<é>"}
    block = "{% if true %}\n    x\n    {% endif %}\ny"
    assert await rendered(block, user) == "    x\ny"
    assert (
        await rendered("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", user) == "01"
    )
    assert await rendered("{{ messages | tojson }}", user) == '[{"role": "user", "content": "<é>"}]'
    assert await rendered("{% generation %}x{% endgeneration %}", user) == "x"
    assert await rendered("{{ strftime_now('%Y') }}", user) == time.strftime("%Y")
    assert await rendered("{{ tools is none }}{{ pad_token }}", user) == "True"
    assert await rendered("{{ thinking }}", user, variables={"thinking": "on"}) == "on"


async def test_text_parts_are_joined_by_a_newline(rendered: Any) -> None:
    whole = await rendered(PLAIN, {"role": "user", "content": "A\nB"})
    assert await rendered(PLAIN, {"role": "user", "content": parts("A", "B")}) == whole == "[user]A\nB"


async def test_a_template_that_iterates_parts_gets_parts(rendered: Any) -> None:
    assert await rendered(PARTS, {"role": "user", "content": parts("A", "B")}) == "(A)(B)"
    assert await rendered(PARTS, {"role": "user", "content": "AB"}) == "(AB)"
    assert await rendered(EITHER, {"role": "user", "content": parts("A", "B")}) == "(A)(B)"
    assert await rendered(EITHER, {"role": "user", "content": "AB"}) == "AB"


async def test_the_role_developer_is_system_where_the_template_does_not_know_it(rendered: Any) -> None:
    turn = {"role": "developer", "content": "x"}
    assert await rendered(PLAIN, turn) == "[system]x"
    knows = "{% if messages[0].role == 'developer' %}known{% endif %}"
    assert await rendered(knows, turn) == "known"
    assert await rendered(PLAIN, {"role": "x", "content": "y"}) == "[x]y"


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        (["system", "user"], "Role system not supported"),
        (["developer"], "Role system not supported"),
        (["x"], "Role x not supported"),
        (["tool"], "Role tool not supported"),
        (["user", "user"], "Roles must alternate"),
        (["assistant"], "Roles must alternate"),
    ],
)
async def test_what_a_template_refuses_is_400_in_its_words(rendered: Any, roles: list[str], words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        await rendered(STRICT, *({"role": role, "content": "x"} for role in roles))
    assert refused.value.status == 400
    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    ["{{ nope.x }}", "{% if %}", "{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{{ ''.__class__.__mro__ }}"],
)
async def test_what_goes_wrong_in_a_template_is_400(rendered: Any, template: str) -> None:
    with pytest.raises(ApiError) as refused:
        await rendered(template, {"role": "user", "content": "x"})
    assert refused.value.status == 400
    assert "Traceback" not in refused.value.message


async def test_a_template_cannot_change_the_messages(rendered: Any) -> None:
    with pytest.raises(ApiError, match="unsafe"):
        await rendered("{{ messages.append(1) }}", {"role": "user", "content": "x"})


@pytest.mark.slow
async def test_a_template_that_runs_on_is_ended_and_the_next_one_served(rendered: Any) -> None:
    user = {"role": "user", "content": "x"}
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ApiError, match="longer than 2 s"):
        await rendered(endless, user)
    assert await rendered(PLAIN, user) == "[user]x"


async def test_a_template_cannot_eat_the_memory(rendered: Any) -> None:
    user = {"role": "user", "content": "x"}
    with pytest.raises(ApiError) as refused:
        await rendered("{{ 'a' * 99999999999 }}", user)
    assert refused.value.status == 400
    with pytest.raises(ApiError, match="more than"):
        await rendered("{{ messages[0].content * 40000000 }}", user)
    assert await rendered(PLAIN, user) == "[user]x"


async def test_a_model_without_a_template_says_so(rendered: Any) -> None:
    with pytest.raises(ApiError, match="has no chat template") as refused:
        await rendered(None, {"role": "user", "content": "x"})
    assert refused.value.status == 400


async def test_arguments_of_past_tool_calls_are_objects_where_they_are_json(rendered: Any) -> None:
    def turn(arguments: str) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    template = "{{ messages[0].tool_calls[0].function.arguments is mapping }}"
    assert await rendered(template, turn('{"a": 1}')) == "True"
    assert await rendered(template, turn("{")) == "False"
    assert await rendered("{{ messages[0].tool_calls[0].function.arguments }}", turn("{")) == "{"


@pytest.mark.slow
async def test_texts_equal_those_of_transformers(rendered: Any) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415 - takes seconds

    turns = [{"role": "system", "content": " s "}, {"role": "user", "content": "<ü>"}]
    for template in (CHAT, PLAIN, "{{ messages | tojson(indent=2) }}\n  {% if true %}\n x\n{% endif %}\n"):
        [theirs], _ = render_jinja_template(
            [turns], chat_template=template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
        )
        assert await rendered(template, *turns) == theirs
