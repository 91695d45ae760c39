"""Connections are used again, closed when idle for long, and never shared by two requests."""

import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest
from servers import begin, chunk, raw, read_body, read_request, serving, unused_url

from toolgap.gateway.connections import Connections
from toolgap.gateway.line import MAX_HEAD_BYTES

ports: set[int] = set()


async def app(scope: Any, receive: Any, send: Any) -> None:
    ports.add(scope["client"][1])
    await read_body(receive)
    await begin(send)
    await chunk(send, b"data")
    await send({"type": "http.response.body"})


def get(url: str) -> httpx.Request:
    return httpx.Request("GET", url)


async def read(response: httpx.Response) -> bytes:
    stream: Any = response.stream
    body = b"".join([part async for part in stream])
    await response.aclose()
    return body


def test_a_connection_is_used_again_and_by_one_request_at_a_time() -> None:
    async def main(url: str) -> None:
        connections = Connections(max_idle=2, idle_s=60)
        ports.clear()
        for _ in range(3):
            assert await read(await connections.handle_async_request(get(url))) == b"data"
        assert (len(ports), connections.idle) == (1, 1)
        several = [await connections.handle_async_request(get(url)) for _ in range(4)]
        assert (len(ports), connections.idle) == (4, 0)
        for response in several:
            assert await read(response) == b"data"
        assert connections.idle == 2
        await connections.aclose()
        assert connections.idle == 0

    with serving(app, lifespan="off") as (url, _):
        anyio.run(main, url)


def test_what_is_idle_for_long_is_closed() -> None:
    async def main(url: str) -> None:
        connections = Connections(max_idle=9, idle_s=0)
        several = [await connections.handle_async_request(get(url)) for _ in range(3)]
        for response in several:
            await read(response)
        assert connections.idle <= 1
        await connections.aclose()

    with serving(app, lifespan="off") as (url, _):
        anyio.run(main, url)


def test_an_answer_that_is_left_closes_its_connection() -> None:
    left = threading.Event()

    def handle(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\npart")
        assert connection.recv(1) == b""
        left.set()

    async def main(url: str) -> None:
        connections = Connections(max_idle=2, idle_s=60)
        response = await connections.handle_async_request(get(url))
        stream: AsyncIterator[bytes] = aiter(response.stream)  # type: ignore[arg-type]
        assert await anext(stream) == b"part"
        await response.aclose()
        assert await anyio.to_thread.run_sync(left.wait, 30)
        await connections.aclose()

    with raw(handle) as url:
        anyio.run(main, url)


def test_what_cannot_be_connected_to_is_told_and_leaves_nothing() -> None:
    async def main() -> None:
        connections = Connections(max_idle=2, idle_s=60)
        with pytest.raises(httpx.ConnectError):
            await connections.handle_async_request(get(unused_url()))
        assert connections.idle == 0

    anyio.run(main)


def answers(*replies: bytes) -> Any:
    """A handler that gives these answers to one request after the other on one connection."""

    def handle(connection: socket.socket) -> None:
        for reply in replies:
            read_request(connection)
            connection.sendall(reply)
        connection.recv(1)

    return handle


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("reply", "method", "body", "again"),
    [
        (b"HTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + OK + b"content-length: 1\r\n\r\nx", "GET", b"x", True),
        (OK + b"content-length: 9\r\n\r\n", "HEAD", b"", True),
        (OK + b"transfer-encoding: chunked\r\n\r\n1;a=b\r\nx\r\n0\r\nt: 1\r\n\r\n", "GET", b"x", True),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", "GET", b"", True),
        (OK + b"content-length: 1\r\nconnection: close\r\n\r\nx", "GET", b"x", False),
        (OK + b"content-length: 1\r\n\r\nx" + OK, "GET", b"x", False),
        (OK + b"content-length: 9\r\n\r\nsurplus", "HEAD", b"", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx", "GET", b"x", False),
    ],
)
def test_an_answer_is_read_to_its_end_and_no_further(
    reply: bytes, method: str, body: bytes, again: bool
) -> None:
    async def main(url: str) -> None:
        connections = Connections(max_idle=2, idle_s=60)
        response = await connections.handle_async_request(httpx.Request(method, url))
        assert response.headers.get("link") is None
        assert response.headers.get("t") is None
        assert await read(response) == body
        assert connections.idle == again
        await connections.aclose()

    with raw(answers(reply)) as url:
        anyio.run(main, url)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        OK + b"x: " + b"y" * 2 * MAX_HEAD_BYTES,
        OK + b"content-length: x\r\n\r\n",
        OK + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        b"x",
    ],
)
def test_an_answer_that_is_none_is_told(reply: bytes) -> None:
    async def main(url: str) -> None:
        connections = Connections(max_idle=2, idle_s=60)
        with pytest.raises(httpx.RemoteProtocolError):
            await connections.handle_async_request(get(url))
        assert connections.idle == 0

    def handle(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(reply)
        if reply == b"x":
            return
        connection.recv(1)

    with raw(handle) as url:
        anyio.run(main, url)


@pytest.mark.parametrize("unasked", [b"", b"HTTP/1.1 408 Late\r\n\r\n"])
def test_a_connection_that_the_server_ended_is_not_used_again(unasked: bytes) -> None:
    ended, served = threading.Event(), []

    def handle(connection: socket.socket) -> None:
        served.append(read_request(connection))
        connection.sendall(OK + b"content-length: 1\r\n\r\nx")
        if len(served) == 1:
            assert ended.wait(30)
            connection.sendall(unasked)
            connection.shutdown(socket.SHUT_WR)
            ended.clear()
        connection.recv(1)

    async def main(url: str) -> None:
        connections = Connections(max_idle=2, idle_s=60)
        await read(await connections.handle_async_request(get(url)))
        ended.set()
        # Without the loop: what has arrived is seen even if the loop has not told it yet.
        while ended.is_set():
            pass
        assert await read(await connections.handle_async_request(get(url))) == b"x"
        await connections.aclose()

    with raw(handle) as url:
        anyio.run(main, url)
    assert len(served) == 2


def test_a_request_that_is_no_http_is_not_sent() -> None:
    async def main(url: str) -> None:
        connections = Connections(max_idle=2, idle_s=60)
        for target, headers in ((b"/a b", {}), (b"/", {"x": "a\r\nb: c"})):
            request = httpx.Request("GET", url, headers=headers, extensions={"target": target})
            with pytest.raises(httpx.LocalProtocolError):
                await connections.handle_async_request(request)
        await connections.aclose()

    with serving(app, lifespan="off") as (url, _):
        anyio.run(main, url)


def test_a_server_that_does_not_read_in_time_is_told() -> None:
    done = threading.Event()

    def handle(connection: socket.socket) -> None:
        assert done.wait(30)

    async def main(url: str) -> None:
        connections = Connections(max_idle=2, idle_s=60)
        body = b"x" * 64 * 2**20
        request = httpx.Request("POST", url, content=body, extensions={"timeout": {"write": 0.2}})
        with pytest.raises(httpx.WriteTimeout):
            await connections.handle_async_request(request)
        assert connections.idle == 0

    with raw(handle) as url:
        try:
            anyio.run(main, url)
        finally:
            done.set()
