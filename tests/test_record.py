"""The record of recent requests is bounded, and gives back what was put in."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from toolgap.sglang.record import Record, Recorded


def request(tokens: int) -> Recorded:
    return Recorded(array("q", range(tokens)), tokens // 2, "key", None)


def test_the_oldest_give_way() -> None:
    record = Record(10)
    for name, tokens in (("a", 4), ("b", 4), ("c", 4)):
        record.add(name, request(tokens))
    assert record.find("a") is None
    assert record.find("b") == request(4)
    assert (len(record), record.tokens) == (2, 8)


def test_one_that_is_asked_for_does_not_stay_longer() -> None:
    record = Record(8)
    record.add("a", request(4))
    record.add("b", request(4))
    assert record.find("a") is not None
    record.add("c", request(4))
    assert record.find("a") is None


def test_an_id_that_comes_again_is_the_newer_request() -> None:
    record = Record(10)
    record.add("a", request(4))
    record.add("b", request(2))
    record.add("a", request(6))
    assert record.find("a") == request(6)
    record.add("c", request(4))
    assert record.find("b") is None
    assert record.find("a") is not None


def test_what_is_larger_than_the_record_is_not_recorded() -> None:
    record = Record(3)
    record.add("a", request(2))
    record.add("b", request(4))
    assert record.find("a") is not None
    record.add("a", request(4))
    assert (record.find("a"), record.tokens) == (None, 0)


def test_off() -> None:
    record = Record(0)
    record.add("a", request(1))
    assert (len(record), record.find("a")) == (0, None)


@given(st.integers(0, 20), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 12))))
def test_never_more_tokens_than_allowed(limit: int, added: list[tuple[str, int]]) -> None:
    record = Record(limit)
    for name, tokens in added:
        record.add(name, request(tokens))
        assert record.tokens <= limit
        found = [found for name in "abcd" if (found := record.find(name)) is not None]
        assert (len(found), sum(len(one.token_ids) for one in found)) == (len(record), record.tokens)
        assert (record.find(name) is not None) == (tokens <= limit)
