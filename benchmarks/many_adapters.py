"""A thousand adapters on one base: `python benchmarks/many_adapters.py MODEL [--adapters 1000] [--rounds 3]`.

Uploads as many different adapters (rank 4 on q and v) to a server of its own, times the pages of their listing, and
compares the throughput of requests spread over all of them with that of requests spread over sixteen, in turn.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
from peers.processes import Server, ask, serving
from random_adapters import write
from rich.console import Console
from rich.progress import track

TENANT_KEY = "pg-" + "M" * 40
FEW = 16
PAGE = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=96)
    arguments = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="polygraft-many-"))
    command = [sys.executable, "-m", "polygraft", "serve", str(arguments.model), "--served-model-name", "base"]
    command += ["--data-dir", str(logs / "data"), "--port", "{port}", "--metrics-port", "0"]
    command += ["--max-loras", str(FEW), "--no-enable-prefix-caching"]
    keys = {"POLYGRAFT_BOOTSTRAP_TENANT_KEY": TENANT_KEY}
    console = Console(highlight=False)
    with serving(Server("polygraft", tuple(command), "/health/ready", keys), logs / "server.log") as url:
        names = upload(url, arguments)
        pages = list(listing(url))
        console.print(
            f"{len(names)} adapters: {len(pages)} pages of {PAGE}, median {statistics.median(pages) * 1e3:.1f} ms, "
            f"slowest {max(pages) * 1e3:.1f} ms"
        )
        rate(url, names[:FEW], FEW, arguments.rounds, logs)
        rates: dict[int, list[float]] = {FEW: [], len(names): []}
        for number in range(arguments.rounds):
            for count in rates:
                rates[count].append(rate(url, names[:count], arguments.requests, number, logs))
                console.print(f"round {number + 1}: over {count}: {rates[count][-1]:.1f} tok/s")
    few, many = (statistics.median(rates[count]) for count in rates)
    console.print(f"over {FEW}: {few:.1f} tok/s, over {len(names)}: {many:.1f} tok/s, ratio {many / few:.2f}")


def upload(url: str, arguments: argparse.Namespace) -> list[str]:
    """Make and upload them one by one; their names."""
    names = [f"tiny-{number:04d}" for number in range(arguments.adapters)]
    with tempfile.TemporaryDirectory() as scratch, httpx.Client(headers=authorization(), timeout=60) as client:
        for seed, name in enumerate(track(names, "uploading", console=Console(stderr=True))):
            folder = Path(scratch) / name
            write(folder, arguments.model, arguments.rank, seed, ("q_proj", "v_proj"))
            packed = io.BytesIO()
            with zipfile.ZipFile(packed, "w") as archive:
                for file in folder.iterdir():
                    archive.write(file, file.name)
                    file.unlink()
            files = {"file": ("adapter.zip", packed.getvalue())}
            client.post(f"{url}/v1/adapters", data={"name": name}, files=files).raise_for_status()
    return names


def listing(url: str) -> Iterator[float]:
    """Seconds of each page, from the first to the last."""
    after = None
    with httpx.Client(headers=authorization()) as client:
        while True:
            parameters = {"limit": PAGE} if after is None else {"limit": PAGE, "after": after}
            started = time.perf_counter()
            page = client.get(f"{url}/v1/adapters", params=parameters).raise_for_status().json()
            yield time.perf_counter() - started
            if not page["has_more"]:
                return
            after = page["last_id"]


def rate(url: str, names: list[str], requests: int, number: int, logs: Path) -> float:
    """Output tokens a second with requests spread evenly over `names`."""
    command = [sys.executable, "-m", "polygraft", "bench", "--json", "--url", url, "--models", ",".join(names)]
    # A warm-up would ask every model once.
    command += ["--requests", str(requests), "--seed", str(number), "--warmup", "0"]
    report = ask(command, logs / "client.log", {"POLYGRAFT_API_KEY": TENANT_KEY})
    if report["total"]["failures"]:
        raise SystemExit(f"requests failed: {report['errors']}")
    tokens: float = report["total"]["output_tokens_per_second"]
    return tokens


def authorization() -> dict[str, str]:
    return {"Authorization": f"Bearer {TENANT_KEY}"}


if __name__ == "__main__":
    main()
