"""The uniform number of a token, as a pure function of where the token stands. Free of torch."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BITS = 24
"""As many as a float32 holds exactly, so that the largest value is 1 - 2**-24."""


def uniform(seed: int, choice: int, position: int) -> float:
    """In [0, 1), for the output token at `position` of choice number `choice`.

    Each number is added to the state that SplitMix64's finaliser (Steele, Lea and Flood, 2014) made of those before it.
    Nothing is kept, so a token draws the same number after preemption, on another worker, in any batch.
    """
    state = _mixed(seed)
    state = _mixed(state + choice)
    state = _mixed(state + position)
    return (state >> (64 - _BITS)) / (1 << _BITS)


def _mixed(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
