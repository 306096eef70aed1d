"""Memory in huge pages: what is handed out is whole, zero and apart; what is given back is used again."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polygraft_kernels.native.pages import CHUNK, LINE, Arena, Pages


def assert_sound(tensors: list[Tensor]) -> None:
    """On cache lines, and no two overlap."""
    ends = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.nbytes > 0)
    assert all(start % LINE == 0 for start, _ in ends)
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_pages_are_zero_apart_and_of_any_size() -> None:
    pages = Pages()
    made = [
        pages.zeros(shape, dtype) for shape in ((3, 5), (0,), (CHUNK,), (7,)) for dtype in (torch.int8, torch.float32)
    ]
    assert_sound(made)
    assert all(not tensor.any() for tensor in made)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40_000), st.integers(0, 100)), max_size=60))
def test_an_arena_gives_and_takes_back(moves: list[tuple[bool, int, int]]) -> None:
    arena = Arena()
    held: list[Tensor] = []
    for give_back, size, which in moves:
        if give_back and held:
            arena.give_back(held.pop(which % len(held)))
        else:
            tensor = arena.zeros((size,), torch.bfloat16)
            assert not tensor.any()
            tensor.fill_(1)
            held.append(tensor)
        assert_sound(held)
        arena.check()
        assert arena.used == sum(-(-tensor.nbytes // LINE) * LINE for tensor in held)
    assert all(bool((tensor == 1).all()) for tensor in held)
    for tensor in held:
        arena.give_back(tensor)
    assert arena.used == 0


def test_freed_neighbours_make_room_for_a_larger_one() -> None:
    arena = Arena()
    parts = [arena.zeros((CHUNK // 4 - LINE,), torch.int8) for _ in range(4)]
    first = parts[0].data_ptr()
    for index in (0, 2, 1):
        arena.give_back(parts[index])
    assert arena.zeros((CHUNK // 2,), torch.int8).data_ptr() == first
