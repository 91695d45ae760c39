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
