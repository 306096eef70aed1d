"""Options over the environment over defaults, and what a child process is told."""

from pathlib import Path

import pytest

from polygraft import settings
from polygraft.errors import ConfigError
from polygraft.settings import Settings, parse_size


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"POLYGRAFT_{name.upper()}", raising=False)


def test_options_come_before_the_environment_and_that_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYGRAFT_PORT", "1")
    monkeypatch.setenv("POLYGRAFT_WORKERS", "2")
    found = settings.load(port=3, workers=None)
    assert (found.port, found.workers, found.metrics_port) == (3, 2, 8001)


def test_zero_and_false_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYGRAFT_SEED", "5")
    monkeypatch.setenv("POLYGRAFT_ENABLE_PREFIX_CACHING", "true")
    found = settings.load(seed=0, enable_prefix_caching=False, drain_timeout=0.0)
    assert (found.seed, found.enable_prefix_caching, found.drain_timeout) == (0, False, 0.0)


def test_a_child_process_reads_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings.load(
        model="m", adapter=("a=/p,q", "b=/r"), kv_cache_memory="1.5GiB", data_dir=Path("x y"), seed=0,
        enable_prefix_caching=False, redis_url="unix:///s", bootstrap_tenant_key="k",
    )  # fmt: skip
    for name, value in given.environment().items():
        monkeypatch.setenv(name, value)
    assert settings.load() == given


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", ()), ("a=/p", ("a=/p",)), ("a=/p,b=/q", ("a=/p", "b=/q")), ('["a=/p,x"]', ("a=/p,x",))],
)
def test_lists_in_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, expected: tuple[str, ...]) -> None:
    monkeypatch.setenv("POLYGRAFT_ADAPTER", value)
    assert settings.load().adapter == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("2GiB", 2**31), ("512MiB", 2**29), ("1.5gb", 1_500_000_000), ("1000", 1000), (7, 7)]
)
def test_sizes(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_cache_memory": "2 gigs"}, "--kv-cache-memory 2 gigs: '2 gigs' is no size; write it like 2GiB"),
        ({"port": -1}, "--port -1: "),
        ({"threads": 0, "workers": 0}, "--threads 0: .*; --workers 0: "),
        ({"max_cpu_loras": 3, "max_loras": 5}, "--max-cpu-loras 3 .* --max-loras 5"),
        ({"auth": "none", "host": "0.0.0.0"}, "--host 0.0.0.0"),
    ],
)
def test_what_cannot_be_names_the_option_and_the_value(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings.load(**options)
