"""Which of what operations inserted was used, and which was read in vain."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from toolgap.operations import Operation
from toolgap.sglang.internals import Prefix
from toolgap.sglang.usage import Usage


def prefix(*token_ids: int, salt: str | None = None) -> Prefix:
    return Prefix(array("q", token_ids), None, salt)


def operation(operation_id: str, resident: int, inserted: int, read_s: float = 2.0) -> Operation:
    return Operation(
        operation_id=operation_id,
        fingerprint=b"",
        namespace="",
        requested_tokens=resident + inserted,
        aligned_tokens=resident + inserted,
        ttl_s=1.0,
        resident_tokens=resident,
        inserted_tokens=inserted,
        accepted_at=10.0,
        queried_at=10.5,
        read_at=10.5 + read_s,
    )


def test_a_request_uses_what_it_shares_and_found_in_the_cache() -> None:
    usage, restored = Usage(), operation("a", resident=2, inserted=4)
    usage.watch(restored, prefix(*range(6)))
    assert usage.used_by(prefix(9, 9, 9), 3) == []
    assert usage.used_by(prefix(0, 1, 7), 2) == []  # no more than what was resident before
    assert usage.used_by(prefix(*range(6), salt="x"), 6) == []
    [use] = usage.used_by(prefix(0, 1, 2, 3, 4, 7, 8), 7)
    assert (use.tokens, use.saved_s, restored.used_tokens) == (3, 1.5, 3)
    assert usage.used_by(prefix(0, 1, 2, 3, 4, 7, 8), 7) == []  # the first use counts
    [rest] = usage.used_by(prefix(*range(6)), 6)
    assert (rest.tokens, rest.saved_s, restored.used_tokens) == (1, 0.5, 4)
    assert not usage


def test_what_was_not_in_the_cache_any_more_was_not_used() -> None:
    usage, restored = Usage(), operation("a", resident=0, inserted=4)
    usage.watch(restored, prefix(*range(4)))
    [use] = usage.used_by(prefix(*range(9)), 1)
    assert (use.tokens, use.saved_s) == (1, 0.5)


def test_what_nobody_used_is_told_once() -> None:
    usage, first, second = Usage(), operation("a", 0, 4), operation("b", 1, 2)
    for restored in (first, second, operation("c", 3, 0)):
        usage.watch(restored, prefix(*range(4)))
    assert len(usage) == 2
    assert [usage.forget(first), usage.forget(first)] == [4, 0]
    assert [usage.forget_all(), usage.forget_all()] == [2, 0]


TOKENS = st.lists(st.integers(0, 2), max_size=12)


@given(TOKENS, TOKENS, st.integers(0, 12), st.integers(0, 12))
def test_no_more_is_used_than_inserted_shared_and_cached(
    restored: list[int], request: list[int], resident: int, cached: int
) -> None:
    resident = min(resident, len(restored))
    usage, done = Usage(), operation("a", resident, len(restored) - resident)
    usage.watch(done, prefix(*restored))
    uses = usage.used_by(prefix(*request), min(cached, len(request)))
    shared = prefix(*request).shared_tokens(prefix(*restored))
    expected = max(0, min(shared, cached, len(request), len(restored)) - resident)
    assert sum(use.tokens for use in uses) == done.used_tokens == expected
