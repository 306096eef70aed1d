"""A folder's tokenizer, template and special tokens, gathered for processes without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from polygraft_engine.models.errors import ModelError
from polygraft_engine.models.tokenizer import load_tokenizer_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=5)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_fast_tokenizer_never_cuts_or_pads(folder: Path) -> None:
    files = load_tokenizer_files(folder)
    assert files.tokenizer().encode("a b a b").ids == [1, 2, 1, 2]
    assert (files.bos_token, files.eos_token, files.chat_template) == (None, None, None)


def test_special_tokens_are_read_in_both_spellings(folder: Path) -> None:
    configure(folder, bos_token="<s>", eos_token={"content": "</s>", "lstrip": False})
    files = load_tokenizer_files(folder)
    assert (files.bos_token, files.eos_token) == ("<s>", "</s>")


def test_the_template_file_wins(folder: Path) -> None:
    configure(folder, chat_template="from the config")
    assert load_tokenizer_files(folder).chat_template == "from the config"
    (folder / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer_files(folder).chat_template == "from the file"


def test_of_several_templates_the_default_is_meant(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    configure(folder, chat_template=named)
    assert load_tokenizer_files(folder).chat_template == "plain"
    configure(folder, chat_template=named[:1])
    assert load_tokenizer_files(folder).chat_template is None


def test_a_slow_tokenizer_is_converted(tmp_path: Path) -> None:
    # a byte-pair tokenizer as its slow class stores it
    words = ["<|endoftext|>", "h", "i", "hi"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: index for index, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
    configure(tmp_path, tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>", unk_token="<|endoftext|>")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    files = load_tokenizer_files(tmp_path)
    assert files.tokenizer().encode("hi").ids == [3]
    assert files.eos_token == "<|endoftext|>"


def test_a_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer_files(tmp_path)


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer_files(tmp_path)
