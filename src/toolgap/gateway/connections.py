"""Connections to one server, each used by one request at a time and then kept open for the next."""

import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import httpx

from toolgap.gateway.line import Line, connect


class _Idle(NamedTuple):
    line: Line
    since_s: float


class Connections(httpx.AsyncBaseTransport):
    """As many connections as there are requests, at a cost that does not grow with their number.

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
        line = self._take() or await self._new(request)
        try:
            status, headers = await line.ask(request)
        except BaseException:
            line.abort()
            raise
        return httpx.Response(status, headers=headers, stream=_Body(line, lambda: self._give_back(line)))

    async def aclose(self) -> None:
        """Close what is idle, and what is in use as it comes back."""
        self._closed = True
        while self._idle:
            self._idle.pop().line.abort()

    def _take(self) -> Line | None:
        self._drop_old()
        while self._idle:
            line = self._idle.pop().line
            if line.is_fresh():
                return line
            line.abort()
        return None

    async def _new(self, request: httpx.Request) -> Line:
        url = request.url
        if url.scheme == "https" and self._tls is None:
            # Without https no certificate is looked at, and reading those of all authorities takes long.
            self._tls = httpx.create_ssl_context(trust_env=False)
        timeout_s = request.extensions.get("timeout", {}).get("connect")
        return await connect(url, self._tls if url.scheme == "https" else None, timeout_s)

    def _give_back(self, line: Line) -> None:
        if not line.finish() or self._closed:
            line.abort()
            return
        self._idle.append(_Idle(line, time.monotonic()))
        self._drop_old()
        while len(self._idle) > self._max_idle:
            self._idle.popleft().line.abort()

    def _drop_old(self) -> None:
        oldest_s = time.monotonic() - self._idle_s
        while self._idle and self._idle[0].since_s < oldest_s:
            self._idle.popleft().line.abort()


class _Body(httpx.AsyncByteStream):
    def __init__(self, line: Line, give_back: Callable[[], None]) -> None:
        self._line = line
        self._give_back: Callable[[], None] | None = give_back

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._line.parts()

    async def aclose(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
