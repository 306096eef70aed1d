"""What `serve` tells its operator: that it is ready, and how to ask it something."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Ready:
    """The facts of the ready message."""

    url: str
    metrics_url: str
    model: str
    adapters: Sequence[str]
    key: str | None
    """What the example sends as its key; None where none is needed."""

    def __str__(self) -> str:
        facts = {
            "url": f"{self.url}/v1",
            "metrics": self.metrics_url,
            "model": self.model,
            "adapters": ", ".join(self.adapters) if self.adapters else "none",
        }
        lines = [f"  {name:<9} {value}" for name, value in facts.items()]
        return "\n".join(["polygraft is ready", *lines, "", "Try it:", f"  {self.example()}"])

    def example(self) -> str:
        """A command line for curl. The shell is to fill in a key that is given as a variable."""
        model = self.adapters[0] if self.adapters else self.model
        body = {"model": model, "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 40}
        words = ["curl", "-s", shlex.quote(f"{self.url}/v1/chat/completions"), "-H 'Content-Type: application/json'"]
        if self.key is not None:
            words.append(f'-H "Authorization: Bearer {self.key}"')
        return " ".join([*words, "-d", shlex.quote(json.dumps(body))])


def reachable_url(host: str, port: int) -> str:
    """How this machine reaches a server that listens on `host`, which may be every address."""
    name = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


async def until_ready(url: str) -> None:
    """Return once /health/ready is green. The gateway's socket is open already, so a call waits rather than fails."""
    async with httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as client:
        while True:
            try:
                if (await client.get("/health/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                # The gateway is not there yet, or is being restarted.
                pass
            await asyncio.sleep(POLL_SECONDS)
