"""Tests in `interpreted/` run Triton's kernels, so only a process of Triton's interpreter has them."""

from __future__ import annotations

from polygraft_kernels.triton.numerics import INTERPRETED

collect_ignore = [] if INTERPRETED else ["interpreted"]
