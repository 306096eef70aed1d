"""Decode steps of llama.cpp; run as a program in its own environment, prints one JSON object.

`python llamacpp_decode.py MODEL.gguf --streams 16 --prompt 126 --tokens 64 ... [--adapter LORA.gguf]`: only
`llama_decode` is timed, sampling is not; the tokens are random.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import time
from collections.abc import Sequence

import llama_cpp  # type: ignore[import-not-found]  # it lies in another environment

UBATCH = 512


class Decoder:
    """One context with a sequence for each stream."""

    def __init__(self, model: str, adapter: str | None, streams: int, tokens: int, threads: int) -> None:
        """Raises SystemExit where llama.cpp refuses a file."""
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {model}")
        params = llama_cpp.llama_context_default_params()
        # Each stream's share of the context is a multiple of 256.
        params.n_ctx = streams * (-(-tokens // 256) * 256)
        params.n_batch = params.n_ubatch = UBATCH
        params.n_seq_max = streams
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit("llama.cpp makes no context")
        if adapter is not None:
            lora = llama_cpp.llama_adapter_lora_init(self._model, adapter.encode())
            if not lora:
                raise SystemExit(f"llama.cpp does not load {adapter}")
            loras = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(lora)
            scales = (ctypes.c_float * 1)(1.0)
            if llama_cpp.llama_set_adapters_lora(self._context, loras, 1, scales) != 0:
                raise SystemExit("llama.cpp does not set the adapter")
        self._batch = llama_cpp.llama_batch_init(UBATCH, 0, 1)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def forget(self) -> None:
        """Every stream starts again."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> float:
        """(stream, position, token, whether logits are wanted) of at most UBATCH rows; the seconds that it took."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (stream, position, token, logits) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = stream
            batch.logits[index] = logits
        began = time.perf_counter()
        code = llama_cpp.llama_decode(self._context, batch)
        llama_cpp.llama_synchronize(self._context)
        took = time.perf_counter() - began
        if code != 0:
            raise SystemExit(f"llama_decode gave {code}")
        return took


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--adapter")
    chosen = parser.parse_args()

    decoder = Decoder(chosen.model, chosen.adapter, chosen.streams, chosen.prompt + chosen.tokens, chosen.threads)
    draw = random.Random(chosen.seed)
    seconds = 0.0
    for _ in range(chosen.repeats):
        decoder.forget()
        for stream in range(chosen.streams):
            prompt = [draw.randrange(3, decoder.vocab) for _ in range(chosen.prompt)]
            rows = [(stream, at, token, at == chosen.prompt - 1) for at, token in enumerate(prompt)]
            for first in range(0, chosen.prompt, UBATCH):
                decoder.decode(rows[first : first + UBATCH])
        for at in range(chosen.prompt, chosen.prompt + chosen.tokens):
            seconds += decoder.decode(
                [(stream, at, draw.randrange(3, decoder.vocab), True) for stream in range(chosen.streams)]
            )
    steps = chosen.repeats * chosen.tokens
    print(json.dumps({"tokens_per_second": chosen.streams * steps / seconds, "steps": steps}))


if __name__ == "__main__":
    main()
