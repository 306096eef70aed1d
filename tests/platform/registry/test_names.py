"""What a client may write as a model's name."""

import pytest

from polygraft.registry.names import AdapterName, is_alias, parse_adapter_name, without_version


@pytest.mark.parametrize(
    ("text", "owner", "adapter", "version", "alias"),
    [
        ("pirate", None, "pirate", None, None),
        ("pirate@v3", None, "pirate", 3, None),
        ("pirate@prod", None, "pirate", None, "prod"),
        ("pirate@very", None, "pirate", None, "very"),
        ("acme/pirate", "acme", "pirate", None, None),
        ("Acme.Inc/pirate@v12", "Acme.Inc", "pirate", 12, None),
        ("acme/pirate@prod", "acme", "pirate", None, "prod"),
    ],
)
def test_parts(text: str, owner: str | None, adapter: str, version: int | None, alias: str | None) -> None:
    assert parse_adapter_name(text) == AdapterName(owner, adapter, version, alias)


@pytest.mark.parametrize(
    "text",
    ["", "Pirate", "pirate@", "pirate@v0", "pirate@v01", "pirate@V1", "pirate@v9999999999", "a@b@c", "/pirate", "a/b/c",
     "acme/", "pirate\n", "pirate\0", "piraté", "größe/pirate", "a b/pirate", "x" * 65],
)  # fmt: skip
def test_what_is_no_adapter_s_name(text: str) -> None:
    assert parse_adapter_name(text) is None


def test_an_alias_never_looks_like_a_version() -> None:
    assert [name for name in ("prod", "v", "v1", "v01", "v1b", "3", "P", "") if is_alias(name)] == [
        "prod",
        "v",
        "v1b",
        "3",
    ]


def test_allow_lists_have_names_without_versions() -> None:
    assert [without_version(name) for name in ("a", "a@v1", "o/a@prod")] == ["a", "a", "o/a"]
