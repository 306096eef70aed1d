"""`polygraft chat`."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from polygraft.cli.remote import DEFAULT_URL, authorization, server_url
from polygraft.errors import ConfigError, OptionError, PolygraftError

HELP = "/model NAME switches, /models lists, /reset forgets the conversation, /quit leaves; ctrl-c stops an answer."


class ChatError(PolygraftError):
    """The server refused, or is not there; the message is for the person at the terminal."""


@dataclass(slots=True)
class Conversation:
    """Messages with one server, answered as they stream in."""

    http: httpx.Client
    model: str
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str, max_tokens: int | None, temperature: float | None) -> Generator[str, None, None]:
        """The answer piece by piece. An answer that is stopped half-way stays in the conversation as far as it went;
        one that failed leaves no trace. Raises ChatError.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        failed = True
        try:
            for piece in self._stream(max_tokens, temperature):
                answer += piece
                yield piece
            failed = False
        except httpx.HTTPError as error:
            raise ChatError(f"{self.http.base_url}: {error}") from None
        except (KeyboardInterrupt, GeneratorExit):
            failed = False
            raise
        finally:
            if failed:
                self.messages.pop()
            else:
                self.messages.append({"role": "assistant", "content": answer})

    def _stream(self, max_tokens: int | None, temperature: float | None) -> Iterator[str]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        body: dict[str, Any] = {"model": self.model, "messages": [*system, *self.messages], "stream": True}
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if temperature is not None:
            body["temperature"] = temperature
        with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise ChatError(_message(response))
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == line or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ChatError(str(event["error"]["message"]))
                for choice in event["choices"]:
                    content = choice["delta"].get("content")
                    if content is not None:
                        yield content

    def models(self) -> list[str]:
        """The names that this key may ask. Raises ChatError, or OptionError where a key is wanted and there is none."""
        try:
            response = self.http.get("/v1/models")
        except httpx.HTTPError as error:
            raise ChatError(f"{self.http.base_url}: {error}") from None
        if response.status_code == 401 and "authorization" not in response.request.headers:
            raise OptionError("which key? --api-key or POLYGRAFT_API_KEY")
        if response.status_code != 200:
            raise ChatError(_message(response))
        try:
            return [entry["id"] for entry in response.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise ChatError(f"{self.http.base_url} is not a Polygraft server: it lists no models") from None


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code}"


def chat(
    model: Annotated[str | None, typer.Argument(help="A base model or an adapter; default: the first one.")] = None,
    url: Annotated[str, typer.Option(envvar="POLYGRAFT_URL", help="The server.")] = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(envvar="POLYGRAFT_API_KEY", help="A tenant's key.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is always the likeliest word.")] = None,
) -> None:
    """Talk to a running server in the terminal."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    url = server_url(url)
    timeout = httpx.Timeout(10.0, read=None)
    with httpx.Client(base_url=url, headers=authorization(api_key), timeout=timeout, trust_env=False) as http:
        try:
            listed = Conversation(http, "").models()
        except ChatError as error:
            raise ConfigError(str(error)) from None
        if model is None and not listed:
            raise ConfigError(f"{url} serves no model yet")
        if model is not None and model not in listed:
            raise ConfigError(f"{url} serves no model {model!r}; there are {', '.join(listed)}")
        conversation = Conversation(http, listed[0] if model is None else model, system)
        console.print(f"Talking to {conversation.model}. {HELP}", style="dim")
        while (text := _read(console, conversation.model)) is not None:
            if text.startswith("/"):
                if not _command(console, conversation, text):
                    return
            elif text:
                _answer(console, conversation, text, max_tokens, temperature)


def _read(console: Console, model: str) -> str | None:
    """A line; None at the end of input. Ctrl-c while typing starts a new line."""
    while True:
        try:
            return console.input(f"{model}> ").strip()
        except KeyboardInterrupt:
            console.print()
        except EOFError:
            console.print()
            return None


def _command(console: Console, conversation: Conversation, text: str) -> bool:
    """Do what a line with a slash says; False to leave."""
    name, _, argument = text.partition(" ")
    argument = argument.strip()
    if name in ("/quit", "/exit"):
        return False
    if name == "/reset":
        conversation.messages.clear()
    elif name == "/model" and argument:
        conversation.model = argument
    elif name in ("/models", "/model"):
        try:
            console.print(", ".join(conversation.models()))
        except ChatError as error:
            console.print(str(error), style="red")
    else:
        console.print(HELP, style="dim")
    return True


def _answer(
    console: Console, conversation: Conversation, text: str, max_tokens: int | None, temperature: float | None
) -> None:
    pieces = conversation.ask(text, max_tokens, temperature)
    try:
        for piece in pieces:
            console.print(piece, end="")
    except KeyboardInterrupt:
        # Closing the stream tells the server that nobody listens any more.
        pieces.close()
        console.print(" [stopped]", style="dim", end="")
    except ChatError as error:
        console.print(str(error), style="red", end="")
    console.print()
