"""Prefix keys: equal for equal identities, and for nothing else."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from polygraft_engine.kv.hashing import block_key, root_key

NAMES = st.text(max_size=4)
TOKENS = st.lists(st.integers(0, 300), max_size=6).map(tuple)


def test_equal_fields_give_equal_keys() -> None:
    assert root_key("tenant", "digest") == root_key("tenant", "digest")
    assert block_key(root_key("t", None), (1, 2)) == block_key(root_key("t", None), [1, 2])


def test_fields_do_not_run_into_each_other() -> None:
    roots = [root_key("ab", "c"), root_key("a", "bc"), root_key("", "abc"), root_key("abc", ""), root_key("abc", None)]
    assert all(one != other for one, other in combinations(roots, 2))


def test_the_base_model_is_not_an_adapter_without_a_name() -> None:
    assert root_key("t", None) != root_key("t", "")


def test_a_key_stands_for_the_whole_prefix() -> None:
    root = root_key("", None)
    first, other = block_key(root, (1, 2)), block_key(root, (1, 3))
    assert block_key(first, (4, 5)) != block_key(other, (4, 5))
    assert block_key(first, (4, 5)) != block_key(first, (4, 5, 0))


def test_tokens_are_fields_of_their_own() -> None:
    assert block_key(b"", (1, 256)) != block_key(b"", (256, 1))
    assert block_key(b"", (1,)) != block_key(b"", (1, 0))


@given(a=st.tuples(NAMES, st.none() | NAMES, TOKENS, TOKENS), b=st.tuples(NAMES, st.none() | NAMES, TOKENS, TOKENS))
def test_different_identities_have_different_keys(
    a: tuple[str, str | None, tuple[int, ...], tuple[int, ...]],
    b: tuple[str, str | None, tuple[int, ...], tuple[int, ...]],
) -> None:
    keys = [block_key(block_key(root_key(name, adapter), first), second) for name, adapter, first, second in (a, b)]
    assert (keys[0] == keys[1]) == (a == b)
