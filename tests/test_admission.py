"""Admission: how many operations at once, how much of host memory, and whether a restore is worth it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolgap.admission import (
    OPTIMISM_HALF_LIFE_S,
    Awaited,
    Budget,
    PrefillCost,
    Rates,
    RestoreCost,
    Wanted,
    check_awaited,
    check_budget,
    check_worthwhile,
    estimate,
    piece_tokens,
    retry_after_s,
)
from toolgap.protocol import Code, Error, Estimate, Refused

BUDGET = Budget(max_operations=2, operation_tokens=1000, host_tokens=1000)


def refusal(budget: Budget = BUDGET, **wanted: Any) -> Error | None:
    """What a caller is told; None if the operation fits."""
    arguments = {"active_operations": 0, "active_tokens": 0, "wanted_tokens": 0, "retry_after_s": 0.5}
    try:
        check_budget(budget, **arguments | wanted)
    except Refused as refused:
        error = refused.error
    else:
        return None
    assert Refused(error.code, "").status == 429
    return error


def code(**wanted: Any) -> Code | None:
    error = refusal(**wanted)
    return None if error is None else error.code


@pytest.mark.parametrize(
    ("active_operations", "active_tokens", "wanted_tokens", "expected"),
    [
        (0, 0, 0, None),
        (0, 0, 1, None),
        (0, 0, 1000, None),
        (0, 0, 1001, Code.PREFIX_TOO_LARGE),
        (1, 0, 1000, None),
        (1, 1, 1000, Code.HOST_BUDGET),
        (1, 1, 999, None),
        (1, 1000, 1, Code.HOST_BUDGET),
        (1, 1000, 0, None),
        (2, 0, 0, Code.TOO_MANY_OPERATIONS),
        (2, 1000, 1, Code.TOO_MANY_OPERATIONS),
        (3, 0, 1, Code.TOO_MANY_OPERATIONS),
        # What can never fit says so, whatever else is in the way.
        (2, 1000, 1001, Code.PREFIX_TOO_LARGE),
    ],
)
def test_what_fits(
    active_operations: int, active_tokens: int, wanted_tokens: int, expected: Code | None
) -> None:
    found = code(
        active_operations=active_operations, active_tokens=active_tokens, wanted_tokens=wanted_tokens
    )
    assert found == expected


def test_one_operation_at_once_is_the_strict_mode() -> None:
    strict = Budget(max_operations=1, operation_tokens=1000, host_tokens=1000)
    assert code(budget=strict, active_operations=0, wanted_tokens=1000) is None
    assert code(budget=strict, active_operations=1, active_tokens=1) is Code.TOO_MANY_OPERATIONS


def test_without_host_memory_only_resident_prefixes_are_accepted() -> None:
    none = Budget(max_operations=2, operation_tokens=0, host_tokens=0)
    assert code(budget=none, wanted_tokens=0) is None
    assert code(budget=none, wanted_tokens=1) is Code.PREFIX_TOO_LARGE


def test_a_refusal_says_when_to_come_back_unless_waiting_is_in_vain() -> None:
    busy = refusal(active_operations=2, retry_after_s=0.7)
    full = refusal(active_tokens=1000, wanted_tokens=1, retry_after_s=0.7)
    never = refusal(wanted_tokens=1001, retry_after_s=0.7)
    assert busy is not None
    assert full is not None
    assert never is not None
    assert (busy.retry_after_s, full.retry_after_s, never.retry_after_s) == (0.7, 0.7, None)


def test_a_refusal_gives_the_numbers_and_the_setting() -> None:
    busy = refusal(active_operations=2)
    full = refusal(active_tokens=900, wanted_tokens=101)
    never = refusal(wanted_tokens=1001)
    assert busy is not None
    assert full is not None
    assert never is not None
    assert "2 operations" in busy.message
    assert "TOOLGAP_MAX_OPERATIONS" in busy.message
    assert all(number in full.message for number in ("900", "1000", "101"))
    assert all(part in never.message for part in ("1001", "1000", "TOOLGAP_HOST_SHARE", "--hicache-size"))


TOKENS = st.integers(0, 10_000)


@settings(deadline=None)
@given(st.builds(Budget, st.integers(1, 20), TOKENS, TOKENS), st.lists(TOKENS, max_size=30))
def test_accepted_operations_never_exceed_the_budget(budget: Budget, spans: list[int]) -> None:
    accepted: list[int] = []
    for span_tokens in spans:
        found = code(
            budget=budget,
            active_operations=len(accepted),
            active_tokens=sum(accepted),
            wanted_tokens=span_tokens,
        )
        fits = (
            len(accepted) < budget.max_operations
            and span_tokens <= budget.operation_tokens
            and sum(accepted) + span_tokens <= budget.host_tokens
        )
        assert fits == (found is None)
        if found is None:
            accepted.append(span_tokens)
        assert len(accepted) <= budget.max_operations
        assert sum(accepted) <= budget.host_tokens


@pytest.mark.parametrize(
    ("recent", "expected_s"),
    [
        ([], 1.0),
        ([2.0], 2.0),
        ([1.0, 2.0], 1.5),
        ([0.0], 0.1),
        ([0.05, 0.05], 0.1),
        ([3600.0], 10.0),
        ([0.1234567], 0.123),
        ([1.0, float("inf")], 10.0),
    ],
)
def test_room_is_expected_after_the_mean_of_recent_operations(recent: list[float], expected_s: float) -> None:
    assert retry_after_s(iter(recent)) == expected_s


def test_without_recent_operations_the_default_is_taken_within_the_same_bounds() -> None:
    assert [retry_after_s([], default_s) for default_s in (0.0, 3.0, 99.0)] == [0.1, 3.0, 10.0]


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e9)))
def test_a_retry_is_never_sooner_than_a_tenth_of_a_second_nor_later_than_ten(recent: list[float]) -> None:
    assert 0.1 <= retry_after_s(recent) <= 10.0


def test_a_span_longer_than_one_operation_may_read_names_the_limit() -> None:
    small = Budget(max_operations=2, operation_tokens=100, host_tokens=1000)
    error = refusal(small, wanted_tokens=101)
    assert error is not None
    assert error.code is Code.PREFIX_TOO_LARGE
    assert "TOOLGAP_MAX_OPERATION_TOKENS" in error.message
    assert refusal(small, wanted_tokens=100) is None


@pytest.mark.parametrize(
    ("missing", "limit", "page", "threshold", "expected"),
    [
        (1024, 4096, 16, 256, 1024),
        (4096, 4096, 16, 256, 4096),
        (8192, 4096, 16, 256, 4096),
        # The rest would be too short for SGLang to read it: it is read along.
        (4096 + 240, 4096, 16, 256, 4096 + 240),
        (4096 + 256, 4096, 16, 256, 4096),
        # Whole pages, and never below the threshold.
        (1024, 100, 64, 0, 64),
        (1024, 1, 64, 256, 256),
        (1024, 1, 64, 250, 256),
    ],
)
def test_a_span_is_cut_into_pieces(
    missing: int, limit: int, page: int, threshold: int, expected: int
) -> None:
    assert piece_tokens(missing, limit, page, threshold) == expected


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(1, 40_000), st.sampled_from([1, 16, 64]), st.integers(0, 1000))
def test_pieces_add_up_and_each_can_be_read(pages: int, limit: int, page: int, threshold: int) -> None:
    missing = pages * page
    while missing >= threshold and missing > 0:
        piece = piece_tokens(missing, limit, page, threshold)
        assert piece % page == 0
        assert threshold <= piece <= missing
        missing -= piece
    assert missing == 0 or pages * page < threshold


# ---- is it worth it ----

NOW_TS = 1000.0


def rates(
    restore_token_s: float = 1e-3,
    prefill_token_s: float = 1e-4,
    latency_s: float = 0.0,
    measured_ts: float = NOW_TS,
) -> Rates:
    return Rates(
        restore=RestoreCost(latency_s=latency_s, token_s=restore_token_s, measured_ts=measured_ts),
        prefill=PrefillCost(batch_s=0.0, token_s=prefill_token_s, pair_s=0.0, longest_tokens=8192),
    )


def judged(
    known: Rates,
    missing_tokens: int,
    gap_s: float,
    *,
    read_tokens: int | None = None,
    queued_tokens: int = 0,
    now_ts: float = NOW_TS,
) -> Estimate:
    wanted = Wanted(0, missing_tokens, missing_tokens if read_tokens is None else read_tokens, queued_tokens)
    found = estimate(known, wanted, gap_s=gap_s, now_ts=now_ts, batch_tokens=None)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("gap_s", "worthwhile"),
    [
        # 1,000 tokens are read in 1 s and computed in 0.1 s.
        (0.0, False),
        (0.5, False),
        (0.89, False),
        (0.91, True),
        (1.0, True),
        (60.0, True),
    ],
)
def test_a_restore_is_worth_it_if_less_than_a_recompute_is_left_of_it_after_the_gap(
    gap_s: float, worthwhile: bool
) -> None:
    found = judged(rates(), 1000, gap_s)
    assert (found.restore_s, found.recompute_s, found.gap_s) == (1.0, 0.1, gap_s)
    assert (found.restore_tokens_per_s, found.prefill_tokens_per_s) == (1000.0, 10_000.0)
    assert found.worthwhile is worthwhile


def test_what_is_faster_than_a_recompute_is_worth_it_without_a_gap() -> None:
    assert judged(rates(1e-4, 1e-3), 1000, 0.0).worthwhile


def test_reads_ahead_and_the_latency_count_and_what_another_read_brings_is_read_once() -> None:
    found = judged(rates(latency_s=0.25), 1000, 1.0, read_tokens=200, queued_tokens=500)
    assert found.restore_s == 0.95
    assert (found.missing_tokens, found.queued_tokens, found.recompute_s) == (1000, 500, 0.1)


@pytest.mark.parametrize("known", [Rates(), Rates(restore=rates().restore), Rates(prefill=rates().prefill)])
def test_without_a_measurement_of_both_nothing_is_estimated(known: Rates) -> None:
    assert estimate(known, Wanted(0, 1000, 1000, 0), gap_s=0.0, now_ts=NOW_TS, batch_tokens=None) is None
    check_worthwhile(None)


def test_nothing_is_estimated_where_nothing_is_missing_or_far_from_what_was_measured() -> None:
    assert estimate(rates(), Wanted(500, 0, 0, 0), gap_s=0.0, now_ts=NOW_TS, batch_tokens=None) is None
    long = Wanted(0, 8 * 8192 + 1, 8 * 8192 + 1, 0)
    assert estimate(rates(), long, gap_s=0.0, now_ts=NOW_TS, batch_tokens=None) is None
    assert estimate(rates(), long, gap_s=0.0, now_ts=NOW_TS, batch_tokens=8192) is not None


def test_a_recompute_attends_to_what_is_resident_and_takes_further_batches() -> None:
    cost = PrefillCost(batch_s=1.0, token_s=0.001, pair_s=1e-6, longest_tokens=1000)
    assert cost.added_s(1000, 0, None) == pytest.approx(1.0 + 0.5)
    assert cost.added_s(1000, 2000, None) == pytest.approx(1.0 + 2.5)
    assert cost.added_s(1000, 0, 400) == pytest.approx(2.0 + 1.0 + 0.5)


def test_a_refusal_carries_the_estimate_and_says_its_numbers() -> None:
    found = judged(rates(), 1000, 0.25, queued_tokens=500)
    with pytest.raises(Refused) as caught:
        check_worthwhile(found)
    error = caught.value.error
    assert (error.code, error.estimate, error.retry_after_s) == (Code.NOT_WORTHWHILE, found, None)
    for part in ("1000 tokens", "1.5 s", "500 more", "1.25 s", "0.1 s", "expected_gap_s", "force"):
        assert part in error.message


@settings(deadline=None)
@given(
    st.floats(1e-9, 1e3), st.floats(1e-9, 1e3), st.integers(16, 60_000), st.floats(0, 1e4), st.floats(0, 1e4)
)
def test_a_longer_gap_never_makes_a_restore_less_worth_it(
    restore_token_s: float, prefill_token_s: float, tokens: int, gap_s: float, more_s: float
) -> None:
    known = rates(restore_token_s, prefill_token_s)
    sooner, later = judged(known, tokens, gap_s), judged(known, tokens, gap_s + more_s)
    assert later.worthwhile or not sooner.worthwhile
    assert later.worthwhile or gap_s + more_s < later.restore_s


@settings(deadline=None)
@given(st.floats(1e-9, 1e3), st.floats(1e-9, 1e-1), st.integers(16, 60_000))
def test_a_storage_that_was_slow_once_is_tried_again(
    restore_token_s: float, prefill_token_s: float, tokens: int
) -> None:
    """Nobody reads it any more, so that nothing new is measured: a restore is admitted all the same one day."""
    known = rates(restore_token_s, prefill_token_s)
    half_lives = 0
    while not judged(known, tokens, 0.0, now_ts=NOW_TS + half_lives * OPTIMISM_HALF_LIFE_S).worthwhile:
        half_lives += 1
        assert half_lives <= 50
    assert 2.0**half_lives <= max(1.0, 4 * restore_token_s / prefill_token_s)


def test_a_clock_that_is_behind_makes_no_measurement_older() -> None:
    assert judged(rates(measured_ts=NOW_TS + 60), 1000, 0.0).restore_s == 1.0


# ---- KV that is awaited ----


def awaited_refusal(*awaited: tuple[int, float], wanted_tokens: int = 400, **where: Any) -> Error | None:
    arguments = {"host_tokens": 1000, "held_tokens": 0, "deadline_ts": 200.0, "now_ts": 100.0}
    try:
        check_awaited(
            [Awaited(*other) for other in awaited], wanted_tokens=wanted_tokens, **arguments | where
        )
    except Refused as refused:
        return refused.error
    return None


def test_kv_that_is_needed_before_is_not_evicted() -> None:
    assert awaited_refusal((600, 150.0)) is None
    refused = awaited_refusal((601, 150.0))
    assert refused is not None
    assert (refused.code, refused.retry_after_s) == (Code.AWAITED_KV, 10.0)
    assert all(number in refused.message for number in ("1000", "601", "400"))
    assert awaited_refusal((301, 150.0), (300, 102.0), held_tokens=0) is not None
    assert awaited_refusal((500, 150.0), held_tokens=101) is not None
    soon = awaited_refusal((601, 150.0), (100, 102.5))
    assert soon is not None
    assert soon.retry_after_s == 2.5


def test_kv_that_is_needed_later_or_was_needed_already_gives_way() -> None:
    assert awaited_refusal((1000, 200.5)) is None
    assert awaited_refusal((1000, 100.0)) is None
    assert awaited_refusal((1000, 200.0)) is not None


def test_a_lack_of_room_without_awaited_kv_is_not_its_matter() -> None:
    assert awaited_refusal(held_tokens=1000) is None
    assert awaited_refusal((1, 150.0), held_tokens=599, wanted_tokens=400) is None


def test_what_is_resident_needs_no_room() -> None:
    assert awaited_refusal((1000, 150.0), held_tokens=1000, wanted_tokens=0) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 300)), max_size=10), st.integers(1, 1000))
def test_what_is_let_in_leaves_room_for_all_that_is_needed_before(
    spans: list[tuple[int, float]], wanted_tokens: int
) -> None:
    earlier = sum(tokens for tokens, deadline_ts in spans if 100.0 < deadline_ts <= 200.0)
    if awaited_refusal(*spans, wanted_tokens=wanted_tokens) is None:
        assert not earlier or wanted_tokens + earlier <= 1000
    else:
        assert wanted_tokens + earlier > 1000
