"""The proxy between real sockets: what an upstream sends is what a client gets, and the other way round."""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import begin, chunk, gateway, read_body, respond, serving, unused_url

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"


class Upstream:
    """An application that can be told what to do."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.scope: dict[str, Any] = {}
        self.body = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/health":
            await respond(send)
            return
        self.scope = scope
        self.body = await read_body(receive)
        await begin(send)
        for part in self.chunks:
            await chunk(send, part)
        await send({"type": "http.response.body"})


class Pair:
    """A gateway and what is behind it."""

    def __init__(self, url: str, direct: str, upstream: Upstream) -> None:
        self.url = url
        self.direct = direct
        self.upstream = upstream


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    upstream = Upstream()
    with serving(upstream, lifespan="off") as (direct, _), gateway(direct) as url:
        yield Pair(url, direct, upstream)


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 80), timeout=30)


def ask(url: str, request: bytes) -> bytes:
    """All that comes back for these bytes until the connection is closed."""
    with connect(url) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65_536), b""))


CHUNKS = st.lists(
    st.one_of(
        st.binary(min_size=1, max_size=200),
        st.sampled_from(
            [b"data: {}\n\n", b"\r\n", b"0\r\n\r\n", b"\xff\x00", "ü€😀".encode()[:5], b"a" * 7_000]
        ),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(chunks=CHUNKS, body=st.binary(max_size=3000))
def test_streams_are_equal_byte_for_byte(pair: Pair, chunks: list[bytes], body: bytes) -> None:
    pair.upstream.chunks = chunks
    with (
        httpx.Client(trust_env=False) as client,
        client.stream("POST", pair.url + CHAT, content=body) as reply,
    ):
        got = b"".join(reply.iter_raw())
    assert got == b"".join(chunks)
    assert pair.upstream.body == body


def decoded(reply: bytes) -> tuple[bytes, bytes]:
    """Head and body of a chunked answer, which must have its end."""
    head, _, rest = reply.partition(b"\r\n\r\n")
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if int(size, 16) == 0:
            assert rest == b"\r\n"
            return head, body
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]


@settings(max_examples=25, deadline=None)
@given(chunks=CHUNKS)
def test_the_whole_answer_is_the_direct_one(pair: Pair, chunks: list[bytes]) -> None:
    pair.upstream.chunks = chunks
    request = b"POST /v1/messages HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}"
    assert decoded(ask(pair.url, request)) == decoded(ask(pair.direct, request))


@settings(max_examples=25, deadline=None)
@given(
    path=st.text("abz019-_.~!$&'()*+,;=:@/", max_size=20),
    escaped=st.binary(max_size=6),
    query=st.text("abz019=&+;/?:@%-._~[]|", max_size=20),
)
def test_the_target_is_passed_as_it_is(pair: Pair, path: str, escaped: bytes, query: str) -> None:
    target = "/x" + path + "".join(f"%{byte:02x}" for byte in escaped)
    pair.upstream.chunks = []
    ask(pair.url, f"GET {target}?{query} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert pair.upstream.scope["raw_path"] == target.encode()
    assert pair.upstream.scope["query_string"] == query.encode()


def test_a_base_path_comes_before_the_target(pair: Pair) -> None:
    with gateway(pair.direct + "/models/a/") as url:
        httpx.get(f"{url}/v1/models?q=1", trust_env=False)
    assert pair.upstream.scope["raw_path"] == b"/models/a/v1/models"


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "POST", "PROPFIND"])
def test_every_method_passes(pair: Pair, method: str) -> None:
    pair.upstream.chunks = [b"x"]
    assert httpx.request(method, f"{pair.url}/any", trust_env=False).content == b"x"
    assert pair.upstream.scope["method"] == method


def test_headers_pass_in_order_with_duplicates_and_hop_by_hop_ones_stay() -> None:
    seen: list[tuple[bytes, bytes]] = []
    answered = [
        (b"Set-Cookie", b"a=1"),
        (b"X-Two", b"1"),
        (b"set-cookie", b"b=2"),
        (b"x-two", b"2"),
        (b"content-encoding", b"gzip"),
        (b"date", b"Sun, 06 Nov 1994 08:49:37 GMT"),
        (b"server", b"theirs"),
        (b"x-latin", b"caf\xe9"),
        (b"keep-alive", b"timeout=5"),
        (b"connection", b"X-Secret, close"),
        (b"x-secret", b"1"),
        (b"content-length", b"4"),
    ]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/health":
            seen.extend(scope["headers"])
        # It says gzip and is none: nobody on the way may try to decode it.
        await respond(send, b"oops", headers=answered)

    with serving(app, lifespan="off") as (direct, _), gateway(direct) as url:
        reply = ask(
            url,
            b"GET /a HTTP/1.1\r\nHost: public.example\r\nX-Two: 1\r\nAuthorization: Bearer k\r\nx-two: 2\r\n"
            b"Connection: close, x-private\r\nX-Private: 1\r\nTE: trailers\r\nAccept-Encoding: br\r\n"
            b"X-Forwarded-For: 10.0.0.1\r\nUpgrade: h2c\r\n\r\n",
        )
    head, _, body = reply.partition(b"\r\n\r\n")
    assert body == b"oops"
    lines = [tuple(line.split(b": ", 1)) for line in head.split(b"\r\n")[1:]]
    assert lines == [
        *[(name.lower(), text) for name, text in answered if name not in HOPS],
        (b"connection", b"close"),
    ]
    assert seen[0] == (b"host", direct.removeprefix("http://").encode())
    assert seen[1:5] == [
        (b"x-two", b"1"),
        (b"authorization", b"Bearer k"),
        (b"x-two", b"2"),
        (b"accept-encoding", b"br"),
    ]
    rest = dict(seen[5:])
    assert len(rest.pop(b"x-request-id")) == 32
    assert rest == {
        b"x-forwarded-for": b"10.0.0.1, 127.0.0.1",
        b"x-forwarded-proto": b"http",
        b"x-forwarded-host": b"public.example",
    }


HOPS = (b"keep-alive", b"connection", b"x-secret")


@pytest.fixture(scope="module")
def statuses() -> Iterator[tuple[str, str]]:
    """A gateway, and a server that answers with the status that its path names."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        status = int(scope["path"][1:]) if scope["path"] != "/health" else 200
        bare = status in (204, 304)
        own = [(b"retry-after", b"7"), *([] if bare else [(b"content-length", b"3")])]
        await respond(send, b"" if bare else b"abc", status, own)

    with serving(app, lifespan="off") as (direct, _), gateway(direct) as url:
        yield url, direct


@pytest.mark.parametrize("status", [200, 201, 204, 301, 304, 400, 401, 404, 418, 429, 500, 503, 529, 599])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_every_status_passes_also_without_a_body(statuses: tuple[str, str], status: int, method: str) -> None:
    request = f"{method} /{status} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
    through, direct = (ask(url, request) for url in statuses)
    assert through == direct
    assert through.startswith(b"HTTP/1.1 %d " % status)


def test_redirects_and_cookies_are_the_clients_affair() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/health":
            seen.append(dict(scope["headers"]).get(b"cookie"))
        await respond(
            send,
            status=302,
            headers=[(b"location", b"/b"), (b"set-cookie", b"a=1"), (b"content-length", b"0")],
        )

    with serving(app, lifespan="off") as (direct, _), gateway(direct) as url:
        for _ in range(2):
            assert httpx.get(f"{url}/a", trust_env=False).status_code == 302
    assert seen == [None, None]


def test_each_chunk_is_passed_before_the_next_one_is_made() -> None:
    events: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            await respond(send)
            return
        await read_body(receive)
        await begin(send)
        for number in range(20):
            events["go"] = anyio.Event()
            await chunk(send, b"%d;" % number)
            await events["go"].wait()
        await send({"type": "http.response.body"})

    with (
        serving(app, lifespan="off") as (direct, server),
        gateway(direct) as url,
        httpx.stream("POST", url + CHAT, content=b"{}", trust_env=False) as reply,
    ):
        got = []
        for part in reply.iter_raw():
            got.append(part)
            server.on_loop(lambda: events["go"].set())
    assert got == [b"%d;" % number for number in range(20)]


def test_a_requests_body_is_passed_as_it_comes() -> None:
    arrived = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            await respond(send)
            return
        first = await receive()
        assert first["body"] == b"first"
        arrived.set()
        await respond(send, first["body"] + await read_body(receive))

    def parts() -> Iterator[bytes]:
        yield b"first"
        assert arrived.wait(30)
        yield b"second"

    with serving(app, lifespan="off") as (direct, _), gateway(direct) as url:
        reply = httpx.post(url + CHAT, content=parts(), trust_env=False)
    assert reply.content == b"firstsecond"


def test_expect_is_answered_and_the_body_passes(pair: Pair) -> None:
    pair.upstream.chunks = [b"done"]
    with connect(pair.url) as connection:
        connection.sendall(
            b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 3\r\nconnection: close\r\n\r\n"
        )
        assert connection.recv(65_536).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"abc")
        rest = b"".join(iter(lambda: connection.recv(65_536), b""))
    assert rest.startswith(b"HTTP/1.1 200 ")
    assert pair.upstream.body == b"abc"
    assert b"expect" not in dict(pair.upstream.scope["headers"])


def test_large_bodies_pass_both_ways(pair: Pair) -> None:
    body = bytes(range(256)) * 64 * 1024
    pair.upstream.chunks = [body]
    reply = httpx.post(f"{pair.url}/upload", content=body, trust_env=False, timeout=60)
    assert pair.upstream.body == body
    assert reply.content == body


@pytest.mark.parametrize("told", [True, False], ids=["content-length", "chunked"])
def test_a_body_over_the_limit_is_refused_in_the_apis_form(pair: Pair, told: bool) -> None:
    body = b"x" * 2000
    with gateway(pair.direct, max_body_bytes=1000) as url:
        for path in (CHAT, "/v1/messages"):
            reply = httpx.post(url + path, content=body if told else iter([body]), trust_env=False)
            assert reply.status_code == 413
            assert "1000 bytes" in reply.json()["error"]["message"]
        assert reply.json()["error"]["type"] == "request_too_large"
        assert httpx.post(url + CHAT, content=b"x" * 1000, trust_env=False).status_code == 200


def test_a_websocket_is_refused_clearly(pair: Pair) -> None:
    headers = {"upgrade": "websocket", "connection": "upgrade", "sec-websocket-key": "x"}
    reply = httpx.get(f"{pair.url}/v1/realtime", headers=headers, trust_env=False)
    assert reply.status_code == 501
    assert reply.json()["error"]["code"] == "websocket_not_supported"


def test_it_is_no_open_proxy(pair: Pair) -> None:
    pair.upstream.chunks = [b"own"]
    head = b"%s HTTP/1.1\r\nhost: elsewhere.example\r\nconnection: close\r\n\r\n"
    reply = ask(pair.url, head % b"GET http://elsewhere.example/v1/models")
    # As RFC 9112 has it, the URL's path is what is asked for, and of nobody but the upstream.
    assert decoded(reply)[1] == b"own"
    assert pair.upstream.scope["raw_path"] == b"/v1/models"
    assert dict(pair.upstream.scope["headers"])[b"host"] == pair.direct.removeprefix("http://").encode()
    assert ask(pair.url, head % b"CONNECT elsewhere.example:443").startswith(b"HTTP/1.1 400 ")


def test_a_second_request_of_the_connection_passes_too(pair: Pair) -> None:
    parts = urlsplit(pair.url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
    for number in range(3):
        pair.upstream.chunks = [b"%d" % number]
        connection.request("POST", CHAT, b"{}")
        assert connection.getresponse().read() == b"%d" % number
    connection.close()


def test_many_streams_at_once() -> None:
    streams, events = 50, 20

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            await respond(send)
            return
        body = await read_body(receive)
        await begin(send)
        for number in range(events):
            await chunk(send, body + b":%d\n" % number)
            await anyio.lowlevel.checkpoint()
        await send({"type": "http.response.body"})

    async def main(url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, trust_env=False, timeout=120) as client:

            async def one(number: int) -> None:
                own = b"%d" % number
                reply = await client.post(url + CHAT, content=own)
                assert reply.content == b"".join(own + b":%d\n" % event for event in range(events))

            async with anyio.create_task_group() as group:
                for number in range(streams):
                    group.start_soon(one, number)

    # Three servers' threads share one interpreter here: connecting may take long, and is not the matter.
    with serving(app, lifespan="off") as (direct, _), gateway(direct, connect_timeout_s=120) as url:
        anyio.run(main, url)


def test_nobody_listens() -> None:
    missing = unused_url()
    with gateway(missing) as url:
        for body in (b"{}", b"x" * 3_000_000):
            reply = httpx.post(url + CHAT, content=body, trust_env=False)
            assert reply.status_code == 502
            error = reply.json()["error"]
            assert error["code"] == "upstream_unreachable"
            assert missing in error["message"]
            assert reply.headers["x-request-id"]
        reply = httpx.post(f"{url}/v1/messages", headers={"x-request-id": "mine"}, trust_env=False)
        assert json.loads(reply.content)["type"] == "error"
        assert reply.json()["request_id"] == "mine"


def test_a_name_that_is_none() -> None:
    with gateway("http://toolgap.invalid:1") as url:
        assert httpx.get(f"{url}/v1/models", trust_env=False, timeout=60).status_code == 502
