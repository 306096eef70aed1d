"""The model and an adapter as llama.cpp reads them: GGUF files with the same bfloat16 weights, no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

from polygraft_adapters import ModuleKey
from polygraft_engine.models.architecture import ModelSpec, read_spec

from .errors import PeerError

_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}


def write_model(folder: Path, out: Path) -> None:
    """A Llama model. Raises PeerError for another architecture."""
    spec = read_spec(folder)
    if spec.architecture != "LlamaForCausalLM":
        raise PeerError(f"only Llama models are converted for llama.cpp, {folder} is a {spec.architecture}")
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(spec.max_position)
    writer.add_embedding_length(spec.hidden)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.intermediate)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_layer_norm_rms_eps(spec.eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in _model_tensors(spec, tensors):
        _add(writer, name, tensor)
    _finish(writer)


def write_adapter(model: Path, folder: Path, out: Path) -> None:
    """A PEFT folder over a Llama model's seven modules."""
    spec = read_spec(model)
    tensors = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(config["lora_alpha"]))
    for layer in range(spec.layers):
        for module, short in _MODULES.items():
            path = f"base_model.model.{ModuleKey(layer, module.split('.')[1]).path}"
            a, b = tensors[f"{path}.lora_A.weight"], tensors[f"{path}.lora_B.weight"]
            _add(writer, f"blk.{layer}.{short}.weight.lora_a", a)
            _add(writer, f"blk.{layer}.{short}.weight.lora_b", _turned(spec, short, b))
    _finish(writer)


def _model_tensors(spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield "token_embd.weight", tensors["model.embed_tokens.weight"]
    yield "output_norm.weight", tensors["model.norm.weight"].float()
    if not spec.tied:
        yield "output.weight", tensors["lm_head.weight"]
    for layer in range(spec.layers):
        path = f"model.layers.{layer}"
        for norm, short in _NORMS.items():
            yield f"blk.{layer}.{short}.weight", tensors[f"{path}.{norm}.weight"].float()
        for module, short in _MODULES.items():
            yield f"blk.{layer}.{short}.weight", _turned(spec, short, tensors[f"{path}.{module}.weight"])


def _turned(spec: ModelSpec, short: str, weight: torch.Tensor) -> torch.Tensor:
    """Rows of q and k in ggml's order: it rotates neighbours, Hugging Face's Llama a head's two halves."""
    if short not in ("attn_q", "attn_k"):
        return weight
    heads = spec.heads if short == "attn_q" else spec.kv_heads
    return weight.reshape(heads, 2, spec.head_dim // 2, -1).transpose(1, 2).reshape(weight.shape)


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    """numpy knows no bfloat16: its bytes are handed over."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bfloat16:
        writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, tensor.float().numpy())


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
