"""One load on transformers' `generate`, in batches; run as a program, prints one JSON object.

`python -m peers.transformers_load MODEL --streams 16 --requests 64 --seed 0 --dtype bfloat16 [--adapter FOLDER ...]`:
row i of a batch runs on adapter i modulo their number, the base without any.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from polygraft.bench.prompts import PromptSource
from polygraft.bench.run import SAMPLE_WORDS

from .loads import OUTPUT_TOKENS, PROMPT_TOKENS


def load_model(folder: Path, adapters: list[Path], dtype: torch.dtype) -> Any:
    """In `dtype`, with all adapters, or as it is without any."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    if not adapters:
        return model
    wrapped = PeftModel.from_pretrained(model, adapters[0], adapter_name="0", autocast_adapter_dtype=False)
    for number, adapter in enumerate(adapters[1:], 1):
        wrapped.load_adapter(adapter, adapter_name=str(number), autocast_adapter_dtype=False)
    return wrapped.eval()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--adapter", type=Path, action="append", default=[])
    chosen = parser.parse_args()

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(chosen.model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = load_model(chosen.model, chosen.adapter, getattr(torch, chosen.dtype))
    # As the load client does it for servers.
    sample = PromptSource(chosen.seed, SAMPLE_WORDS).prompt(-1)
    words = max(4, round(PROMPT_TOKENS * SAMPLE_WORDS / len(tokenizer(sample).input_ids)))
    prompts = PromptSource(chosen.seed, words)

    @torch.inference_mode()
    def batch(first: int, rows: int, tokens: int) -> int:
        """Greedy, and as many tokens as wanted whatever they are; how many prompt tokens there were."""
        inputs = tokenizer([prompts.prompt(first + row) for row in range(rows)], return_tensors="pt", padding=True)
        mixed = {"adapter_names": [str(row % len(chosen.adapter)) for row in range(rows)]} if chosen.adapter else {}
        made = model.generate(
            **inputs,
            **mixed,
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        if made.shape[1] != inputs.input_ids.shape[1] + tokens:
            raise SystemExit(f"generate made {made.shape[1] - inputs.input_ids.shape[1]} tokens instead of {tokens}")
        return int(inputs.attention_mask.sum())

    batch(chosen.requests, chosen.streams, 8)
    began = time.perf_counter()
    counts = [
        batch(first, min(chosen.streams, chosen.requests - first), OUTPUT_TOKENS)
        for first in range(0, chosen.requests, chosen.streams)
    ]
    seconds = time.perf_counter() - began
    rate = chosen.requests * OUTPUT_TOKENS / seconds
    print(json.dumps({"tokens_per_second": rate, "requests": chosen.requests, "prompt_tokens": sum(counts)}))


if __name__ == "__main__":
    main()
