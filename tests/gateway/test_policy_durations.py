import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolgap.gateway.durations import LEAST_S, MAX_KINDS, MEMORY, MOST_S, RATIO, Durations, Sketch, kind_of

SECONDS = st.floats(LEAST_S, MOST_S)


@given(st.lists(SECONDS, min_size=1, max_size=MEMORY), st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_a_quantile_is_exact_to_a_bucket(durations: list[float], share: float) -> None:
    sketch = Sketch()
    for seconds in durations:
        sketch.add(seconds)
    exact = sorted(durations)[max(0, -int(-share * len(durations) // 1) - 1)]
    found = sketch.quantile(share)
    assert found is not None
    assert exact / RATIO**0.001 <= found <= exact * RATIO**1.001


@given(st.lists(SECONDS, min_size=1), SECONDS)
def test_what_a_gap_lasts_already_is_behind_it(durations: list[float], over_s: float) -> None:
    sketch = Sketch()
    for seconds in durations:
        sketch.add(seconds)
    found = sketch.quantile(0.1, over_s)
    assert found is None or found > over_s


def test_a_change_is_learned() -> None:
    sketch = Sketch()
    for seconds in [1.0] * 10_000 + [100.0] * 600:
        sketch.add(seconds)
    assert sketch.quantile(0.5) == pytest.approx(100.0, rel=RATIO - 1)
    assert sketch.total <= MEMORY


def test_kinds_that_are_not_known_yet_are_like_all_and_their_number_is_bounded() -> None:
    durations = Durations()
    assert durations.quantile("a", 0.5) is None
    for _ in range(4):
        durations.add("a", 10.0)
    assert durations.quantile("b", 0.5) == pytest.approx(10.0, rel=RATIO - 1)
    for number in range(MAX_KINDS + 5):
        durations.add(str(number), 1.0)
    assert len(durations._of_kind) == MAX_KINDS


def test_tools_side_by_side_are_a_kind_of_their_own() -> None:
    assert kind_of(["b", "a", "b"]) == "a+b"
