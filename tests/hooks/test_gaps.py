import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgap.hooks.gaps import Gaps, left_s


def test_nothing_is_expected_of_an_unknown_tool() -> None:
    gaps = Gaps({"build": 60.0})
    assert gaps.expected_s(["test"]) is None
    assert gaps.expected_s(["test", "build"]) is None
    assert gaps.expected_s([]) is None


def test_tools_side_by_side_take_as_long_as_the_longest() -> None:
    assert Gaps({"build": 60.0, "test": 5.0}).expected_s(["test", "build"]) == 60.0


def test_what_was_measured_is_expected_and_what_is_told_is_believed() -> None:
    gaps = Gaps({"build": 60.0})
    for seconds in (1.0, 2.0, 90.0):
        gaps.measured("test", seconds)
        gaps.measured("build", seconds)
    assert gaps.expected_s(["test"]) == 2.0
    assert gaps.expected_s(["build"]) == 60.0


@pytest.mark.parametrize(
    ("progress", "total", "expected"),
    [(1, 4, 6.0), (4, 4, 0.0), (0, 4, None), (1, None, None), (5, 4, None), (1, 0, None), (-1, 4, None)],
)
def test_progress_tells_what_is_left(progress: float, total: float | None, expected: float | None) -> None:
    assert left_s(2.0, progress, total) == expected


@given(st.floats(), st.floats(), st.one_of(st.none(), st.floats()))
def test_no_progress_breaks_it(elapsed_s: float, progress: float, total: float | None) -> None:
    remains_s = left_s(elapsed_s, progress, total)
    assert remains_s is None or not remains_s < 0
