from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from toolgap.gateway.apis.sse import Events, EventTooLongError


def read(*chunks: bytes, max_event_bytes: int = 1000) -> list[bytes]:
    events = Events(max_event_bytes)
    return [data for chunk in chunks for data in events.feed(chunk)]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end_comments_other_fields_and_several_lines_of_data(end: bytes) -> None:
    lines = [
        b": ping",
        b"event: x",
        b"id",
        b"data: one",
        b"data:two",
        b"",
        b"retry: 5",
        b"",
        b"data",
        b"",
        b"",
    ]
    assert read(end.join(lines)) == [b"one\ntwo", b""]


def test_a_byte_order_mark_belongs_to_no_field() -> None:
    assert read(b"\xef\xbb", b"\xbfdata: a\n\n") == [b"a"]


def test_an_event_that_is_not_ended_is_none() -> None:
    assert read(b"data: a\n\ndata: b\n") == [b"a"]


@pytest.mark.parametrize(
    "stream", [b"data: " + b"x" * 99, b"x" * 99 + b"\n", b"data: x\n" * 99, b"data\n" * 99]
)
def test_what_would_be_kept_is_bounded(stream: bytes) -> None:
    with pytest.raises(EventTooLongError):
        read(stream, max_event_bytes=50)


@given(
    st.lists(st.sampled_from([b"data: a", b"data", b":", b"\r", b"\n", b"\r\n", b"x", b"\xef\xbb\xbf"])),
    st.data(),
)
@example([b"data: a", b"\r\n", b"\r\n"], None)
def test_chunks_do_not_matter(parts: list[bytes], data: st.DataObject | None) -> None:
    stream = b"".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(stream)))) if data else range(len(stream))
    places = sorted({0, *cuts, len(stream)})
    assert read(*(stream[a:b] for a, b in pairwise(places))) == read(stream)
