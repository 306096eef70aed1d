"""The tokenizer and chat template of a model folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer

from polygraft_engine.models.errors import ModelError, first_line
from polygraft_engine.models.json_file import read_optional_object

# `transformers` resolves its names when they are used, so importing it here costs no model code.


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """All that a process without transformers needs in order to tokenize and to render chats."""

    tokenizer_json: str
    """The contents of a tokenizer.json, converted from a slow tokenizer where the folder has none."""
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    """Jinja source."""

    def tokenizer(self) -> Tokenizer:
        """A ready Tokenizer; never truncates or pads, whatever the file asks for."""
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer


def load_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read a model folder's tokenizer. Raises ModelError when there is none that can be read."""
    config = read_optional_object(folder / "tokenizer_config.json")
    return TokenizerFiles(
        tokenizer_json=_tokenizer_json(folder),
        bos_token=_token(config.get("bos_token")),
        eos_token=_token(config.get("eos_token")),
        chat_template=_chat_template(folder, config),
    )


def _tokenizer_json(folder: Path) -> str:
    fast = folder / "tokenizer.json"
    if fast.is_file():
        text = fast.read_text(encoding="utf-8")
        try:
            Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelError(f"{fast} is no tokenizer: {error}") from None
        return text
    try:
        slow = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return str(slow.backend_tokenizer.to_str())
    except Exception as error:  # every tokenizer class fails in its own way
        why = first_line(error)
        raise ModelError(f"{folder} has no tokenizer.json, and no tokenizer that can be converted: {why}") from None


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json; of several named templates, `default` is meant."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _token(found: object) -> str | None:
    """Special tokens are stored as text or as an AddedToken object."""
    if isinstance(found, dict):
        found = found.get("content")
    return found if isinstance(found, str) else None
