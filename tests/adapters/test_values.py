"""Finite or not, told from bytes that come in pieces, as numpy and torch tell it from values."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polygraft_adapters.values import FiniteCheck

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ODD = [0.0, -0.0, 1.0, -3.5, float("inf"), float("-inf"), float("nan"), 6e-8, 65504.0]


@settings(deadline=None)
@given(st.sampled_from(sorted(DTYPES)), st.lists(st.sampled_from(ODD), max_size=12), st.lists(st.integers(0, 48)))
def test_pieces_may_end_anywhere(name: str, values: list[float], cuts: list[int]) -> None:
    tensor = torch.tensor(values, dtype=DTYPES[name])
    raw = bytes(tensor.view(torch.uint8).tolist()) if values else b""
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = [raw[begin:end] for begin, end in pairwise(places)]
    check = FiniteCheck(name)
    assert list(check.watch(pieces)) == pieces
    assert check.finite == bool(torch.isfinite(tensor).all())
