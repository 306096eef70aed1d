"""Renders chat templates in a process of its own: `python -m polygraft.openai.render`.

Templates are programs by whoever made the model. Here they can neither touch anything (Jinja's immutable sandbox), nor
run on (an alarm ends the process), nor eat the gateway's memory (a limit on the address space). The environment is
the one that templates are written for: transformers' (trim_blocks, lstrip_blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson`, generation blocks).

Each line of standard input is a JSON object {"template", "messages", "variables"}; each line of output is
{"text"} or {"error"}.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TIME_LIMIT = 2.0
"""Seconds of processor time for one rendering: a busy machine is no fault of the template."""
MEMORY_LIMIT = 2**30
"""Bytes of address space."""
MAX_OUTPUT = 32 * 2**20
"""Characters of one rendering."""
PART_JOINER = "\n"
"""Between the text parts of a message, for templates that expect a string."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; its contents are rendered as they are."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own name and type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()


class ChatTemplate:
    """One template, and what it expects of messages."""

    def __init__(self, source: str) -> None:
        self._template: Template = _ENVIRONMENT.from_string(source)
        tree = _ENVIRONMENT.parse(source)
        self._takes_parts = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
        self._takes_strings = not self._takes_parts or any(
            test.name == "string" and _is_content(test.node) for test in tree.find_all(nodes.Test)
        )
        self._knows_developer = any(text.value == "developer" for text in tree.find_all(nodes.Const))

    def render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """The prompt's text. Raises whatever the template raises."""
        text = self._template.render({**variables, "messages": [self._adapt(message) for message in messages]})
        if len(text) > MAX_OUTPUT:
            raise TemplateError(f"it renders more than {MAX_OUTPUT} characters")
        return text

    def _adapt(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as the template reads it: parts or a string; `developer` is what `system` used to be."""
        content = message["content"]
        if isinstance(content, list) and not self._takes_parts:
            content = PART_JOINER.join(part["text"] for part in content)
        elif isinstance(content, str) and not self._takes_strings:
            content = [{"type": "text", "text": content}]
        role = "system" if message["role"] == "developer" and not self._knows_developer else message["role"]
        return {**message, "role": role, "content": content}


def _is_content(node: nodes.Node) -> bool:
    """Whether an expression is a message's content: `m.content`, `m['content']`, a variable of that name, or one of
    these filtered.
    """
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"


@lru_cache(maxsize=64)
def _compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def _answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        template = _compiled(request["template"])
        return {"text": template.render(request["messages"], request["variables"])}
    except Exception as error:  # the template's program may raise anything, and its words are the answer
        return {"error": str(error) or type(error).__name__}


def main() -> None:
    """Serve until the input ends, which it does when the gateway is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT)
        answer = json.dumps(_answer(json.loads(line))).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
