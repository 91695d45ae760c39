"""Which headers of a request and of a response go on, in their order and with their duplicates. Pure."""

from collections.abc import Iterable

Header = tuple[bytes, bytes]
Headers = list[Header]

_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)


def value(headers: Iterable[Header], name: bytes) -> bytes | None:
    """The first value of a header, whose name is given in lower case."""
    return next((text for key, text in headers if key.lower() == name), None)


def end_to_end(headers: Iterable[Header]) -> Headers:
    """Those that are not about one connection: neither hop-by-hop, nor named by ``Connection``."""
    headers = list(headers)
    dropped = set(_HOP_BY_HOP)
    for name, text in headers:
        if name.lower() == b"connection":
            dropped.update(token.strip().lower() for token in text.split(b","))
    # A body without its length would be a body without its end.
    dropped.discard(b"content-length")
    return [(name, text) for name, text in headers if name.lower() not in dropped]


def is_chunked(headers: Iterable[Header]) -> bool:
    """Whether the length of the body is not told before it."""
    return value(headers, b"transfer-encoding") is not None


def has_body(headers: Iterable[Header]) -> bool:
    """Whether a request with these headers has a body, an empty one included."""
    headers = list(headers)
    return is_chunked(headers) or value(headers, b"content-length") is not None


def to_upstream(
    headers: Iterable[Header], *, host: bytes, client: bytes | None, scheme: bytes, request_id: bytes
) -> Headers:
    """A client's headers as an upstream gets them.

    ``Host`` becomes the upstream's, and ``X-Forwarded-For``, ``-Proto`` and ``-Host`` tell what it was: what
    a proxy before this one wrote there stays, and the client's address is appended to it. ``Expect`` is
    answered here. A request without ``X-Request-Id`` gets one.

    Args:
        headers: As they came, names in lower case.
        host: The upstream's, with its port unless that is its scheme's.
        client: The address that the request came from, if it is known.
        scheme: What the client spoke: http or https.
        request_id: The id that the gateway's log has.
    """
    headers = list(headers)
    asked_host = value(headers, b"host")
    told = value(headers, b"x-forwarded-for")
    forwarded = b", ".join(part for part in (told, client) if part)
    own = {b"host", b"x-forwarded-for"}
    if (value(headers, b"expect") or b"").lower() == b"100-continue":
        own.add(b"expect")
    # Host comes first, as RFC 9110 asks.
    sent = [(b"host", host), *((name, text) for name, text in end_to_end(headers) if name not in own)]
    if is_chunked(headers):
        sent.append((b"transfer-encoding", b"chunked"))
    if forwarded:
        sent.append((b"x-forwarded-for", forwarded))
    if value(headers, b"x-forwarded-proto") is None:
        sent.append((b"x-forwarded-proto", scheme))
    if asked_host and value(headers, b"x-forwarded-host") is None:
        sent.append((b"x-forwarded-host", asked_host))
    if value(headers, b"x-request-id") is None:
        sent.append((b"x-request-id", request_id))
    return sent
