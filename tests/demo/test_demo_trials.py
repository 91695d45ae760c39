import pytest
from demo_trials import ALIGNED, good_trials, restore, trial

from toolgap.demo.trials import INVARIANTS, Arm, Invariant, Spread, check, order, summarize
from toolgap.protocol import Reason, State


def test_good_trials_hold_every_invariant() -> None:
    assert check(good_trials()) == []


def test_every_invariant_is_explained() -> None:
    assert set(INVARIANTS) == set(Invariant)


@pytest.mark.parametrize("cached", [(16, 0, 0), (0, 16, 0), (0, 0, 16)])
def test_recompute_must_find_nothing(cached: tuple[int, int, int]) -> None:
    (failure,) = check([trial(Arm.RECOMPUTE, 2, cached=cached)])
    assert (failure.invariant, failure.trial) == (Invariant.NOTHING_CACHED, 2)
    assert str(failure).startswith("recompute_finds_nothing (trial 2): device")


@pytest.mark.parametrize("cached", [(0, 0, 0), (0, 0, ALIGNED - 16), (0, 0, ALIGNED + 16)])
def test_restore_on_request_must_read_every_aligned_page(cached: tuple[int, int, int]) -> None:
    (failure,) = check([trial(Arm.ON_REQUEST, cached=cached)])
    assert failure.invariant is Invariant.FROM_STORAGE


def test_a_prefix_that_stayed_resident_is_no_restore_on_request() -> None:
    failures = check([trial(Arm.ON_REQUEST, cached=(0, 512, ALIGNED - 512))])
    assert [failure.invariant for failure in failures] == [Invariant.EVICTED, Invariant.FROM_STORAGE]


@pytest.mark.parametrize(
    "cached", [(16, ALIGNED - 16, 0), (0, ALIGNED - 16, 16), (0, ALIGNED, 16), (0, 0, 0)]
)
def test_restore_ahead_must_be_served_from_host(cached: tuple[int, int, int]) -> None:
    (failure,) = check([trial(Arm.AHEAD, cached=cached)])
    assert failure.invariant is Invariant.FROM_HOST


@pytest.mark.parametrize("state", [state for state in State if state is not State.RESTORED])
def test_restore_ahead_must_have_restored(state: State) -> None:
    operation = restore(state=state, reason=Reason.STORAGE_SHORTFALL if state.terminal else None)
    (failure,) = check([trial(Arm.AHEAD, operation=operation)])
    assert failure.invariant is Invariant.RESTORED
    assert str(state) in failure.seen


def test_restore_ahead_must_start_from_an_evicted_prefix() -> None:
    (failure,) = check([trial(Arm.AHEAD, operation=restore(resident_tokens=64))])
    assert failure.invariant is Invariant.EVICTED


def test_outputs_are_compared_within_a_trial() -> None:
    trials = [trial(arm, number, output_ids=[number]) for number in (1, 2) for arm in Arm]
    assert check(trials) == []
    (failure,) = check([*trials, trial(Arm.AHEAD, 2, output_ids=[1])])
    assert (failure.invariant, failure.trial) == (Invariant.SAME_OUTPUT, 2)


def test_summaries() -> None:
    trials = [trial(Arm.AHEAD, number, ttft_s=ttft_s) for number, ttft_s in enumerate((0.3, 0.1, 0.2), 1)]
    trials += [trial(Arm.RECOMPUTE, number) for number in (1, 2, 3)]
    trials.append(trial(Arm.ON_REQUEST, 1, output_ids=[9], cached=(0, 0, 16)))
    trials.append(trial(Arm.ON_REQUEST, 2))
    by_arm = {summary.arm: summary for summary in summarize(trials)}
    assert by_arm[Arm.AHEAD].ttft_s == Spread(0.2, 0.1, 0.3)
    assert by_arm[Arm.AHEAD].restore_s == Spread(0.18, 0.18, 0.18)
    assert by_arm[Arm.ON_REQUEST].storage_tokens == (16, ALIGNED)
    assert by_arm[Arm.ON_REQUEST].restore_s is None
    assert [by_arm[arm].same_output for arm in Arm] == [True, False, True]
    assert [by_arm[arm].trials for arm in Arm] == [3, 2, 3]


def test_arms_take_turns_in_going_first() -> None:
    assert [order(number)[0] for number in (1, 2, 3, 4)] == ["A", "B", "C", "A"]
    assert all(sorted(order(number)) == ["A", "B", "C"] for number in range(1, 7))
