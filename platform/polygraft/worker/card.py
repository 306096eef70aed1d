"""What a worker knows before it has loaded any weights: how the engine will be sized, and the model's card."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from polygraft.blobs import BlobStore
from polygraft.card import ModelCard
from polygraft.places import served_name
from polygraft.settings import Settings
from polygraft_engine.build import (
    block_bytes,
    context_length,
    free_memory,
    numerics_id,
    resolve_device,
    resolve_dtype,
)
from polygraft_engine.memory import pool_blocks
from polygraft_engine.models.architecture import ModelSpec, read_spec
from polygraft_engine.models.loading import resolve_model
from polygraft_engine.models.tokenizer import TokenizerFiles, load_tokenizer_files
from polygraft_engine.options import EngineOptions
from polygraft_kernels.registry import choose


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that has been looked at: its options with everything decided, and its card."""

    options: EngineOptions
    card: ModelCard
    spec: ModelSpec
    files: TokenizerFiles


def prepare(settings: Settings, blobs: BlobStore) -> Prepared:
    """Read all but the weights. Raises EngineError for a model that is not there, not supported or too short, and
    BackendUnavailable for kernels that cannot run here.
    """
    folder = resolve_model(settings.model)
    spec = read_spec(folder)
    files = load_tokenizer_files(folder)
    dtype_name = resolve_dtype(settings.dtype, spec.dtype)
    dtype: torch.dtype = getattr(torch, dtype_name)
    backend = choose(settings.kernels, resolve_device(settings.device), dtype).backend
    max_model_len = context_length(settings.max_model_len, spec)
    # Decided here, before the weights take their share, so that the card can already tell the longest context.
    one_block = block_bytes(spec, settings.block_size, dtype)
    blocks = pool_blocks(
        settings.kv_cache_memory,
        one_block,
        settings.block_size,
        max_model_len,
        settings.max_num_seqs,
        max(0, free_memory(backend.device) - _weights_size(folder)),
    )
    options = replace(_options(settings), dtype=dtype_name, kv_cache_memory=blocks * one_block)
    name = served_name(settings)
    card = ModelCard(
        name=name,
        created=int(time.time()),
        max_model_len=max_model_len,
        max_context=min(max_model_len, blocks * settings.block_size),
        vocab_size=spec.vocab,
        eos_token_ids=spec.eos_token_ids,
        bos_token=files.bos_token,
        eos_token=files.eos_token,
        chat_template=files.chat_template,
        tokenizer=blobs.put_bytes(files.tokenizer_json.encode()),
        modules=spec.module_shapes(_base_name(settings.model, folder)),
        max_loras=settings.max_loras,
        max_lora_rank=settings.max_lora_rank,
        numerics_id=numerics_id(backend, dtype_name, settings.quantization, folder),
    )
    return Prepared(options, card, spec, files)


def _options(settings: Settings) -> EngineOptions:
    return EngineOptions(
        model=settings.model,
        device=settings.device,
        dtype=settings.dtype,
        kernels=settings.kernels,
        quantization=settings.quantization,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        prefix_caching=settings.enable_prefix_caching,
        max_loras=settings.max_loras,
        max_lora_rank=settings.max_lora_rank,
        threads=settings.threads,
    )


def _base_name(model: str, folder: Path) -> str:
    """What adapters call their base model: a Hub id, or the folder's name."""
    return folder.resolve().name if Path(model).expanduser().exists() else model


def _weights_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
