"""What the gateway must know of a model. Each worker registers its model's card; torch-free."""

from __future__ import annotations

import msgspec

from polygraft_adapters.types import ModuleShapes


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served base model. Two workers that serve the same name must register equal cards."""

    name: str
    """The served name, which clients use."""
    created: int
    """Unix seconds at which the model was first registered."""
    max_model_len: int
    max_context: int
    """min(max_model_len, the KV pool in tokens): the longest prompt and output together."""
    vocab_size: int
    """Token ids below this are valid in prompts, logit_bias and stop_token_ids: min(embedding rows, logits width)."""
    eos_token_ids: tuple[int, ...]
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    tokenizer: str
    """Blob digest of tokenizer.json."""
    modules: ModuleShapes
    max_loras: int
    max_lora_rank: int
    numerics_id: str
    """Equal ids compute equal outputs: backend, instruction set, dtype and model digest."""
