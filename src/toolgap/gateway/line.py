"""One connection to a server: HTTP/1.1 on asyncio, parsed by llhttp (httptools), as uvicorn does on its side.

httpx's own transport costs some 100 us for each part of a body; at thousands of parts a second that alone
would keep a core busy and every stream waiting.
"""

import asyncio
import re
import select
import ssl
from collections.abc import AsyncIterator
from typing import cast

import anyio
import httptools
import httpx

from toolgap.gateway.headers import Headers, is_chunked, value

READ_AHEAD_BYTES = 65_536
"""Of a body that nobody takes: then the server is kept from sending, but for what one read brings."""
MAX_HEAD_BYTES = 131_072
"""Of a response's status line and headers."""

_NO_TARGET = re.compile(rb"[\x00-\x20\x7f]")
_NO_VALUE = re.compile(rb"[\x00\r\n]")


async def connect(url: httpx.URL, tls: ssl.SSLContext | None, timeout_s: float | None) -> "Line":
    """A new connection to a URL's server.

    Raises:
        httpx.ConnectError, httpx.ConnectTimeout: there is none.
    """
    loop = asyncio.get_running_loop()
    port = url.port or (443 if tls else 80)
    try:
        with anyio.fail_after(timeout_s):
            _, line = await loop.create_connection(Line, url.host, port, ssl=tls)
    except TimeoutError as error:
        raise httpx.ConnectTimeout(str(error)) from error
    except OSError as error:
        raise httpx.ConnectError(str(error)) from error
    return line


class Line(asyncio.Protocol):
    """A connection for one exchange after the other.

    It is its own parser's protocol: ``on_...`` are llhttp's callbacks.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser | None = None
        """None while nothing is asked."""
        self._waiter: asyncio.Future[None] | None = None
        self._lost = False
        self._writing_paused = False
        self._read_timeout_s: float | None = None
        self._reset(is_head=False)

    def _reset(self, *, is_head: bool) -> None:
        self._is_head = is_head
        self._error: httpx.TransportError | None = None
        self._headers: Headers = []
        self._head_bytes = 0
        self._has_head = False
        self._informational = False
        self._until_close = False
        self._whole = False
        self._sent = False
        self._keep_alive = False
        self._parts: list[bytes] = []
        self._part_bytes = 0
        self._reading_paused = False

    async def ask(self, request: httpx.Request) -> tuple[int, Headers]:
        """Send a request with its body, and read on to the end of the response's head.

        Args:
            request: Its headers go as they are; ``extensions`` may have ``target`` and ``timeout``.

        Returns:
            Status and headers; the body follows by :meth:`parts`.

        Raises:
            httpx.TransportError: the connection broke, or what came is no HTTP.
            Exception: whatever the request's body raises.
        """
        headers: Headers = request.headers.raw
        target: bytes = request.extensions.get("target", request.url.raw_path)
        if _NO_TARGET.search(target) or any(_NO_VALUE.search(text) for _, text in headers):
            raise httpx.LocalProtocolError("the request cannot be written as HTTP")
        timeouts: dict[str, float | None] = request.extensions.get("timeout", {})
        self._read_timeout_s = timeouts.get("read")
        self._reset(is_head=request.method == "HEAD")
        self._parser = httptools.HttpResponseParser(self)
        lines = [b"%s %s HTTP/1.1\r\n" % (request.method.encode(), target)]
        lines += [b"%s: %s\r\n" % header for header in headers]
        self._transport.write(b"".join([*lines, b"\r\n"]))
        await self._send(request, headers, timeouts.get("write"))
        while not self._has_head:
            await self._more(self._read_timeout_s, httpx.ReadTimeout)
        return self._parser.get_status_code(), self._headers

    async def _send(self, request: httpx.Request, headers: Headers, timeout_s: float | None) -> None:
        framed = is_chunked(headers)
        stream = cast("httpx.AsyncByteStream", request.stream)
        async for part in stream:
            # A server may answer before it has read everything, and then close.
            if self._lost or self._whole:
                return
            if part:
                self._transport.write(b"%x\r\n%s\r\n" % (len(part), part) if framed else part)
            while self._writing_paused and not (self._lost or self._whole):
                await self._wait(timeout_s, httpx.WriteTimeout)
        if framed:
            self._transport.write(b"0\r\n\r\n")
        self._sent = True

    async def parts(self) -> AsyncIterator[bytes]:
        """The response's body as it comes.

        Raises:
            httpx.TransportError: it ends before its end.
        """
        while True:
            if self._parts:
                # What came while nobody looked goes on in one piece.
                data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts.clear()
                self._part_bytes = 0
                if self._reading_paused:
                    self._reading_paused = False
                    self._transport.resume_reading()
                yield data
            elif self._whole:
                return
            else:
                await self._more(self._read_timeout_s, httpx.ReadTimeout)

    def finish(self) -> bool:
        """The exchange is over; whether the connection can take another."""
        self._parser = None
        return self._whole and self._sent and self._keep_alive and not self._parts and not self._lost

    def is_fresh(self) -> bool:
        """Whether an idle connection is still open, and silent, as far as can be known."""
        if self._lost:
            return False
        # What the loop has not seen yet.
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def abort(self) -> None:
        """Close it at once. May be called again."""
        self._transport.abort()

    async def _more(self, timeout_s: float | None, on_timeout: type[httpx.TimeoutException]) -> None:
        if self._error is not None:
            raise self._error
        await self._wait(timeout_s, on_timeout)

    async def _wait(self, timeout_s: float | None, on_timeout: type[httpx.TimeoutException]) -> None:
        """Wait until anything happens on the connection."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self._fail, on_timeout("timed out")) if timeout_s else None
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        if isinstance(self._error, httpx.TimeoutException):
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: httpx.TransportError) -> None:
        if self._error is None and not self._whole:
            self._error = error
        self._wake()

    # The transport's callbacks.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio's."""
        # uvloop's are of no class of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """As asyncio's."""
        if self._parser is None or self._error is not None:
            # Nobody asked for it.
            self._lost = True
            self._transport.abort()
            return
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keep_alive = False
            self._fail(httpx.RemoteProtocolError(f"no HTTP: {type(error).__name__}"))
        if not self._has_head and self._head_bytes > MAX_HEAD_BYTES:
            self._fail(httpx.RemoteProtocolError("the head of the response is too long"))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio's."""
        self._lost = True
        if exc is not None:
            self._fail(httpx.ReadError(str(exc)))
        elif self._has_head and self._until_close and self._error is None:
            self._whole = True
        else:
            self._fail(httpx.RemoteProtocolError("the server closed the connection"))
        self._wake()

    def pause_writing(self) -> None:
        """As asyncio's."""
        self._writing_paused = True

    def resume_writing(self) -> None:
        """As asyncio's."""
        self._writing_paused = False
        self._wake()

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        """A response begins, or a second one that nobody asked for."""
        if self._whole:
            self._keep_alive = False

    def on_header(self, name: bytes, text: bytes) -> None:
        """A header, or a trailer, which goes no further."""
        if not self._has_head:
            self._headers.append((name, text))

    def on_headers_complete(self) -> None:
        """The head has ended."""
        if self._whole:
            return
        assert self._parser is not None
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._informational = True
            self._headers = []
            return
        self._has_head = True
        self._keep_alive = self._parser.should_keep_alive()
        self._until_close = value(self._headers, b"content-length") is None and not is_chunked(self._headers)
        # llhttp cannot be told that a response to HEAD has no body, whatever its headers say.
        self._whole = self._is_head

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        if self._whole:
            self._keep_alive = False
            return
        self._parts.append(data)
        self._part_bytes += len(data)
        if self._part_bytes > READ_AHEAD_BYTES and not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The response has ended."""
        if self._informational:
            self._informational = False
        else:
            self._whole = True
