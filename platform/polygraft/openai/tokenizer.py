"""Text to token ids and back, as the gateway needs it: the `tokenizers` library alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path

from tokenizers import Tokenizer

from polygraft_engine.text import token_bytes

_INLINE_CHARS = 8192
"""Longer texts are encoded in a thread, so that one prompt does not hold up everybody's streams."""
_INLINE_TOKENS = 2048
"""As many tokens, the other way."""


class ModelTokenizer:
    """One model's tokenizer.json; `threads` are for what takes long."""

    def __init__(self, path: Path, threads: Executor) -> None:
        self._threads = threads
        self._tokenizer = Tokenizer.from_file(str(path))
        # A file saved by a training run may say to cut or pad; a server must do neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.tokens = token_bytes(self._tokenizer)
        """What single tokens stand for."""
        self.longest_token = max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)
        """Upper bound of the bytes of text that one token stands for."""

    async def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Token ids of `text`; `special` adds what the tokenizer adds around raw text (BOS where the model has one)."""
        if len(text) <= _INLINE_CHARS:
            return self._encode(text, special)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode, text, special)

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        # The batch call is the one that lets other threads run meanwhile.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return tuple(encoding.ids)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        if len(ids) <= _INLINE_TOKENS:
            return self._decode(ids)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, ids)

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text
