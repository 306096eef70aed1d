"""From a folder or a Hub id to a Decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from torch import Tensor

from polygraft_adapters import ModuleKey, describe_model_folder_problem
from polygraft_engine.lora import AdapterBanks, LayerBanks
from polygraft_engine.models.architecture import ModelSpec
from polygraft_engine.models.checkpoint import SHOWN, Checkpoint
from polygraft_engine.models.decoder import BaseModule, Decoder
from polygraft_engine.models.errors import ModelError, first_line
from polygraft_engine.models.packing import PackWeight
from polygraft_engine.models.rope import rope_table
from polygraft_engine.prepared import PROJECTIONS
from polygraft_kernels.api import Backend, DecoderLayer, LoraBank, LoraLinear

Progress = Callable[[int, int], None]
"""Called with (layers done, layers in all) while a model loads."""

HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def no_progress(done: int, total: int) -> None:
    """The Progress of those who do not watch."""


def resolve_model(model: str) -> Path:
    """The local folder of `model`: a path, or else a Hub id that is downloaded unless it is cached already.

    Raises ModelError that says what the path contains and what to do.
    """
    path = Path(model).expanduser()
    if path.exists():
        for describe in (describe_model_folder_problem, _folder_problem):
            problem = describe(path)
            if problem is not None:
                raise ModelError(problem)
        return path
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelError(f"{model} does not exist; give a model folder, or a Hub id like org/name")
    try:
        return Path(snapshot_download(model, allow_patterns=HUB_PATTERNS))
    except (OfflineModeIsEnabled, LocalEntryNotFoundError) as error:
        raise ModelError(
            f"{model} is neither a local folder nor in the Hub cache, and the Hub cannot be reached: "
            f"{first_line(error)}; give the path of a model folder"
        ) from None
    except (HFValidationError, HfHubHTTPError) as error:
        raise ModelError(f"{model} is no local folder, and the Hub does not serve it: {first_line(error)}") from None


def load_decoder(
    folder: Path,
    spec: ModelSpec,
    backend: Backend,
    dtype: torch.dtype,
    pack: PackWeight,
    banks: AdapterBanks,
    max_positions: int,
    on_progress: Progress = no_progress,
) -> Decoder:
    """Read and pack the weights layer by layer, so that never more than one layer is held twice.

    Raises ModelError when the files do not hold exactly this model.
    """
    with Checkpoint(folder, spec) as checkpoint, torch.no_grad():
        layers: list[DecoderLayer] = []
        modules: dict[ModuleKey, BaseModule] = {}
        on_progress(0, spec.layers)
        for index, layer_banks in enumerate(banks.layers):
            layers.append(_load_layer(checkpoint, spec, index, layer_banks, backend.device, dtype, pack, modules))
            on_progress(index + 1, spec.layers)
        embedding = checkpoint.take("model.embed_tokens.weight", dtype).to(backend.device, copy=True)
        head = pack(embedding if spec.tied else checkpoint.take("lm_head.weight", dtype), None)
        decoder = Decoder(
            spec=spec,
            backend=backend,
            dtype=dtype,
            embedding=embedding,
            layers=tuple(layers),
            norm=checkpoint.take("model.norm.weight", dtype).to(backend.device, copy=True),
            head=BaseModule(head.linear, 0, head.squares, None),
            modules=modules,
            rope=rope_table(spec.rope, spec.head_dim, max_positions).to(backend.device),
        )
        checkpoint.finish()
    return decoder


def _load_layer(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    index: int,
    banks: LayerBanks,
    device: torch.device,
    dtype: torch.dtype,
    pack: PackWeight,
    modules: dict[ModuleKey, BaseModule],
) -> DecoderLayer:
    """The layer; adds what adapters need to know of it to `modules`."""
    prefix = f"model.layers.{index}"

    def vector(name: str) -> Tensor:
        # a copy, so that no memory-mapped page outlives the file
        return checkpoint.take(f"{prefix}.{name}.weight", dtype).to(device, copy=True)

    def linear(projection: str, bank: LoraBank) -> LoraLinear:
        keys = [ModuleKey(index, target) for target in PROJECTIONS[projection]]
        weights = [checkpoint.take(f"{key.path}.weight", dtype) for key in keys]
        biases = [checkpoint.take(f"{key.path}.bias", dtype) for key in keys if spec.is_biased(key.target)]
        packed = pack(torch.cat(weights), torch.cat(biases) if biases else None)
        widths = [len(weight) for weight in weights]
        squares = torch.split(packed.squares, widths)
        for position, key in enumerate(keys):
            bias = biases[position].to(device, torch.float32, copy=True) if biases else None
            modules[key] = BaseModule(packed.linear, sum(widths[:position]), squares[position], bias)
        return LoraLinear(packed.linear, bank)

    return DecoderLayer(
        input_norm=vector("input_layernorm"),
        qkv=linear("qkv", banks.qkv),
        q_norm=vector("self_attn.q_norm") if spec.qk_norm else None,
        k_norm=vector("self_attn.k_norm") if spec.qk_norm else None,
        o=linear("o", banks.o),
        post_norm=vector("post_attention_layernorm"),
        gate_up=linear("gate_up", banks.gate_up),
        down=linear("down", banks.down),
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        eps=spec.eps,
        window=spec.windows[index],
    )


def _folder_problem(path: Path) -> str | None:
    """Why `path` is no model folder, with what it is instead; None when it looks like one."""
    if path.is_file():
        return f"{path} is a file; give the folder that holds config.json and the weights"
    if (path / "config.json").is_file():
        return None
    inner = sorted(config.parent.name for config in path.glob("*/config.json"))
    if inner:
        return f"{path} has no config.json, but its folders {', '.join(inner[:SHOWN])} do; give one of them"
    present = sorted(entry.name for entry in path.iterdir())
    what = f"it contains {', '.join(present[:SHOWN])}" if present else "it is empty"
    return f"{path} has no config.json, so it is no Hugging Face model folder; {what}"
