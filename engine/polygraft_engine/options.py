"""How an engine is built. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a worker's operator or an offline caller chooses; names as vLLM's options."""

    model: str
    """A local folder or a Hub id."""
    device: str = "auto"
    dtype: str = "auto"
    """auto: bfloat16 for checkpoints in half precision, float32 for the others."""
    kernels: str = "auto"
    quantization: str | None = None
    """int8: the base model's matrices in 8 bits, made while loading. Adapters and embeddings keep `dtype`."""
    max_model_len: int | None = None
    """None: what the model was made for."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_memory: int | None = None
    """Bytes; None: 2 GiB, or 30% of the available memory if that is less."""
    prefix_caching: bool = True
    max_loras: int = 16
    """How many different adapters one step mixes."""
    max_lora_rank: int = 64
    threads: int | None = None
    """CPU threads; None leaves them as they are."""
