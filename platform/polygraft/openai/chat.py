"""Conversations to prompt texts, through the model's own chat template."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from polygraft.card import ModelCard
from polygraft.errors import bad_request
from polygraft.openai import render
from polygraft.openai.schemas import Message


class ChatRenderer:
    """Renders templates in one child process, which is started at first use and again after a template killed it.

    Text parts reach a template that does not iterate over parts joined by a newline; the role `developer` reaches one
    that does not know it as `system`. Every other role goes through for the template to judge.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        # The process answers one question at a time, so one thread asks.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chat-template")

    async def render(
        self, card: ModelCard, messages: Sequence[Message], *, add_generation_prompt: bool, variables: dict[str, Any]
    ) -> str:
        """The prompt's text, with the special tokens that the template writes; `variables` are the template's own.

        Raises ApiError 400: the model has no template, or the template refuses the messages (in its words), takes
        longer than the time limit, or needs too much memory.
        """
        if card.chat_template is None:
            raise bad_request(
                f"The model `{card.name}` has no chat template; use /v1/completions with a prompt.", param="messages"
            )
        known = {"bos_token": card.bos_token, "eos_token": card.eos_token}
        turns = [message.model_dump(exclude_none=True) for message in messages]
        for turn in turns:
            _parse_arguments(turn)
        request = {
            "template": card.chat_template,
            "messages": turns,
            "variables": {
                "tools": None,
                "documents": None,
                **variables,
                **{name: token for name, token in known.items() if token is not None},
                "add_generation_prompt": add_generation_prompt,
            },
        }
        line = json.dumps(request).encode() + b"\n"
        answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, line)
        if "error" in answer:
            raise bad_request(f"The chat template refuses these messages: {answer['error']}", param="messages")
        return answer["text"]

    def close(self) -> None:
        """End the process."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._end()

    def _ask(self, line: bytes) -> dict[str, str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "polygraft.openai.render"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BrokenPipeError:
            answer = b""
        else:
            answer = self._process.stdout.readline()
        if answer.endswith(b"\n"):
            parsed: dict[str, str] = json.loads(answer)
            return parsed
        return {"error": _cause(self._end())}

    def _end(self) -> int:
        """End the process and return how it ended; 0 if there was none."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        try:
            process.stdin.close()
        except BrokenPipeError:
            process.kill()  # it is gone already; there is nothing left to flush
        return process.wait()


def _cause(returncode: int) -> str:
    if returncode == -signal.SIGPROF:
        return f"it takes longer than {render.TIME_LIMIT:g} s"
    return "it ended the renderer"


def _parse_arguments(message: dict[str, Any]) -> None:
    """Give templates the arguments of past tool calls as objects, as they expect; what is none stays a string."""
    for call in message.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                continue
            if isinstance(arguments, dict):
                function["arguments"] = arguments
