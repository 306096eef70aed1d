"""`--adapter NAME=PATH`: what is accepted, and what each slip is told."""

from pathlib import Path

import pytest

from polygraft.errors import ConfigError
from polygraft.registry.options import parse_adapter_options


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and working folder with two adapters in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("one", "two words", "p=x"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_names_and_paths_are_split_at_the_first_equals_sign(here: Path) -> None:
    options = parse_adapter_options(["a=one", "b.2_c-d=two words", "e=p=x", "f=~/one", f"g={here}/one"], "base")
    assert [(option.name, str(option.path)) for option in options] == [
        ("a", "one"),
        ("b.2_c-d", "two words"),
        ("e", "p=x"),
        ("f", f"{here}/one"),
        ("g", f"{here}/one"),
    ]


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("a=one b=two", "is 'b' a second adapter"),
        ('[{"name":"a","path":"/p"}]', "JSON"),
        ('{"a": "/p"}', "JSON"),
        ("one", "no `=`"),
        ("", "no `=`"),
        ("a=", "path after `=` is missing"),
        ("=one", "name before `=` is missing"),
        ("a=one=x", "'one=x' does not exist"),
        ("a=/missing", "'/missing' does not exist"),
        ("a=~/missing", "/missing' does not exist"),
        ("A=one", "the name 'A'"),
        (" a=one", "the name ' a'"),
        ('["a=one', "JSON"),
        ("-a=one", "the name '-a'"),
        ("a/b=one", "the name 'a/b'"),
        ("a" * 65 + "=one", "up to 64"),
        ("base=one", "clashes with the base model 'Base'"),
        ("BASE=one", "clashes with the base model 'Base'"),
        ("base =one", "clashes with the base model 'Base'"),
    ],
)
def test_each_bad_form_names_the_piece_and_the_syntax(option: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_adapter_options([option], "Base")
    assert says in str(caught.value)
    assert repr(option) in str(caught.value)
    assert "NAME=PATH" in str(caught.value)


def test_a_name_may_be_given_once() -> None:
    with pytest.raises(ConfigError, match="'a' is given twice"):
        parse_adapter_options(["a=one", "a=p=x"], "base")


def test_every_bad_option_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_adapter_options(["a=", "b=one", "c=/missing"], "base")
    assert "'a='" in str(caught.value)
    assert "'c=/missing'" in str(caught.value)
    assert "b=one" not in str(caught.value)
