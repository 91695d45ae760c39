import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgap.store.hits import ALL_PAGES, TRAILING_PAGES, ends_with

HELD = st.lists(st.booleans(), max_size=12)


@given(HELD)
def test_all_pages_allow_every_prefix_without_a_gap(held: list[bool]) -> None:
    expected = {end for end in range(1, len(held) + 1) if all(held[:end])}
    assert ends_with(ALL_PAGES, held, 0) == expected


@given(HELD, st.integers(0, 14))
def test_trailing_pages_allow_prefixes_whose_end_is_held(held: list[bool], window_pages: int) -> None:
    window = max(1, window_pages)
    expected = {end for end in range(1, len(held) + 1) if all(held[max(0, end - window) : end])}
    assert ends_with(TRAILING_PAGES, held, window_pages) == expected


def test_another_policy_is_told() -> None:
    with pytest.raises(ValueError, match="block_groups"):
        ends_with("block_groups", [True], 1)
