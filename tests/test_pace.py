"""Python's switch interval while operations are active."""

import sys
from collections.abc import Iterator

import pytest

from toolgap.sglang.pace import Pace


@pytest.fixture(autouse=True)
def python_interval_s() -> Iterator[float]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield 0.005
    sys.setswitchinterval(before_s)


def test_it_is_short_while_operations_are_active_and_then_as_before() -> None:
    pace = Pace(0.0005)
    for _ in range(2):
        for active in (True, True):
            pace.quicken(active=active)
            assert sys.getswitchinterval() == pytest.approx(0.0005)
        for active in (False, False):
            pace.quicken(active=active)
            assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.parametrize("interval_s", [0.0, 0.1])
def test_it_is_left_alone_if_told_so_and_never_made_longer(interval_s: float) -> None:
    pace = Pace(interval_s)
    pace.quicken(active=True)
    assert sys.getswitchinterval() == pytest.approx(0.005)
    pace.quicken(active=False)
    assert sys.getswitchinterval() == pytest.approx(0.005)
