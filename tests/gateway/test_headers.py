"""Which headers go on. Pure."""

from hypothesis import given
from hypothesis import strategies as st

from toolgap.gateway.headers import Header, end_to_end, has_body, to_upstream, value

HOPS = [
    b"connection",
    b"Keep-Alive",
    b"te",
    b"TRAILER",
    b"transfer-encoding",
    b"upgrade",
    b"proxy-authorization",
]
ORDINARY = [b"accept", b"X-A", b"x-b", b"authorization", b"content-length", b"cookie"]
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(HOPS + ORDINARY),
        st.sampled_from([b"", b"close", b"x-a, TE", b"X-B,close", b"chunked"]),
    )
)


@given(HEADERS)
def test_what_is_left_is_in_order_and_about_no_connection(headers: list[Header]) -> None:
    left = end_to_end(headers)
    rest = iter(headers)
    assert all(one in rest for one in left)
    hops = {name.lower() for name in HOPS}
    assert not any(name.lower() in hops for name, _ in left)
    named = b",".join(text for name, text in headers if name.lower() == b"connection").lower()
    for name, text in headers:
        kept = name.lower() not in hops and name.lower() not in [one.strip() for one in named.split(b",")]
        assert ((name, text) in left) == kept
    assert end_to_end(left) == left


def test_a_length_stays_whatever_the_client_says_of_it() -> None:
    headers = [(b"connection", b"content-length"), (b"content-length", b"3")]
    assert end_to_end(headers) == [(b"content-length", b"3")]
    assert has_body(headers)


def test_a_chunked_body_stays_one() -> None:
    sent = to_upstream(
        [(b"transfer-encoding", b"chunked"), (b"host", b"a"), (b"x-request-id", b"mine")],
        host=b"b:1",
        client=None,
        scheme=b"https",
        request_id=b"own",
    )
    assert sent == [
        (b"host", b"b:1"),
        (b"x-request-id", b"mine"),
        (b"transfer-encoding", b"chunked"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-host", b"a"),
    ]
    assert value(sent, b"x-forwarded-for") is None
