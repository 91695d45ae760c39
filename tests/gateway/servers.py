"""Real servers for the gateway's tests: uvicorn in a thread, and sockets that misbehave."""

import asyncio
import logging
import re
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn

from toolgap.gateway.app import application
from toolgap.gateway.config import Config
from toolgap.gateway.logs import expected
from toolgap.gateway.observer import Recorder
from toolgap.gateway.observing import Observer

App = Callable[[Any, Any, Any], Awaitable[None]]

logging.getLogger("uvicorn.error").addFilter(expected)


class Server(uvicorn.Server):
    """Tells when it has begun to listen."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.up.set()

    def on_loop(self, function: Callable[[], Any]) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(function)


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[tuple[str, Server]]:
    """Serve an application; its URL."""
    bound = socket.create_server(("127.0.0.1", 0))
    own = {
        **{"log_config": None, "ws": "none", "access_log": False, "timeout_graceful_shutdown": 1},
        **{"server_header": False, "date_header": False, "proxy_headers": False},
    }
    server = Server(uvicorn.Config(app, **{**own, **options}))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    assert server.up.wait(30)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(30)
        bound.close()
        assert not thread.is_alive()


@contextmanager
def gateway(
    *urls: str, observer: Observer | None = None, recording: Recorder | None = None, **settings: Any
) -> Iterator[str]:
    """A gateway in front of these; its URL."""
    config = Config(upstreams=urls, **settings)
    with serving(application(config, observer, recording)) as (url, _):
        yield url


@contextmanager
def raw(handle: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that gives each connection to a function, in a thread; connections are closed after it."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        # The gateway may close first.
        with connection, suppress(OSError):
            handle(connection)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
            threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        # A close alone does not wake who accepts.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join(10)
        for thread in threads:
            thread.join(10)


SMALL_BYTES = 65_536


def read_request(connection: socket.socket) -> bytes:
    """A request's head and, if it is small, its body.

    A connection that is closed with something unread is reset, and that may overtake what was sent before.
    """
    data = b""
    while b"\r\n\r\n" not in data:
        data += _received(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    told = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    if told is not None and int(told[1]) <= SMALL_BYTES:
        while len(body) < int(told[1]):
            body += _received(connection)
    return head + b"\r\n\r\n" + body


def _received(connection: socket.socket) -> bytes:
    if not (data := connection.recv(65_536)):
        raise ConnectionError("no request")
    return data


def is_check(head: bytes) -> bool:
    """Whether it is the gateway's own look at the upstream's health."""
    return head.startswith(b"GET /health ")


def reset(connection: socket.socket) -> None:
    """Close with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def unused_url() -> str:
    """The URL of a port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


async def read_body(receive: Any) -> bytes:
    """An ASGI request's body."""
    body = b""
    while True:
        message = await receive()
        assert message["type"] == "http.request"
        part: bytes = message["body"]
        body += part
        if not message["more_body"]:
            return body


async def respond(
    send: Any, body: bytes = b"", status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    """A whole ASGI response."""
    own = headers if headers is not None else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body})


async def begin(send: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """The head of a stream of events."""
    own = headers if headers is not None else [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": own})


async def chunk(send: Any, body: bytes) -> None:
    """A part of it."""
    await send({"type": "http.response.body", "body": body, "more_body": True})
