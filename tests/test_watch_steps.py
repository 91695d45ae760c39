"""The clock that runs only while the scheduler takes its steps."""

import pytest

from toolgap.sglang.watch import Watch


def test_a_step_counts_for_what_it_took_and_a_long_one_for_a_part() -> None:
    watch = Watch(100.0)
    watch.step(100.1, paused=False)
    assert watch.elapsed_s == pytest.approx(0.1)
    watch.step(160.0, paused=False)
    assert watch.elapsed_s == pytest.approx(0.35)


def test_it_stands_still_during_a_pause_and_goes_on_after_it() -> None:
    watch = Watch(100.0)
    watch.step(100.1, paused=True)
    watch.step(100.2, paused=True)
    assert watch.elapsed_s == 0.0
    watch.step(100.3, paused=False)
    assert watch.elapsed_s == pytest.approx(0.1)
