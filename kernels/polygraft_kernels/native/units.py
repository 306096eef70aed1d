"""Finding the compiled library, choosing an instruction set, naming its functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import CDLL, c_double, c_int64, c_void_p
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec

import torch

from polygraft_kernels.api import BackendUnavailable

ISAS = ("portable", "avx2", "avx512", "avx512bf16")
"""Instruction sets, slowest first; the position is the number that `pg_runs` knows."""

EMULATED = {"emulated512": "avx2"}
"""Units for tests only, and the instruction set they are compiled to."""

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

HOW_TO_GET_IT = (
    "the native kernels are not built: install g++ (Debian: apt-get install g++) and reinstall polygraft with pip"
)

Function = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Functions:
    """The C functions of one instruction set and dtype; exports.h has their arguments."""

    linear: Function
    logits: Function
    lora: Function
    attention: Function
    store_kv: Function
    rms_norm: Function
    rope: Function
    silu_mul: Function
    decoder: Function


_POINTER, _INTEGER, _FLOAT = c_void_p, c_int64, c_double
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "linear": (_POINTER, _POINTER, _INTEGER, _INTEGER, _POINTER, _INTEGER),
    "logits": (_POINTER, _POINTER, _INTEGER, _INTEGER, _POINTER, _INTEGER),
    "lora": (_POINTER, _POINTER, _POINTER, _INTEGER, _POINTER, _INTEGER, _INTEGER),
    "attention": (_POINTER, _POINTER, _POINTER, _INTEGER, _INTEGER, _POINTER, _INTEGER),
    "store_kv": (_POINTER, _POINTER, _POINTER, _POINTER, _INTEGER),
    "rms_norm": (_POINTER, _POINTER, _INTEGER, _INTEGER, _INTEGER, _FLOAT, _POINTER, _INTEGER),
    "rope": (_POINTER, _INTEGER, _POINTER, _INTEGER, _POINTER, _INTEGER, _POINTER, _INTEGER),
    "silu_mul": (_POINTER, _INTEGER, _INTEGER, _INTEGER, _POINTER, _INTEGER),
    "decoder": (_POINTER, _POINTER, _INTEGER, _POINTER, _POINTER, _POINTER, _INTEGER),
}


@dataclass(frozen=True, slots=True)
class Unit:
    """One instruction set's half of the library."""

    isa: str
    lanes: int
    functions: dict[torch.dtype, Functions]
    sample: Function
    fma_peak: Callable[[int, int], float]
    memory_read: Callable[[int, int, int], float]


def unit(isa: str | None = None) -> Unit:
    """The unit called `isa`, or the fastest that this processor runs.

    Raises BackendUnavailable when the library was not built, `isa` is unknown or the processor lacks it.
    """
    library = _library()
    if isa is None:
        isa = runnable()[-1]
    needed = EMULATED.get(isa, isa)
    if needed not in ISAS:
        raise BackendUnavailable(f"no instruction set is called {isa!r}; choose one of {', '.join(ISAS)}")
    if needed not in runnable():
        raise BackendUnavailable(f"this processor cannot run {needed}; it runs {', '.join(runnable())}")
    return _bind(library, isa)


@cache
def runnable() -> tuple[str, ...]:
    """The instruction sets that this processor runs, slowest first."""
    library = _library()
    return tuple(name for number, name in enumerate(ISAS) if library.pg_runs(number))


def pack(source: int, itemsize: int, outputs: int, inputs: int, lanes: int, together: int, target: int) -> None:
    """A matrix into panels, from address to address (pack.cpp)."""
    _library().pg_pack(*map(c_int64, (source, itemsize, outputs, inputs, lanes, together, target)))


@cache
def _library() -> CDLL:
    spec = find_spec("polygraft_kernels._native")
    if spec is None or spec.origin is None:
        raise BackendUnavailable(HOW_TO_GET_IT)
    try:
        return CDLL(spec.origin)
    except OSError as error:
        raise BackendUnavailable(f"the native kernels do not load: {error}") from error


@cache
def _bind(library: CDLL, isa: str) -> Unit:
    lanes = library[f"pg_{isa}_vector_lanes"]
    lanes.restype = c_int64
    peak = library[f"pg_{isa}_fma_peak"]
    peak.argtypes, peak.restype = (c_int64, c_int64), c_double
    read = library[f"pg_{isa}_memory_read"]
    read.argtypes, read.restype = (c_void_p, c_int64, c_int64), c_double
    sample = library[f"pg_{isa}_sample_float32"]
    sample.argtypes, sample.restype = (_POINTER, _POINTER, _INTEGER, _INTEGER, _POINTER, _INTEGER), None
    functions = {dtype: _functions(library, isa, name) for dtype, name in DTYPES.items()}
    return Unit(isa, int(lanes()), functions, sample, peak, read)


def _functions(library: CDLL, isa: str, dtype: str) -> Functions:
    found: dict[str, Function] = {}
    for field in fields(Functions):
        function: ctypes._NamedFuncPointer = library[f"pg_{isa}_{field.name}_{dtype}"]
        function.argtypes, function.restype = _ARGUMENTS[field.name], None
        found[field.name] = function
    return Functions(**found)
