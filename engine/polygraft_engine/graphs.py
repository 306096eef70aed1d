"""Decode steps as captured graphs: what a layer asks of the device is recorded once and replayed for every later step.

A graph is good for up to as many sequences and blocks as it was captured with, one row a sequence, any adapter mix: the
step's numbers lie in fixed tensors, and rows without a sequence compute nothing of use. Steps of base rows only have
graphs of their own, which launch nothing for adapters. CUDA, and HIP through the same calls of torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from polygraft_engine.batch import Batch
from polygraft_kernels.api import StepTensors

logger = logging.getLogger(__name__)

Compute = Callable[[], Tensor]
Capture = Callable[[Compute], Compute]
"""From a computation on fixed tensors to a faster one of the same effect and result."""

SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 16))
"""Sequences of a graph."""
LEAST_TOKENS = 2048
"""Context that every graph has room for; longer ones come in powers of two."""


class FixedStep(Protocol):
    """A step whose tensors stay where they are."""

    tensors: StepTensors

    def fill(self, step: StepTensors) -> None:
        """Take over the numbers of another step, of one row a sequence."""


@runtime_checkable
class CapturableBackend(Protocol):
    """A backend whose kernels read all that varies between steps from the device."""

    device: torch.device

    @property
    def captures(self) -> bool:
        """Whether its device can capture graphs."""

    @property
    def capture_key(self) -> int:
        """Graphs captured under another key are no longer good."""

    def fixed_step(self, rows: int, blocks: int, adapters: bool) -> FixedStep:
        """For up to `rows` sequences of up to `blocks` blocks, with adapters or without."""


@dataclass(frozen=True, slots=True)
class _Graph:
    token_ids: Tensor
    step: FixedStep
    replay: Compute


class DecodeGraphs:
    """Captured when a size is first met, which takes about as long as a few steps."""

    def __init__(
        self,
        forward: Callable[[Tensor, StepTensors], Tensor],
        backend: CapturableBackend,
        block_size: int,
        capture: Capture,
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._least_blocks = -(-LEAST_TOKENS // block_size)
        self._capture = capture
        self._graphs: dict[tuple[int, int, bool], _Graph | None] = {}
        """None where capturing failed, for want of memory as a rule: such steps run as they are."""
        self._key = backend.capture_key

    def __len__(self) -> int:
        """Graphs that are ready."""
        return sum(graph is not None for graph in self._graphs.values())

    @staticmethod
    def cover(batch: Batch) -> bool:
        """Whether `batch` is a decode step of a size that has graphs."""
        return batch.rows <= SIZES[-1] and batch.rows == len(batch.chunks)

    def forward(self, batch: Batch) -> Tensor:
        """Hidden rows [T, K] of a step that `cover` said yes to, good until the next call."""
        graph = self._graph(batch)
        if graph is None:
            return self._forward(batch.token_ids, batch.step)
        graph.token_ids[: batch.rows].copy_(batch.token_ids)
        graph.step.fill(batch.step)
        return graph.replay()[: batch.rows]

    def _graph(self, batch: Batch) -> _Graph | None:
        if self._key != self._backend.capture_key:
            self._graphs.clear()
            self._key = self._backend.capture_key
        adapters = bool(batch.step.groups.slots)
        rows = next(size for size in SIZES if size >= batch.rows)
        blocks = max(self._least_blocks, 1 << (batch.step.block_tables.shape[1] - 1).bit_length())
        key = (rows, blocks, adapters)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._captured(batch, *key)
            except RuntimeError:
                logger.warning("decode steps of %d rows and %d blocks cannot be captured", rows, blocks, exc_info=True)
                self._graphs[key] = None
        return self._graphs[key]

    def _captured(self, batch: Batch, rows: int, blocks: int, adapters: bool) -> _Graph:
        token_ids = torch.zeros(rows, dtype=torch.int64, device=self._backend.device)
        step = self._backend.fixed_step(rows, blocks, adapters)
        # capturing runs the step: on this batch's numbers it stores the keys that the batch is about to store
        token_ids[: batch.rows].copy_(batch.token_ids)
        step.fill(batch.step)
        return _Graph(token_ids, step, self._capture(lambda: self._forward(token_ids, step.tensors)))


class DeviceCapture:
    """torch's graphs of a CUDA or HIP device; all share one pool of memory, for no two run at once."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()  # compiles kernels and makes workspaces, which no capture may
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads prepare adapters meanwhile, which is none of this capture's business
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
