"""The table of architectures, and what one model's config.json says. Free of torch, so that any process may ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polygraft_adapters.types import PARENTS, ModuleShapes
from polygraft_engine.models.errors import ModelError, UnsupportedModel
from polygraft_engine.models.json_file import read_object, read_optional_object
from polygraft_engine.models.rope_spec import RopeSpec, read_rope

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table: what a Hugging Face class name means beyond the numbers in its config.

    A bias of None is decided by the config's `attention_bias` or `mlp_bias`.
    """

    name: str
    models: str
    """The families people know it by."""
    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    """Queries and keys are normalised per head before rope."""
    windows: str
    """Sliding-window attention: "none", "all" layers, or "some" as layer_types or max_window_layers say."""


ARCHITECTURES = {
    row.name: row
    for row in (
        Architecture("LlamaForCausalLM", "Llama 2, Llama 3, SmolLM2", None, None, None, False, "none"),
        Architecture("MistralForCausalLM", "Mistral", False, False, False, False, "all"),
        Architecture("Qwen2ForCausalLM", "Qwen2, Qwen2.5", True, False, False, False, "some"),
        Architecture("Qwen3ForCausalLM", "Qwen3", None, None, False, True, "some"),
    )
}


def supported_architectures() -> list[Architecture]:
    """Every architecture this engine computes, in the order of the table."""
    return list(ARCHITECTURES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Everything about a model but its numbers."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    """Rows of the embedding and of the head; token ids are below it."""
    eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    """Per layer: how many keys a query sees, itself included; None sees all."""
    tied: bool
    """The head is the embedding."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    """What the checkpoint is stored in: float32, bfloat16 or float16."""
    max_position: int

    def module_shapes(self, name: str) -> ModuleShapes:
        """What adapters may add to, for the base model called `name`."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }
        return ModuleShapes(
            layers=self.layers,
            shapes=shapes,
            base_model=name,
            biased=tuple(target for target in shapes if self.is_biased(target)),
            vocabulary=self.vocab,
            hidden=self.hidden,
            tied=self.tied,
        )

    def is_biased(self, target: str) -> bool:
        """Whether the modules `target` have a bias."""
        if PARENTS[target] == "mlp":
            return self.mlp_bias
        return self.o_bias if target == "o_proj" else self.qkv_bias


def read_spec(folder: Path) -> ModelSpec:
    """The ModelSpec of a Hugging Face folder, from config.json and generation_config.json.

    Raises ModelError for a broken file and UnsupportedModel, which names the field, for what is not computed here.
    """
    return parse_spec(read_object(folder / "config.json"), read_optional_object(folder / "generation_config.json"))


def parse_spec(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    """As read_spec, from the parsed files. Missing optional fields take transformers' defaults."""
    row = _architecture(config)
    _refuse_unsupported(config)
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    max_position = _integer(config, "max_position_embeddings")
    kv_heads = heads if config.get("num_key_value_heads") is None else _integer(config, "num_key_value_heads")
    head_dim = hidden // heads if config.get("head_dim") is None else _integer(config, "head_dim")
    if heads % kv_heads != 0:
        raise UnsupportedModel(f"{heads} query heads do not divide among {kv_heads} key/value heads")
    if head_dim % 2 != 0:
        raise UnsupportedModel(f"head_dim {head_dim} is odd, and rope pairs halves")
    layers = _integer(config, "num_hidden_layers")
    attention_bias, mlp_bias = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    return ModelSpec(
        architecture=row.name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_integer(config, "intermediate_size"),
        vocab=_integer(config, "vocab_size"),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(config, max_position),
        windows=_windows(config, row, layers),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if row.qkv_bias is None else row.qkv_bias,
        o_bias=attention_bias if row.o_bias is None else row.o_bias,
        mlp_bias=mlp_bias if row.mlp_bias is None else row.mlp_bias,
        qk_norm=row.qk_norm,
        eos_token_ids=_eos(generation if generation.get("eos_token_id") is not None else config),
        dtype=_dtype(config),
        max_position=max_position,
    )


def _architecture(config: Mapping[str, Any]) -> Architecture:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    row = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if row is None:
        known = ", ".join(f"{each.name} ({each.models})" for each in supported_architectures())
        raise UnsupportedModel(f"architecture {name!r} is not supported; supported are {known}")
    return row


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    quantisation = config.get("quantization_config")
    if quantisation is not None:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise UnsupportedModel(
            f"quantization_config ({method}) is not supported; serve the unquantised checkpoint instead"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; only silu is")


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def _windows(config: Mapping[str, Any], row: Architecture, layers: int) -> tuple[int | None, ...]:
    kinds = config.get("layer_types")
    if row.windows != "some":
        if kinds is not None and len(set(kinds)) > 1:
            raise UnsupportedModel(f"{row.name} with layer_types that differ from layer to layer is not supported")
        # Mistral 7B v0.1's width is transformers' default; null in the file means full attention.
        window = config.get("sliding_window", 4096) if row.windows == "all" else None
        return (window,) * layers
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    if kinds is None:
        full = config.get("max_window_layers", 28)
        return tuple(window if layer >= full else None for layer in range(layers))
    if len(kinds) != layers:
        raise ModelError(f"config.json: layer_types names {len(kinds)} layers of {layers}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(f"layer_types {', '.join(unknown)} are not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _eos(config: Mapping[str, Any]) -> tuple[int, ...]:
    found = config.get("eos_token_id")
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)


def _dtype(config: Mapping[str, Any]) -> str:
    name = config.get("dtype", config.get("torch_dtype"))
    name = "float32" if name is None else str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return name
