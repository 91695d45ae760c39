"""Connections to one server, each used by one request at a time and then kept open for the next."""

import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import anyio
import httpx


class _Idle(NamedTuple):
    line: httpx.AsyncHTTPTransport
    since_s: float


class Connections(httpx.AsyncBaseTransport):
    """As many connections as there are requests, at a cost that does not grow with their number.

    httpx's own pool looks at all its connections for each request: with some hundred of them that takes
    milliseconds. So here each connection is such a pool, of one.

    Neither proxies nor other settings are taken from the environment: only what is asked for is connected to.

    Args:
        max_idle: Connections kept open for requests to come.
        idle_s: For how long; shorter than the server keeps them, lest a request meet its closing.
    """

    def __init__(self, *, max_idle: int, idle_s: float) -> None:
        self._max_idle = max_idle
        self._idle_s = idle_s
        self._idle: deque[_Idle] = deque()
        """The one used last at the right."""
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    @property
    def idle(self) -> int:
        """How many are open and unused."""
        return len(self._idle)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; its response gives the connection back as it is closed.

        Raises:
            httpx.TransportError: as httpx's own transport.
        """
        line = self._idle.pop().line if self._idle else self._new(request.url.scheme)
        try:
            response = await line.handle_async_request(request)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await line.aclose()
            raise
        inner = response.stream
        assert isinstance(inner, httpx.AsyncByteStream)
        response.stream = _Body(inner, lambda: self._give_back(line))
        return response

    async def aclose(self) -> None:
        """Close what is idle, and what is in use as it comes back."""
        self._closed = True
        while self._idle:
            await self._idle.pop().line.aclose()

    def _new(self, scheme: str) -> httpx.AsyncHTTPTransport:
        if scheme == "https" and self._tls is None:
            self._tls = httpx.create_ssl_context(trust_env=False)
        limits = httpx.Limits(max_connections=1, keepalive_expiry=self._idle_s)
        # Without https no certificate is looked at, and reading those of all authorities takes long.
        return httpx.AsyncHTTPTransport(
            verify=self._tls or False, http1=True, http2=False, limits=limits, trust_env=False, retries=0
        )

    async def _give_back(self, line: httpx.AsyncHTTPTransport) -> None:
        if self._closed:
            await line.aclose()
            return
        now_s = time.monotonic()
        self._idle.append(_Idle(line, now_s))
        while self._idle and (
            len(self._idle) > self._max_idle or now_s - self._idle[0].since_s > self._idle_s
        ):
            await self._idle.popleft().line.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, inner: httpx.AsyncByteStream, give_back: Callable[[], Awaitable[None]]) -> None:
        self._inner = inner
        self._give_back: Callable[[], Awaitable[None]] | None = give_back

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._inner:
            yield chunk

    async def aclose(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            try:
                await self._inner.aclose()
            finally:
                await give_back()
