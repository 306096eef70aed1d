"""The comparisons' command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.peers.errors import PeerError
from benchmarks.peers.loads import Load, select
from benchmarks.peers.options import Options, parse, peer_dtype

LOADS = (Load("base-1", 1), Load("base-16", 16), Load("zipf64-16", 16, adapters=64, popularity="zipf"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def parsed(model: Path, *arguments: str) -> Options:
    return parse("What it does.", LOADS, ["--model", str(model), *arguments])


def test_by_default_all_loads_run_in_three_rounds(model: Path) -> None:
    found = parsed(model)
    assert (found.loads, found.rounds, found.per_stream, found.json) == (LOADS, 3, 4, False)


def test_quick_is_one_round_of_one_request_a_stream_unless_told_otherwise(model: Path) -> None:
    assert parsed(model, "--quick").rounds == 1
    assert parsed(model, "--quick").per_stream == 1
    assert parsed(model, "--quick", "--rounds", "2").rounds == 2
    assert parsed(model, "--quick", "--requests", "3").per_stream == 3


def test_named_loads_keep_their_order(model: Path) -> None:
    assert [load.name for load in parsed(model, "--loads", "base-16, base-1").loads] == ["base-1", "base-16"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--loads", "base-1,base-2"], "unknown load: base-2"),
        (["--loads", ","], "none named"),
        (["--rounds", "0"], "at least 1"),
        (["--requests", "0"], "at least 1"),
        (["--peer-dtype", "int4"], "invalid choice"),
    ],
)
def test_what_makes_no_sense_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(model, *arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(tmp_path)
    assert "holds no model" in capsys.readouterr().err


def test_a_peer_takes_bfloat16_only_where_its_products_are_fast() -> None:
    assert peer_dtype("auto", {"avx2", "avx512f"}) == "bfloat16"
    assert peer_dtype("auto", {"avx2"}) == "float32"
    assert peer_dtype("bfloat16", {"avx2"}) == "bfloat16"


def test_a_load_asks_for_the_base_or_its_first_adapters() -> None:
    assert LOADS[0].models("base", ["a", "b"]) == ("base",)
    assert Load("two", 8, adapters=2).models("base", ["a", "b", "c"]) == ("a", "b")
    with pytest.raises(PeerError, match="zipf64-16 wants 64 adapters, there are 1"):
        LOADS[2].models("base", ["a"])


def test_requests_grow_with_the_streams_but_are_never_few() -> None:
    assert [load.requests(4) for load in LOADS] == [4, 64, 64]
    assert LOADS[0].requests(1) == 4


def test_selecting_nothing_in_particular_is_all() -> None:
    assert select(LOADS, None) == LOADS
