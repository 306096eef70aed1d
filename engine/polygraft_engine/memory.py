"""How many KV blocks to make. Free of torch."""

from __future__ import annotations

import os
from pathlib import Path

from polygraft_engine.types import EngineError

DEFAULT_KV_BYTES = 2 * 2**30
DEFAULT_KV_SHARE = 0.3
"""Of the memory that is available once the model is loaded."""


def available_memory() -> int:
    """Bytes that this process may still take: what the machine has to spare, or a container's limit leaves."""
    limits = [_machine_available()]
    limit, usage = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and usage is not None:
        limits.append(max(0, limit - usage))
    return min(limits)


def pool_blocks(
    budget: int | None, block_bytes: int, block_size: int, max_model_len: int, max_num_seqs: int, available: int
) -> int:
    """Blocks to allocate. `budget` is the operator's number of bytes, None the default share of `available`.

    Never more than `max_num_seqs` sequences of `max_model_len` tokens could fill. Raises EngineError, with the numbers,
    when no sequence fits.
    """
    size = min(DEFAULT_KV_BYTES, int(available * DEFAULT_KV_SHARE)) if budget is None else budget
    needed = max_num_seqs * -(-max_model_len // block_size)
    blocks = min(size // block_bytes, needed)
    if blocks < 1:
        raise EngineError(
            f"{size} bytes of KV cache do not hold one block of {block_size} tokens, which takes {block_bytes} bytes "
            f"with this model; give more with kv_cache_memory ({available} bytes of memory are available)"
        )
    return blocks


def _machine_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: what is free is not told, so count what is there
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup(name: str) -> int | None:
    try:
        text = (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
