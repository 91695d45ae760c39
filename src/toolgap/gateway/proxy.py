"""Passes requests to an upstream and its answers back, as they are, while both are still under way.

It speaks ASGI and httpx's transport directly: a client's conveniences (redirects, cookies, decoding, default
headers) are just what a proxy must not have.
"""

import logging
import re
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.abc
import httpx
from starlette.types import Message, Receive, Scope, Send

from toolgap.gateway import refusals
from toolgap.gateway.headers import Headers, end_to_end, has_body, to_upstream, value
from toolgap.gateway.observing import Asked, Ending, Observing, Place, Watch
from toolgap.gateway.refusals import Refusal
from toolgap.gateway.upstreams import Health, Upstream, Upstreams

logger = logging.getLogger("toolgap.gateway")

API_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Whose bodies an observer gets."""

_SAFE_ID = re.compile(rb"[\w.:-]{1,128}", re.ASCII)


class ClientLeftError(Exception):
    """The client is gone, with its body or without."""


class TooLargeError(Exception):
    """The body is over the limit."""


@dataclass(kw_only=True)
class Exchange:
    """What became of one request: for log and metrics, so without anything of its content."""

    request_id: str
    method: str
    path: str
    started_s: float = field(default_factory=time.monotonic)
    upstream: str | None = None
    status: int | None = None
    refusal: Refusal | None = None
    ending: Ending = Ending.CANCELLED
    sent_bytes: int = 0
    """Of the request's body."""
    received_bytes: int = 0
    """Of the response's body."""
    headers_s: float | None = None
    """Until the response began."""
    elapsed_s: float = 0.0
    failovers: int = 0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the proxy allows. Times are in seconds; None is for ever."""

    max_body_bytes: int
    max_observed_body_bytes: int
    """Longer bodies pass, and the observer does not get them."""
    connect_timeout_s: float | None
    read_timeout_s: float | None
    write_timeout_s: float | None

    @property
    def timeouts(self) -> dict[str, float | None]:
        """In the form of httpx's transports."""
        return {
            "connect": self.connect_timeout_s,
            "read": self.read_timeout_s,
            "write": self.write_timeout_s,
            "pool": None,
        }


class RequestBody(httpx.AsyncByteStream):
    """A request's body on its way up, read no faster than the upstream takes it.

    Args:
        receive: ASGI's.
        max_bytes: The limit of all.
        keep_bytes: How much is kept to be shown; 0 keeps nothing.
    """

    def __init__(self, receive: Receive, *, max_bytes: int, keep_bytes: int) -> None:
        self.total_bytes = 0
        self.touched = False
        """Whether it has begun to go to an upstream."""
        self.finished = anyio.Event()
        self.on_finished: Callable[[], None] = lambda: None
        """Called as its last part has arrived."""
        self._receive = receive
        self._max_bytes = max_bytes
        self._keep_bytes = keep_bytes
        self._kept: list[bytes] | None = [] if keep_bytes else None
        self._unsent: list[bytes] = []

    @property
    def kept(self) -> bytes | None:
        """All of it, if it has come to its end within the limit."""
        return b"".join(self._kept) if self._kept is not None and self.finished.is_set() else None

    async def read_ahead(self) -> None:
        """Read as much as may be kept, before it is sent.

        Raises:
            ClientLeftError, TooLargeError: as while it is sent.
        """
        while not self.finished.is_set() and self._kept is not None:
            self._unsent.append(await self._next())

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self.touched = True
        while self._unsent:
            if chunk := self._unsent.pop(0):
                yield chunk
        while not self.finished.is_set():
            if chunk := await self._next():
                yield chunk

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        chunk: bytes = message.get("body", b"")
        self.total_bytes += len(chunk)
        if self.total_bytes > self._max_bytes:
            raise TooLargeError
        if self._kept is not None:
            self._kept.append(chunk)
            if self.total_bytes > self._keep_bytes:
                self._kept = None
        if not message.get("more_body", False):
            self.finished.set()
            self.on_finished()
        return chunk


class Proxy:
    """The proxy as an ASGI application.

    Args:
        upstreams: Whom the requests are for.
        limits: What is allowed.
        observing: Who is shown what passes, if anybody.
        on_begin: Called as a request arrives.
        on_end: Called as its exchange ends, whatever the ending.
    """

    def __init__(
        self,
        upstreams: Upstreams,
        limits: Limits,
        *,
        observing: Observing | None = None,
        on_begin: Callable[[], None] = lambda: None,
        on_end: Callable[[Exchange], None] = lambda _: None,
    ) -> None:
        self.upstreams = upstreams
        self.limits = limits
        self.observing = observing
        self._on_begin = on_begin
        self._on_end = on_end
        self._running = 0
        self._idle = anyio.Event()

    async def idle(self) -> None:
        """Wait until no exchange is under way. New ones must not come any more."""
        while self._running:
            self._idle = anyio.Event()
            await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "websocket":
            # A server without a library for WebSockets hands its request over as HTTP: then it is told 501.
            await send({"type": "websocket.close", "code": 1003, "reason": "no WebSockets here"})
            return
        headers: Headers = scope["headers"]
        told = value(headers, b"x-request-id") or b""
        exchange = Exchange(
            request_id=told.decode() if _SAFE_ID.fullmatch(told) else uuid.uuid4().hex,
            method=scope["method"],
            path=scope["raw_path"].decode("ascii", "replace"),
        )
        self._on_begin()
        self._running += 1
        passage = _Passage(self, exchange, scope, receive, send)
        try:
            await passage.run()
        finally:
            exchange.sent_bytes = passage.body.total_bytes
            exchange.elapsed_s = time.monotonic() - exchange.started_s
            if passage.watch is not None:
                passage.watch.ended(exchange.ending)
            self._on_end(exchange)
            self._running -= 1
            if not self._running:
                self._idle.set()

    def is_shown(self, exchange: Exchange) -> bool:
        """Whether the observer gets this one with its body."""
        return self.observing is not None and exchange.method == "POST" and exchange.path in API_PATHS


def _kind(error: Exception) -> str:
    return type(error).__name__


class _Passage:
    """One request on its way through the proxy."""

    def __init__(self, proxy: Proxy, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        self.proxy = proxy
        self.exchange = exchange
        self.scope = scope
        self.headers: Headers = scope["headers"]
        self.watch: Watch | None = None
        self._receive = receive
        self._send = send
        self._place: Place | None = None
        self._asked_for: Asked | None = None
        self._answering = False
        self._finished = False
        self.body = RequestBody(
            receive,
            max_bytes=proxy.limits.max_body_bytes,
            keep_bytes=proxy.limits.max_observed_body_bytes if proxy.is_shown(exchange) else 0,
        )
        if not has_body(self.headers):
            self.body.finished.set()

    async def run(self) -> None:
        problem = self._problem()
        if problem is not None:
            await self._refuse(*problem)
            return
        async with anyio.create_task_group() as group:
            group.start_soon(self._leave_with_the_client, group.cancel_scope)
            await self._guarded()
            group.cancel_scope.cancel()

    async def _leave_with_the_client(self, scope: anyio.CancelScope) -> None:
        # Until then whoever reads the body sees the client leave.
        await self.body.finished.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        # A server says that of a response's end, too.
        if not self._finished:
            self.exchange.ending = Ending.CLIENT_LEFT
            scope.cancel()

    def _problem(self) -> tuple[Refusal, str] | None:
        limit = self.proxy.limits.max_body_bytes
        length = value(self.headers, b"content-length")
        if not self.scope["raw_path"].startswith(b"/") and self.scope["raw_path"] != b"*":
            return (
                Refusal.BAD_TARGET,
                "this is a gateway to configured upstreams, not a proxy to anywhere: send a path, not a URL",
            )
        if (value(self.headers, b"upgrade") or b"").lower() == b"websocket":
            return Refusal.NO_UPGRADE, "the gateway passes no WebSockets: ask for a stream of events instead"
        if length is not None and length.isdigit() and int(length) > limit:
            return self._too_large()
        return None

    def _too_large(self) -> tuple[Refusal, str]:
        limit = self.proxy.limits.max_body_bytes
        return Refusal.TOO_LARGE, f"the body is larger than the gateway's limit of {limit} bytes"

    async def _guarded(self) -> None:
        """Pass it on; whatever fails becomes an answer, or the end of one that has begun."""
        try:
            await self._pass_on()
        except ClientLeftError:
            self.exchange.ending = Ending.CLIENT_LEFT
        except TooLargeError:
            await self._refuse(*self._too_large())
        except httpx.TimeoutException as error:
            await self._refuse(Refusal.TIMEOUT, f"{self._asked} gave no answer in time ({_kind(error)})")
        except httpx.ConnectError:
            await self._refuse(Refusal.UNREACHABLE, f"{self._asked} cannot be connected to: is it up?")
        except httpx.TransportError as error:
            await self._refuse(Refusal.BAD_UPSTREAM, f"{self._asked} broke off its answer ({_kind(error)})")
        except Exception as error:  # noqa: BLE001 - one exchange must not end the others
            # A traceback would quote what the exception says, and that may quote what was asked.
            where = traceback.extract_tb(error.__traceback__)[-1]
            logger.error("a fault in the gateway: %s at %s:%s", _kind(error), where.filename, where.lineno)
            await self._refuse(Refusal.FAULT, "a fault in the gateway: its log says where")

    @property
    def _asked(self) -> str:
        return f"the upstream {self.exchange.upstream}"

    async def _pass_on(self) -> None:
        self._place = await self._find_place()
        if self.body.finished.is_set():
            self._show()
        else:
            self.body.on_finished = self._show
        upstream, response = await self._first_answer(
            self.proxy.upstreams.order(None if self._place is None else self._place.affinity)
        )
        upstream.in_flight += 1
        try:
            if not 200 <= response.status_code <= 599:
                raise httpx.RemoteProtocolError(f"status {response.status_code}")
            self._show()
            await self._pass_back(upstream, response)
        finally:
            upstream.in_flight -= 1
            with anyio.CancelScope(shield=True):
                await response.aclose()

    async def _find_place(self) -> Place | None:
        observing = self.proxy.observing
        if observing is None or not self.proxy.is_shown(self.exchange):
            return None
        if len(self.proxy.upstreams.all) == 1 and not observing.asks_for_places:
            return None
        await self.body.read_ahead()
        self._asked_for = self._request()
        return await observing.place(self._asked_for)

    def _show(self) -> None:
        observing = self.proxy.observing
        if observing is not None and self.watch is None and self.proxy.is_shown(self.exchange):
            self.watch = observing.watch(self._asked_for or self._request())

    def _request(self) -> Asked:
        exchange = self.exchange
        return Asked(exchange.request_id, exchange.method, exchange.path, self.headers, self.body.kept)

    async def _first_answer(self, upstreams: list[Upstream]) -> tuple[Upstream, httpx.Response]:
        """The answer of the first server that can be connected to.

        Raises:
            httpx.TransportError: none can, or one could be and then failed. That one may have got the request,
                so nobody else is asked.
        """
        for place, upstream in enumerate(upstreams, 1):
            self.exchange.upstream = upstream.url
            upstream.in_flight += 1
            try:
                return upstream, await upstream.transport.handle_async_request(self._request_to(upstream))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                self.proxy.upstreams.found(upstream, Health.DOWN)
                if place == len(upstreams) or self.body.touched:
                    raise
                self.exchange.failovers += 1
            finally:
                upstream.in_flight -= 1
        raise AssertionError("there is at least one upstream")

    def _request_to(self, upstream: Upstream) -> httpx.Request:
        client = self.scope.get("client")
        headers = to_upstream(
            self.headers,
            host=upstream.host,
            client=client[0].encode() if client else None,
            scheme=self.scope["scheme"].encode(),
            request_id=self.exchange.request_id.encode(),
        )
        for name, text in self._place.headers if self._place is not None else ():
            if value(headers, name) is None:
                headers.append((name, text))
        raw_path = self.scope["raw_path"]
        target = raw_path if raw_path == b"*" else upstream.target(raw_path, self.scope["query_string"])
        return httpx.Request(
            self.exchange.method,
            upstream.parsed,
            headers=headers,
            stream=self.body if has_body(self.headers) else httpx.ByteStream(b""),
            # httpx would rewrite the path of a URL: dots, escapes.
            extensions={"timeout": self.proxy.limits.timeouts, "target": target},
        )

    async def _pass_back(self, upstream: Upstream, response: httpx.Response) -> None:
        exchange, watch = self.exchange, self.watch
        headers = end_to_end(response.headers.raw)
        await self._start(response.status_code, headers)
        if watch is not None:
            watch.answering(upstream.url, response.status_code, headers)
        stream: Any = response.stream
        async for chunk in stream:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
            exchange.received_bytes += len(chunk)
            # Shown after it has gone: nobody waits for what an observer makes of it.
            if watch is not None:
                watch.data(chunk)
        await self._finish(b"")
        exchange.ending = Ending.COMPLETE

    async def _refuse(self, refusal: Refusal, message: str) -> None:
        exchange = self.exchange
        exchange.refusal = refusal
        if self._answering:
            # A response without its end: the server closes the connection, and the client sees that it broke.
            exchange.ending = Ending.UPSTREAM_BROKE
            return
        exchange.ending = Ending.REFUSED
        reply = refusals.answer(refusal, message, path=exchange.path, request_id=exchange.request_id)
        await self._start(reply.status, reply.headers)
        await self._finish(reply.body)

    async def _start(self, status: int, headers: Headers) -> None:
        self._answering = True
        self.exchange.status = status
        self.exchange.headers_s = time.monotonic() - self.exchange.started_s
        start: Message = {"type": "http.response.start", "status": status, "headers": headers}
        await self._send(start)

    async def _finish(self, rest: bytes) -> None:
        self._finished = True
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})
