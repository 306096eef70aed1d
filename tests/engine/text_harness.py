"""Small real tokenizers of both families."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "your own fox is quick, isn't it? 你好，世界 你好",
    "naïve café résumé: 12345 aaab aab abc",
]
WORDS = ["▁", "▁▁", "▁the", "▁quick", "▁fo", "x", "ab", "a", "b", "c", ".", "你", "é", "\n"]


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE with a special token and an added one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("｜x▁y｜"), AddedToken("<é>")])
    return tokenizer


@cache
def byte_fallback(strip: int = 1) -> Tokenizer:
    """SentencePiece's kind as Llama 2 and Mistral have it; `strip` as with and without add_prefix_space."""
    tokenizer = _pieces()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)] if strip else steps)
    return tokenizer


@cache
def metaspace(scheme: str = "always") -> Tokenizer:
    """SentencePiece's kind with the space's stand-in dropped from the first token."""
    tokenizer = _pieces()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace("▁", scheme)])
    return tokenizer


def _pieces() -> Tokenizer:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {name: id for id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens(["<tool>", "▁<added>"])
    return tokenizer


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One token per byte, as a model may choose to write any text."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return [tokenizer.token_to_id(_ALPHABET[byte]) for byte in raw]
    return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in raw]


def ids(tokenizer: Tokenizer, *names: str) -> list[int]:
    """Token ids by their spelling in the vocabulary."""
    found = [tokenizer.token_to_id(name) for name in names]
    assert None not in found, names
    return found


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_ALPHABET = {**{byte: chr(byte) for byte in _PRINTABLE}, **{byte: chr(256 + n) for n, byte in enumerate(_OTHERS)}}
