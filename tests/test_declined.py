"""Which requests recompute because a restore of their prefix was declined."""

from array import array
from collections.abc import Iterable

from toolgap.sglang.declined import Declined
from toolgap.sglang.internals.requests import Prefix


def prefix(token_ids: Iterable[int], salt: str | None = None) -> Prefix:
    return Prefix(array("q", token_ids), None, salt)


def test_a_request_that_begins_with_the_whole_prefix_recomputes_it_once() -> None:
    declined = Declined()
    declined.add(prefix([1, 2, 3]))
    assert declined.begins(prefix([1, 2, 3, 4]))
    assert not declined.begins(prefix([1, 2]))
    assert not declined.begins(prefix([1, 2, 3, 4], salt="other"))
    declined.settle(prefix([1, 2, 9]))
    assert declined.begins(prefix([1, 2, 3]))
    declined.settle(prefix([1, 2, 3, 4]))
    assert not declined.begins(prefix([1, 2, 3, 4]))
    assert not declined


def test_a_restore_that_goes_ahead_after_all_is_not_declined_any_more() -> None:
    declined = Declined()
    declined.add(prefix([1, 2, 3]))
    declined.add(prefix([1, 2, 3, 4, 5]))
    declined.settle(prefix([1, 2, 3, 4]))
    assert not declined.begins(prefix([1, 2, 3, 4]))
    assert declined.begins(prefix([1, 2, 3, 4, 5, 6]))
    declined.forget_all()
    assert not declined


def test_the_oldest_are_forgotten() -> None:
    declined = Declined()
    for number in range(100):
        declined.add(prefix([number, 1]))
    assert len(declined) == 64
    assert not declined.begins(prefix([0, 1]))
    assert declined.begins(prefix([99, 1]))
