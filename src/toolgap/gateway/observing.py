"""The seam between the proxy and whoever looks at what passes.

An observer runs in a thread of its own, and gets everything through a queue that the proxy never waits for.
So it can neither delay a stream nor alter or break it, whatever it does.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple, Protocol

import anyio

from toolgap.gateway.headers import Header, Headers

logger = logging.getLogger("toolgap.gateway")

EVENT_BYTES = 256
"""What an entry of the queue weighs beside what it carries."""


class Ending(StrEnum):
    """How an exchange ended."""

    COMPLETE = "complete"
    REFUSED = "refused"
    """The gateway answered itself: no upstream did, or the request was none to pass on."""
    CLIENT_LEFT = "client_left"
    UPSTREAM_BROKE = "upstream_broke"
    """The response ended before its end, and so did the client's."""
    CANCELLED = "cancelled"
    """The gateway stopped."""
    UNSEEN = "unseen"
    """The observer was too slow: the rest of this exchange passed it by."""


class Asked(NamedTuple):
    """A request as it came."""

    request_id: str
    method: str
    path: str
    """Percent-encoded, without the query."""
    headers: Headers
    """All of them, in order; names in lower case. Keys are among them: they go into no log."""
    body: bytes | None
    """The whole body; None where it is not kept: not JSON of an API's path, or over the limit."""


class Place(NamedTuple):
    """Where a request goes."""

    affinity: str
    """A name for its session, equal for all its requests: what an upstream is chosen by."""
    headers: tuple[Header, ...] = ()
    """What the upstream is told beside; the client's own header of a name comes before."""


class Observation(Protocol):
    """What follows a request, in order. Nothing follows ``ended``, and it always comes."""

    def answering(self, upstream: str, status: int, headers: Headers) -> None:
        """A response begins. ``upstream`` is the URL of the server that gives it."""

    def data(self, chunk: bytes) -> None:
        """Bytes of the response's body, as the upstream encoded them, cut wherever the network cut them."""

    def ended(self, ending: Ending) -> None:
        """The exchange is over."""


class Observer(Protocol):
    """Looks at what passes: POSTs to the paths of the four APIs.

    Every method is called in one and the same thread, and may raise anything.
    """

    def place(self, request: Asked) -> Place | None:
        """Where a request is to go; None if it may go anywhere.

        Called before ``asked``, with the same object, if there are several upstreams or ``asks_for_places``: the
        request waits for it, for a short time.
        """

    def asked(self, request: Asked) -> Observation | None:
        """A request has arrived, to the end of its body; None if what follows is of no interest."""


class Watch:
    """One exchange on its way to the observer. Its methods cost the caller an append to a queue."""

    def __init__(self, observing: "Observing", request: Asked) -> None:
        self._observing = observing
        self._observation: Observation | None = None
        self._passed_by = not observing.has_room_for(len(request.body or b""))
        if self._passed_by:
            observing.on_unseen()
            request = request._replace(body=None)
        observing.enqueue(lambda: self._begin(request), len(request.body or b""))

    def answering(self, upstream: str, status: int, headers: Headers) -> None:
        """As :meth:`Observation.answering`."""
        self._tell(lambda observation: observation.answering(upstream, status, headers))

    def data(self, chunk: bytes) -> None:
        """As :meth:`Observation.data`."""
        self._tell(lambda observation: observation.data(chunk), len(chunk))

    def ended(self, ending: Ending) -> None:
        """As :meth:`Observation.ended`."""
        last = Ending.UNSEEN if self._passed_by else ending
        self._observing.enqueue(lambda: self._run(lambda observation: observation.ended(last)), 0)

    def _tell(self, what: Callable[[Observation], None], size_bytes: int = 0) -> None:
        if self._passed_by:
            return
        if not self._observing.has_room_for(size_bytes):
            self._passed_by = True
            self._observing.on_unseen()
            return
        self._observing.enqueue(lambda: self._run(what), size_bytes)

    def _begin(self, request: Asked) -> None:
        self._observation = self._observing.observer.asked(request)

    def _run(self, what: Callable[[Observation], None]) -> None:
        if self._observation is not None:
            what(self._observation)


class Observing:
    """An observer, its thread, and the queue to it.

    Args:
        observer: Looks at what passes.
        max_backlog_bytes: Bodies that may lie in the queue; exchanges that find it full pass the observer by.
        session_timeout_s: The longest that a request waits for its place.
        asks_for_places: Whether requests wait for it even with a single upstream.
        on_error: Called in the observer's thread for each exception of the observer.
        on_unseen: Called for each exchange of which the observer missed a part.
    """

    def __init__(
        self,
        observer: Observer,
        *,
        max_backlog_bytes: int,
        session_timeout_s: float,
        asks_for_places: bool = False,
        on_error: Callable[[], None] = lambda: None,
        on_unseen: Callable[[], None] = lambda: None,
    ) -> None:
        self.observer = observer
        self.asks_for_places = asks_for_places
        self.on_unseen = on_unseen
        self._on_error = on_error
        self._max_backlog_bytes = max_backlog_bytes
        self._session_timeout_s = session_timeout_s
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], int] | None] = queue.SimpleQueue()
        # Each is written by one thread only, so that no lock is needed.
        self._put_bytes = 0
        self._done_bytes = 0
        self._told: set[tuple[str, str]] = set()
        self._thread = threading.Thread(target=self._work, name="toolgap-observer", daemon=True)
        self._thread.start()

    def watch(self, request: Asked) -> Watch:
        """Begin to show an exchange."""
        return Watch(self, request)

    async def place(self, request: Asked) -> Place | None:
        """Where a request is to go; None also if the observer fails, or does not say it in time."""
        answered = anyio.Event()
        loop = asyncio.get_running_loop()
        places: list[Place | None] = []

        def ask() -> None:
            try:
                places.append(self.observer.place(request))
            finally:
                # The loop is closed if the gateway stopped meanwhile.
                with suppress(RuntimeError):
                    loop.call_soon_threadsafe(answered.set)

        self.enqueue(ask, 0)
        with anyio.move_on_after(self._session_timeout_s):
            await answered.wait()
        return places[0] if places else None

    def has_room_for(self, size_bytes: int) -> bool:
        """Whether the queue takes so many bytes more."""
        backlog_bytes = self._put_bytes - self._done_bytes
        return backlog_bytes + size_bytes + EVENT_BYTES <= self._max_backlog_bytes

    def enqueue(self, job: Callable[[], object], size_bytes: int) -> None:
        """Let the observer's thread run this, after what it was given before."""
        size_bytes += EVENT_BYTES
        self._put_bytes += size_bytes
        self._queue.put((job, size_bytes))

    def close(self, timeout_s: float | None = None) -> None:
        """Let the observer see what it was given, then end its thread; it is left behind after the timeout."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            job, size_bytes = item
            try:
                job()
            except Exception as error:  # noqa: BLE001 - an observer must not end what it looks at
                self._failed(error)
            self._done_bytes += size_bytes

    def _failed(self, error: Exception) -> None:
        self._on_error()
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        # The exception's text may quote a prompt: its kind and place have to do.
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "unknown"
        key = (type(error).__name__, place)
        if key not in self._told:
            self._told.add(key)
            logger.error("the observer failed: %s at %s; what passes is not affected", *key)
