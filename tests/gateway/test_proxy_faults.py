"""Clients that leave or do not read, and upstreams that break, hang or talk nonsense."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import httpx
import pytest
from servers import begin, chunk, gateway, is_check, raw, read_body, read_request, reset, respond, serving
from test_proxy import CHAT, ask, connect

pytestmark = pytest.mark.slow

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


def answering(handle: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """A handler of raw connections that answers the gateway's checks itself."""

    def serve(connection: socket.socket) -> None:
        head = read_request(connection)
        if is_check(head):
            connection.sendall(OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        else:
            handle(connection)

    return serve


@pytest.mark.parametrize("when", ["before the answer", "within the answer", "within the request"])
def test_a_client_that_leaves_takes_its_request_along(when: str) -> None:
    reached, left = threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            await respond(send)
            return
        if when == "within the request":
            await receive()
        else:
            await read_body(receive)
        if when == "within the answer":
            await begin(send)
            await chunk(send, b"data: 1\n\n")
        reached.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    with serving(app, lifespan="off") as (direct, _), gateway(direct) as url:
        client = connect(url)
        client.sendall(
            POST.replace(b"content-length: 2", b"content-length: 9") if "request" in when else POST
        )
        assert reached.wait(30)
        if when == "within the answer":
            assert client.recv(100)
        client.close()
        assert left.wait(30)


@pytest.mark.parametrize("framing", ["chunked", "content-length"])
@pytest.mark.parametrize("how", ["reset", "close", "garbage"])
def test_an_upstream_that_breaks_within_its_answer_breaks_the_clients(framing: str, how: str) -> None:
    seen = threading.Event()

    def handle(connection: socket.socket) -> None:
        if framing == "chunked":
            connection.sendall(STREAM + b"9\r\ndata: 1\n\n\r\n")
        else:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: 1\n\n")
        assert seen.wait(30)
        if how == "garbage" and framing == "chunked":
            connection.sendall(b"no chunk at all\r\n")
        elif how == "reset":
            reset(connection)

    with raw(answering(handle)) as direct, gateway(direct) as url:
        got = b""

        def read() -> None:
            nonlocal got
            with httpx.stream("POST", url + CHAT, content=b"{}", trust_env=False) as reply:
                for part in reply.iter_raw():
                    got += part
                    seen.set()

        with pytest.raises(httpx.RemoteProtocolError):
            read()
        assert got == b"data: 1\n\n"


@pytest.mark.parametrize("how", ["reset", "close", "garbage", "status"])
def test_an_upstream_that_breaks_before_its_answer_is_a_502_and_asked_once(how: str) -> None:
    asked = []

    def handle(connection: socket.socket) -> None:
        asked.append(1)
        match how:
            case "reset":
                reset(connection)
            case "garbage":
                connection.sendall(b"\x00\x01 this is no HTTP\r\n\r\n")
            case "status":
                connection.sendall(b"HTTP/1.1 777 Odd\r\ncontent-length: 0\r\n\r\n")

    with raw(answering(handle)) as direct, gateway(direct) as url:
        reply = httpx.post(url + CHAT, content=b"{}", trust_env=False)
    assert reply.status_code == 502
    assert reply.json()["error"]["code"] == "bad_upstream_answer"
    assert asked == [1]


def test_an_answer_that_is_silent_for_too_long_is_a_504_or_breaks() -> None:
    done = threading.Event()

    def handle(connection: socket.socket) -> None:
        assert done.wait(30)

    def handle_late(connection: socket.socket) -> None:
        connection.sendall(STREAM + b"1\r\nx\r\n")
        assert done.wait(30)

    try:
        with raw(answering(handle)) as direct, gateway(direct, read_timeout_s=0.2) as url:
            reply = httpx.post(url + CHAT, content=b"{}", trust_env=False, timeout=30)
            assert reply.status_code == 504
            done.set()
        done.clear()
        with raw(answering(handle_late)) as direct, gateway(direct, read_timeout_s=2) as url:
            with pytest.raises(httpx.RemoteProtocolError):
                httpx.post(url + CHAT, content=b"{}", trust_env=False, timeout=30)
            done.set()
    finally:
        done.set()


def test_events_that_are_none_pass() -> None:
    nonsense = b"data: {\n\ndata\n: \xff\xfe\x00\r\r\nevent: \n\n\n\ndata: [DONE]\n\ndata: more after the end"

    def handle(connection: socket.socket) -> None:
        connection.sendall(STREAM + b"%x\r\n%s\r\n0\r\n\r\n" % (len(nonsense), nonsense))

    with raw(answering(handle)) as direct, gateway(direct) as url:
        assert httpx.post(url + CHAT, content=b"{}", trust_env=False).content == nonsense


def test_an_answer_that_ends_with_its_connection_passes() -> None:
    def handle(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nall of it")

    with raw(answering(handle)) as direct, gateway(direct) as url:
        assert httpx.post(url + CHAT, content=b"{}", trust_env=False).content == b"all of it"


def test_an_answer_before_the_requests_end_passes() -> None:
    def handle(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 401 No\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        # Read on: else the kernel resets the connection, and may drop the answer with it.
        while connection.recv(65_536):
            pass

    with raw(answering(handle)) as direct, gateway(direct) as url:
        reply = httpx.post(url + CHAT, content=b"x" * 1_000_000, trust_env=False)
    assert (reply.status_code, reply.content) == (401, b"no")


ENDLESS = 64 * 2**20
ROOM = 24 * 2**20
"""More than the buffers of four sockets and two servers hold, less than what is sent."""


def test_a_client_that_does_not_read_stops_the_upstream() -> None:
    written = 0
    stuck, left = threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal written
        if scope["path"] == "/health":
            await respond(send)
            return
        await read_body(receive)
        await begin(send)
        part = b"x" * 65_536

        async def write() -> None:
            nonlocal written
            while written < ENDLESS:
                with anyio.move_on_after(1) as late:
                    await chunk(send, part)
                if late.cancelled_caught:
                    stuck.set()
                    await anyio.sleep_forever()
                written += len(part)

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            while (await receive())["type"] != "http.disconnect":
                pass
            left.set()
            group.cancel_scope.cancel()

    with serving(app, lifespan="off") as (direct, _), gateway(direct) as url:
        client = connect(url)
        client.sendall(POST)
        assert stuck.wait(60)
        assert written < ROOM
        client.close()
        assert left.wait(30)


def test_an_upstream_that_does_not_read_stops_the_client() -> None:
    release = threading.Event()

    def handle(connection: socket.socket) -> None:
        assert release.wait(60)

    with raw(answering(handle)) as direct, gateway(direct, max_body_bytes=2 * ENDLESS) as url:
        client = connect(url)
        client.sendall(POST.replace(b"content-length: 2", b"content-length: %d" % ENDLESS)[:-2])
        client.settimeout(1)
        sent = 0
        with suppress(TimeoutError):
            while sent < ENDLESS:
                sent += client.send(b"x" * 65_536)
        assert sent < ROOM
        client.close()
        release.set()


def test_pipelined_requests_are_answered_in_order() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await read_body(receive)
        await respond(send, scope["raw_path"])

    with serving(app, lifespan="off") as (direct, _), gateway(direct) as url:
        one = b"GET /%d HTTP/1.1\r\nhost: x\r\n%s\r\n"
        reply = ask(url, one % (1, b"") + one % (2, b"connection: close\r\n"))
    assert [part[-2:] for part in reply.split(b"HTTP/1.1 200 OK")[1:]] == [b"/1", b"/2"]
