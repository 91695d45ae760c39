"""When a submit is tried again, with a clock and a chance of the tests' own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgap.retries import LONGEST_JITTER_S, SHORTEST_PAUSE_S, Retries


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pauses(
    clock: Clock, limit_s: float, after_s: float, jitter: float, attempt_s: float = 0.0
) -> list[float]:
    """Every pause until it gives up; each attempt takes its time."""
    retries = Retries(limit_s, clock, lambda: jitter)
    found: list[float] = []
    while True:
        clock.now_s += attempt_s
        pause_s = retries.pause_s(after_s)
        if pause_s is None:
            return found
        found.append(pause_s)
        clock.now_s += pause_s


def test_no_limit_no_retry(clock: Clock) -> None:
    assert pauses(clock, 0.0, 1.0, 0.0) == []


def test_it_waits_as_told_and_no_attempt_begins_at_or_after_the_limit(clock: Clock) -> None:
    assert pauses(clock, 10.0, 3.0, 0.0) == [3.0, 3.0, 3.0]
    assert pauses(clock, 9.0, 3.0, 0.0) == [3.0, 3.0]


def test_what_is_added_doubles_up_to_a_cap(clock: Clock) -> None:
    assert pauses(clock, 60.0, 1.0, 1.0)[:6] == [2.0, 3.0, 5.0, 9.0, 9.0, 9.0]
    assert pauses(clock, 60.0, 1.0, 0.5)[:4] == [1.5, 2.0, 3.0, 5.0]
    assert LONGEST_JITTER_S == 8.0


def test_what_is_added_never_makes_an_attempt_late(clock: Clock) -> None:
    assert pauses(clock, 4.0, 3.0, 0.5) == [3.5]
    assert pauses(clock, 4.0, 3.0, 1.0) == [4.0]


def test_a_longer_hint_is_heeded_at_once(clock: Clock) -> None:
    retries = Retries(100.0, clock, lambda: 1.0)
    assert retries.pause_s(0.5) == 1.0
    assert retries.pause_s(10.0) == 18.0
    assert retries.pause_s(0.5) == 8.5


def test_a_hint_of_nothing_is_still_a_pause(clock: Clock) -> None:
    assert pauses(clock, 0.35, 0.0, 0.0) == pytest.approx([SHORTEST_PAUSE_S] * 3)


def test_the_time_of_the_attempts_counts(clock: Clock) -> None:
    assert pauses(clock, 10.0, 1.0, 0.0, attempt_s=4.0) == [1.0]


@given(
    limit_s=st.floats(0, 100),
    after_s=st.floats(0, 20),
    jitter=st.floats(0, 1, exclude_max=True),
    attempt_s=st.floats(0, 5),
)
def test_it_ends_in_time_and_never_hurries(
    limit_s: float, after_s: float, jitter: float, attempt_s: float
) -> None:
    clock = Clock()
    found = pauses(clock, limit_s, after_s, jitter, attempt_s)
    least_s = max(after_s, SHORTEST_PAUSE_S)
    assert all(pause_s >= least_s for pause_s in found)
    assert len(found) <= limit_s / least_s + 1
    begun_s = sum(found) + attempt_s * len(found)
    assert not found or begun_s <= limit_s + 1e-6
