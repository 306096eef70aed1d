"""What a tensor's name says: which module of the base model it belongs to, and which part of an adapter it is there.

PEFT writes base_model.model.<module>.lora_A.weight. Wrappers add or drop leading parts, and a state dict saved by hand
keeps the adapter's own name (`lora_A.default.weight`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """What a tensor is to its module; the value is what messages call it."""

    A = "lora_A"
    B = "lora_B"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    MAGNITUDE = "lora_magnitude_vector"
    LORA_BIAS = "bias of lora_B"
    BIAS = "trained bias"
    OWN = "whole copy"
    """The module's weight under its own name: modules_to_save, or an embedding layer that was saved along."""
    OWN_AGAIN = "second whole copy"
    """The same, as PEFT writes it a second time where embedding layers are saved along."""
    BASE = "copy of the base's weight"
    """Saved along with LoRA or retrained tokens on an embedding layer; PEFT loads it in place of the base's."""
    TOKENS = "retrained tokens"


@dataclass(frozen=True, slots=True)
class TensorName:
    """A name in parts. `layer` is None outside the decoder's layers, where `parent` is empty."""

    layer: int | None
    parent: str
    module: str
    part: Part


_PREFIX = r"(?:(?:base_model|model|module|_orig_mod)\.)*"
_MODULE = re.compile(
    _PREFIX + r"(?:layers\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.([a-z_]+)|(embed_tokens|lm_head))\.(?=[A-Za-z])"
)
_NAME = r"(?:\.[^.]+)?"
_PARTS = [
    (Part.A, rf"lora_A{_NAME}\.weight"),
    (Part.B, rf"lora_B{_NAME}\.weight"),
    (Part.LORA_BIAS, rf"lora_B{_NAME}\.bias"),
    (Part.EMBEDDING_A, rf"lora_embedding_A{_NAME}"),
    (Part.EMBEDDING_B, rf"lora_embedding_B{_NAME}"),
    (Part.MAGNITUDE, rf"lora_magnitude_vector{_NAME}(?:\.weight)?"),
    (Part.BIAS, r"(?:base_layer\.)?bias"),
    (Part.OWN, r"weight"),
    (Part.OWN_AGAIN, rf"modules_to_save{_NAME}\.weight"),
    (Part.BASE, r"(?:base_layer|(?:base_layer\.)?token_adapter\.base_layer|original_module)\.weight"),
    (Part.TOKENS, rf"(?:base_layer\.)?token_adapter\.trainable_tokens_delta{_NAME}"),
]
_PART = [(part, re.compile(expression)) for part, expression in _PARTS]


def parse_name(name: str) -> TensorName | None:
    """The parts of a tensor's name; None for one that is no part of an adapter."""
    match = _MODULE.match(name)
    if match is None:
        return None
    rest = name[match.end() :]
    part = next((part for part, expression in _PART if expression.fullmatch(rest)), None)
    if part is None:
        return None
    if match[4] is not None:
        return TensorName(None, "", match[4], part)
    return TensorName(int(match[1]), match[2], match[3], part)
