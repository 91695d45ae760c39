"""The client of ``toolgap bench gateway``: many streams at once, and when each of their bytes came.

It does as little as it can while streams run: bytes and times are kept, and read afterwards.
"""

import asyncio
import hashlib
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast
from urllib.parse import urlsplit

END = b"0\r\n\r\n"
"""Ends a chunked body. An event ends with an empty line, so no chunk of one looks like it."""
PATH = "/v1/chat/completions"
VOLATILE = re.compile(rb'"(id|created)": ?("[^"]*"|\d+)')
"""What a real server makes anew in each answer."""


class Reply(NamedTuple):
    """One request and all that came back."""

    name: str
    sent_ns: int
    """On the monotonic clock, which all processes share."""
    times_ns: Sequence[int]
    parts: Sequence[bytes]
    """As they came, the head included."""
    is_whole: bool


class Stream(NamedTuple):
    """A streamed answer, read."""

    name: str
    sent_ns: int
    first_ns: int
    """When the first byte of the body was there."""
    events_ns: list[int]
    """When each event was there to its end."""
    last_ns: int
    digest: bytes


class _Client(asyncio.Protocol):
    def __init__(self) -> None:
        self.times_ns: list[int] = []
        self.parts: list[bytes] = []
        self._tail = b""
        self._done: asyncio.Future[bool] | None = None
        self._lost = False
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are of no class of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._finish(whole=False)

    def data_received(self, data: bytes) -> None:
        self.times_ns.append(time.monotonic_ns())
        self.parts.append(data)
        self._tail = data[-5:] if len(data) >= 5 else (self._tail + data)[-5:]
        if self._tail == END:
            self._finish(whole=True)
        elif len(self.parts) == 1 and not data.startswith(b"HTTP/1.1 200 "):
            # An error has another end, and none that is of interest.
            self._transport.close()

    def _finish(self, *, whole: bool) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(whole)

    async def ask(self, name: str, request: bytes) -> Reply:
        self.times_ns, self.parts, self._tail = [], [], b""
        self._done = asyncio.get_running_loop().create_future()
        sent_ns = time.monotonic_ns()
        if self._lost:
            return Reply(name, sent_ns, [], [], is_whole=False)
        self._transport.write(request)
        whole = await self._done
        return Reply(name, sent_ns, self.times_ns, self.parts, whole)

    def close(self) -> None:
        self._transport.close()


def request(url: str, body: bytes, key: str | None = None) -> bytes:
    """A request as it goes over the wire."""
    parts = urlsplit(url)
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {parts.path.rstrip('/')}{PATH} HTTP/1.1\r\nhost: {parts.netloc}\r\n{authorization}"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def play(
    url: str,
    bodies: Callable[[int, int], tuple[str, bytes]],
    *,
    streams: int,
    requests: int,
    delays_s: Sequence[float],
    key: str | None = None,
) -> list[Reply]:
    """Ask for all answers; as many at once as there are streams.

    Args:
        url: Whom to ask.
        bodies: Name and body of a request, by its stream and its number there.
        streams: How many connections; each asks for one answer after the other.
        requests: Of each.
        delays_s: Of each stream: how long it waits before its first request.
        key: An API key.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    loop = asyncio.get_running_loop()
    replies: list[Reply] = []

    async def one(stream: int) -> None:
        await asyncio.sleep(delays_s[stream])
        _, client = await loop.create_connection(_Client, host, parts.port or 80)
        try:
            for number in range(requests):
                name, body = bodies(stream, number)
                replies.append(await client.ask(name, request(url, body, key)))
        finally:
            client.close()

    async with asyncio.TaskGroup() as group:
        for stream in range(streams):
            group.create_task(one(stream))
    return replies


def read(reply: Reply, *, real: bool = False) -> Stream | None:
    """A reply's events and when they came; None if it is not whole, or no stream.

    Args:
        reply: What came.
        real: Leave what a real server makes anew each time out of the digest.
    """
    raw = b"".join(reply.parts)
    head, _, rest = raw.partition(b"\r\n\r\n")
    if not reply.is_whole or b"chunked" not in head.lower():
        return None
    body: list[bytes] = []
    body_ends: list[int] = []
    shifts: list[int] = []
    place, total = len(raw) - len(rest), 0
    while True:
        line_end = raw.find(b"\r\n", place)
        size = int(raw[place:line_end], 16)
        if size == 0:
            break
        start = line_end + 2
        body.append(raw[start : start + size])
        shifts.append(start - total)
        total += size
        body_ends.append(total)
        place = start + size + 2
    whole = b"".join(body)
    if not whole:
        return None
    part_ends, reached = [], 0
    for part in reply.parts:
        reached += len(part)
        part_ends.append(reached)

    def came_ns(offset: int) -> int:
        """When the body's byte at an offset was there."""
        in_raw = shifts[bisect_left(body_ends, offset + 1)] + offset
        return reply.times_ns[bisect_left(part_ends, in_raw + 1)]

    events_ns, end = [], whole.find(b"\n\n")
    while end >= 0:
        events_ns.append(came_ns(end + 1))
        end = whole.find(b"\n\n", end + 2)
    compared = VOLATILE.sub(b"", whole) if real else whole
    digest = hashlib.blake2b(compared, digest_size=16).digest()
    return Stream(reply.name, reply.sent_ns, came_ns(0), events_ns, reply.times_ns[-1], digest)
