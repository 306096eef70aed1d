"""From EngineOptions to a running Engine."""

from __future__ import annotations

from pathlib import Path

import torch

from polygraft_engine.adapter_source import AdapterSource
from polygraft_engine.engine import Engine, EngineInfo
from polygraft_engine.lora import AdapterBanks
from polygraft_engine.memory import available_memory, pool_blocks
from polygraft_engine.models.architecture import DTYPES, ModelSpec, read_spec
from polygraft_engine.models.checkpoint import contents_digest
from polygraft_engine.models.loading import Progress, load_decoder, no_progress, resolve_model
from polygraft_engine.models.packing import weight_packer
from polygraft_engine.options import EngineOptions
from polygraft_engine.preparing import Preparer
from polygraft_engine.types import EngineError, EngineLimits
from polygraft_kernels.api import Backend, KernelError
from polygraft_kernels.registry import choose

HALF_PRECISION = ("bfloat16", "float16")


def build_engine(options: EngineOptions, adapters: AdapterSource, on_progress: Progress = no_progress) -> Engine:
    """Load the model and make an Engine over it.

    Raises ModelError for a model that cannot be loaded, BackendUnavailable for kernels that cannot run here, and
    EngineError for sizes that do not fit together.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    folder = resolve_model(options.model)
    spec = read_spec(folder)
    max_model_len = context_length(options.max_model_len, spec)
    dtype_name = resolve_dtype(options.dtype, spec.dtype)
    dtype: torch.dtype = getattr(torch, dtype_name)
    choice = choose(options.kernels, resolve_device(options.device), dtype)
    backend = choice.backend
    banks = AdapterBanks(backend, spec, options.max_loras, dtype)
    pack = weight_packer(backend, options.quantization)
    decoder = load_decoder(folder, spec, backend, dtype, pack, banks, max_model_len, on_progress)
    limits = EngineLimits(
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        num_blocks=pool_blocks(
            options.kv_cache_memory,
            block_bytes(spec, options.block_size, dtype),
            options.block_size,
            max_model_len,
            options.max_num_seqs,
            free_memory(backend.device),
        ),
        max_loras=options.max_loras,
        max_lora_rank=options.max_lora_rank,
        prefix_caching=options.prefix_caching,
    )
    info = EngineInfo(
        folder=folder,
        backend=backend.name,
        passed_over=choice.passed_over,
        dtype=dtype_name,
        numerics_id=numerics_id(backend, dtype_name, options.quantization, folder),
    )
    try:
        return Engine(decoder, banks, Preparer(decoder, banks, pack), limits, adapters, info)
    except KernelError as error:
        raise EngineError(f"the {backend.name} kernels cannot make this KV cache: {error}") from error


def numerics_id(backend: Backend, dtype_name: str, quantization: str | None, folder: Path) -> str:
    """Equal for engines that compute equal outputs: backend, instruction set, dtype, quantization and model."""
    weights = dtype_name if quantization is None else f"{dtype_name}+{quantization}"
    return f"{_variant(backend)}/{weights}/{contents_digest(folder)}"


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take where `device` keeps its tensors."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def resolve_device(name: str) -> torch.device:
    """The device `name`, of which "auto" is a GPU if torch sees one. Raises EngineError when it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError("device cuda was asked for, but torch sees no GPU here")
    return torch.device(name)


def resolve_dtype(asked: str, stored: str) -> str:
    """The dtype to compute in. Raises EngineError for one that no backend knows."""
    if asked == "auto":
        return "bfloat16" if stored in HALF_PRECISION else "float32"
    if asked not in DTYPES:
        raise EngineError(f"dtype {asked!r} is not one of auto, {', '.join(DTYPES)}")
    return asked


def block_bytes(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block, in all layers."""
    return 2 * spec.layers * block_size * spec.kv_heads * spec.head_dim * dtype.itemsize


def context_length(asked: int | None, spec: ModelSpec) -> int:
    """The longest sequence to serve; None asks for the model's own. Raises EngineError for more than that."""
    if asked is None:
        return spec.max_position
    if asked > spec.max_position:
        raise EngineError(f"max_model_len {asked} is more than the {spec.max_position} positions of the model")
    return asked


def _variant(backend: Backend) -> str:
    isa = getattr(backend, "isa", None)
    return backend.name if isa is None else f"{backend.name}-{isa}"
