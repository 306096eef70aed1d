"""Talking to a server: turns, refusals, and an answer that is stopped."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from polygraft.cli import app
from polygraft.cli import chat as chat_module
from polygraft.cli.chat import ChatError, Conversation


class FakeServer:
    """Answers with what it was asked, in two pieces."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.tail = b"data: [DONE]\n\n"

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != "Bearer key":
            return httpx.Response(401, json={"error": {"message": "Incorrect API key provided."}})
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "base"}, {"id": "pirate"}]})
        body = json.loads(request.content)
        self.bodies.append(body)
        if self.status != 200:
            return httpx.Response(self.status, json={"error": {"message": "The model is being loaded."}})
        pieces = [
            {"role": "assistant", "content": ""},
            {"content": "You said "},
            {"content": body["messages"][-1]["content"]},
            {},
        ]
        frames = [{"choices": [{"delta": delta}]} for delta in pieces] + [{"choices": []}]
        stream = b": keep-alive\n\n" + b"".join(f"data: {json.dumps(frame)}\n\n".encode() for frame in frames)
        return httpx.Response(200, content=stream + self.tail)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def talk(server: FakeServer) -> Callable[..., Conversation]:
    def make(**options: Any) -> Conversation:
        http = httpx.Client(
            transport=httpx.MockTransport(server), base_url="http://server", headers={"Authorization": "Bearer key"}
        )
        return Conversation(http, "base", **options)

    return make


def test_turns_are_remembered(server: FakeServer, talk: Callable[..., Conversation]) -> None:
    conversation = talk(system="Be brief.")
    assert "".join(conversation.ask("one", 7, 0.0)) == "You said one"
    assert "".join(conversation.ask("two", None, None)) == "You said two"
    first, second = server.bodies
    assert (first["max_tokens"], first["temperature"], first["stream"]) == (7, 0.0, True)
    assert "max_tokens" not in second
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "You said one"},
        {"role": "user", "content": "two"},
    ]


def test_a_refusal_leaves_no_trace(server: FakeServer, talk: Callable[..., Conversation]) -> None:
    conversation = talk()
    server.status = 503
    with pytest.raises(ChatError, match="The model is being loaded"):
        list(conversation.ask("one", None, None))
    assert conversation.messages == []


def test_an_error_in_the_stream_is_told(server: FakeServer, talk: Callable[..., Conversation]) -> None:
    conversation = talk()
    server.tail = b'data: {"error": {"message": "The worker was lost."}}\n\n'
    with pytest.raises(ChatError, match="The worker was lost"):
        list(conversation.ask("one", None, None))
    assert conversation.messages == []


def test_an_answer_that_is_stopped_stays_as_far_as_it_went(talk: Callable[..., Conversation]) -> None:
    conversation = talk()
    pieces = conversation.ask("one", None, None)
    assert [next(pieces), next(pieces)] == ["", "You said "]
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": "You said "}


@pytest.fixture
def terminal(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """terminal(lines, *arguments) is a session that types these lines."""
    real = httpx.Client

    def client(**options: Any) -> httpx.Client:
        return real(**{**options, "transport": httpx.MockTransport(server)})

    monkeypatch.setattr(chat_module.httpx, "Client", client)

    def session(lines: list[str], *arguments: str, key: str = "key") -> Any:
        return CliRunner().invoke(app, ["chat", *arguments, "--api-key", key], input="\n".join(lines) + "\n")

    return session


def test_a_session_switches_models_and_forgets(server: FakeServer, terminal: Callable[..., Any]) -> None:
    result = terminal(["hello", "/model pirate", "ahoy", "/reset", "", "fresh", "/models", "/what", "/quit", "unheard"])
    assert result.exit_code == 0, result.output
    assert "You said ahoy" in result.stdout
    assert "base, pirate" in result.stdout
    assert [body["model"] for body in server.bodies] == ["base", "pirate", "pirate"]
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 1]


def test_a_session_goes_on_after_a_refusal_and_ends_with_its_input(
    server: FakeServer, terminal: Callable[..., Any]
) -> None:
    server.status = 503
    result = terminal(["hello"], "pirate", "--system", "Be brief.")
    assert result.exit_code == 0, result.output
    assert "The model is being loaded." in result.stdout
    assert server.bodies[0]["model"] == "pirate"


def test_a_wrong_key_is_told(terminal: Callable[..., Any]) -> None:
    result = terminal([], key="wrong")
    assert result.exit_code == 1
    assert result.stderr == "error: Incorrect API key provided.\n"


def test_a_model_that_is_not_there_is_told_with_those_that_are(terminal: Callable[..., Any]) -> None:
    result = terminal(["hello"], "nope")
    assert result.exit_code == 1
    assert "'nope'; there are base, pirate" in result.stderr


def test_the_address_may_be_the_one_that_clients_are_given(server: FakeServer, terminal: Callable[..., Any]) -> None:
    assert terminal(["hello"], "--url", "http://server/v1/").exit_code == 0
    assert len(server.bodies) == 1


def test_a_key_of_strange_characters_is_told(terminal: Callable[..., Any]) -> None:
    result = terminal([], key="é")
    assert result.exit_code == 2
    assert "no key has" in result.stderr


def test_a_server_of_another_kind_is_told(monkeypatch: pytest.MonkeyPatch, terminal: Callable[..., Any]) -> None:
    monkeypatch.setattr(FakeServer, "__call__", lambda self, request: httpx.Response(200, text="# metrics"))
    result = terminal([])
    assert result.exit_code == 1
    assert "not a Polygraft server" in result.stderr
