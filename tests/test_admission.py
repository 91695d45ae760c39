"""The budget of operations: how many at once, and how much of host memory they may read into."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolgap.admission import Budget, check_budget, piece_tokens, retry_after_s
from toolgap.protocol import Code, Error, Refused

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
