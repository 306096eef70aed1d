"""Every operation by itself, beside its floor; FlashInfer's decode attention beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from gpu.bench import Bench, Figure, Sizes
from polygraft_kernels.api import KVCache, LoraGroups, StepTensors

BLOCK = 16
"""Tokens of a KV block."""


def decode_step(sizes: Sizes, batch: int, device: torch.device) -> StepTensors:
    """`batch` sequences of the measured context, one row each, blocks scattered."""
    width = -(-sizes.context // BLOCK)
    tables = torch.randperm(batch * width, device=device).to(torch.int32).view(batch, width)
    last = tables[:, (sizes.context - 1) // BLOCK].long() * BLOCK + (sizes.context - 1) % BLOCK
    return StepTensors(
        positions=torch.full((batch,), sizes.context - 1, dtype=torch.int64, device=device),
        slot_mapping=last,
        query_starts=torch.arange(batch + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((batch,), sizes.context, dtype=torch.int32, device=device),
        block_tables=tables,
        groups=LoraGroups((), (batch,)),
    )


def operations(bench: Bench) -> Iterator[Figure]:
    """Every operation by itself."""
    backend, sizes, weights = bench.backend, bench.sizes, bench.linears()
    table = torch.randn(sizes.context, 2, sizes.head_dim // 2, device=backend.device)
    norm = bench.random(sizes.hidden)
    for batch in sizes.batches:
        for name, (inputs, segments) in sizes.projections.items():
            x, weight, outputs = bench.random(batch, inputs), weights[name], sum(segments)
            size = 2 * (outputs * inputs + batch * (inputs + outputs))
            yield bench.figure(
                f"linear {name}",
                batch,
                "",
                lambda x=x, w=weight: backend.linear(x, w),
                2 * batch * outputs * inputs,
                size,
            )
        x, gate_up = bench.random(batch, sizes.hidden), bench.random(batch, 2 * sizes.intermediate)
        yield bench.figure("rms_norm", batch, "", lambda x=x: backend.rms_norm(x, norm, 1e-5), 0, 4 * x.numel())
        yield bench.figure("silu_mul", batch, "", lambda g=gate_up: backend.silu_mul(g), 0, 3 * gate_up.numel())
        yield from _attention(bench, batch, table)


def _attention(bench: Bench, batch: int, table: Tensor) -> Iterator[Figure]:
    backend, sizes = bench.backend, bench.sizes
    step = decode_step(sizes, batch, backend.device)
    cache = backend.kv_cache(step.block_tables.numel(), BLOCK, sizes.kv_heads, sizes.head_dim, torch.bfloat16)
    q = bench.random(batch, sizes.heads, sizes.head_dim)
    k = bench.random(batch, sizes.kv_heads, sizes.head_dim)
    turned = 4 * (q.numel() + k.numel())
    yield bench.figure("rope", batch, "", lambda: backend.rope(q, k, step.positions, table), 0, turned)
    yield bench.figure(
        "store_kv", batch, "", lambda: backend.store_kv(k, k, cache, step.slot_mapping), 0, 8 * k.numel()
    )
    detail, work = f"context {sizes.context}", 4 * batch * sizes.context * sizes.heads * sizes.head_dim
    size = 4 * batch * sizes.context * sizes.kv_heads * sizes.head_dim
    ours = bench.figure("attention, decode", batch, detail, lambda: backend.attention(q, cache, step, None), work, size)
    yield Figure(**{**asdict(ours), "against": flashinfer_decode(bench, q, cache, step)})
    if batch == sizes.batches[0]:
        yield _prefill(bench, cache, step)


def _prefill(bench: Bench, cache: KVCache, step: StepTensors) -> Figure:
    sizes, device = bench.sizes, bench.backend.device
    first = sizes.context - sizes.chunk
    q = bench.random(sizes.chunk, sizes.heads, sizes.head_dim)
    chunk = StepTensors(
        torch.arange(first, sizes.context, device=device),
        torch.zeros(sizes.chunk, dtype=torch.int64, device=device),
        torch.tensor([0, sizes.chunk], dtype=torch.int32, device=device),
        step.context_lens[:1],
        step.block_tables[:1],
        LoraGroups((), (sizes.chunk,)),
    )
    pairs = sum(range(first + 1, sizes.context + 1))
    size = 4 * (sizes.context * sizes.kv_heads + sizes.chunk * sizes.heads) * sizes.head_dim
    return bench.figure(
        "attention, prefill",
        sizes.chunk,
        f"context {sizes.context}",
        lambda: bench.backend.attention(q, cache, chunk, None),
        4 * pairs * sizes.heads * sizes.head_dim,
        size,
    )


def flashinfer_decode(bench: Bench, q: Tensor, cache: KVCache, step: StepTensors) -> float | None:
    """Microseconds of FlashInfer's decode attention over the same cache; None where it is not installed."""
    if find_spec("flashinfer") is None:
        return None
    flashinfer = import_module("flashinfer")
    batch, width = step.block_tables.shape
    last = (bench.sizes.context - 1) % BLOCK + 1
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"), "HND"
    )
    wrapper.plan(
        torch.arange(batch + 1, dtype=torch.int32, device="cuda") * width,
        step.block_tables.flatten(),
        torch.full((batch,), last, dtype=torch.int32, device="cuda"),
        bench.sizes.heads,
        bench.sizes.kv_heads,
        bench.sizes.head_dim,
        BLOCK,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    return bench.clock(lambda: wrapper.run(q, (cache.keys, cache.values))) * 1e6
