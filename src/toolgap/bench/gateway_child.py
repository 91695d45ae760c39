"""The other processes of ``toolgap bench gateway``: an upstream that streams like a model, and gateways.

usage: python -m toolgap.bench.gateway_child {upstream PORT | gateway PORT URL | restoring PORT URL}

The upstream is an HTTP server and no engine: its answers follow from the request alone, so that they are equal
whichever way they come, and it remembers when it wrote each event.
"""

import asyncio
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import msgspec

from toolgap.gateway import service
from toolgap.gateway.config import Config

WAIT_S = (0.05, 0.25)
"""Until the first event: uniform between these."""
JITTER = 0.5
"""Intervals between events are uniform, by so much of their mean around it."""
TIMES = b"/times"
"""Answers with the times of all streams since it was last asked, and forgets them."""
STREAMS = b"/v1/chat/completions"
MAX_REQUEST_BYTES = 1 << 20


class Script(NamedTuple):
    """What one stream is to be."""

    events: list[bytes]
    delays_s: list[float]
    """Before each event."""


def script(user: str, num_events: int, events_per_s: float) -> Script:
    """A stream of chat chunks as SGLang writes them: words, then a tool call, the usage, and the end."""
    rng = random.Random(f"stream/{user}")  # noqa: S311 - to be repeatable
    events = [_event(user, {"role": "assistant", "content": ""})]
    events += [_event(user, {"content": rng.choice(WORDS)}) for _ in range(num_events - 4)]
    call = {"id": f"call_{user}", "index": 0, "type": "function"}
    function = {"name": "run", "arguments": '{"command":"ls"}'}
    events.append(_event(user, {"tool_calls": [{**call, "function": function}]}))
    events.append(_event(user, {}, finish="tool_calls"))
    events.append(b"data: [DONE]\n\n")
    mean_s = 1 / events_per_s
    delays_s = [rng.uniform(*WAIT_S)]
    delays_s += [mean_s * rng.uniform(1 - JITTER, 1 + JITTER) for _ in range(len(events) - 1)]
    return Script(events, delays_s)


WORDS = (
    " the",
    " file",
    " returns",
    "\n",
    " self",
    "(",
    " of",
    " request",
    "é",
    " = ",
    " import",
    '"',
    " and",
)


def _event(user: str, delta: dict[str, Any], finish: str | None = None) -> bytes:
    whole = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None} | delta
    usage = {"prompt_tokens": 100, "total_tokens": 200, "completion_tokens": 100} if finish else None
    choice = {"index": 0, "delta": whole, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    body = {"id": user, "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "bench"}
    return b"data: " + msgspec.json.encode({**body, "choices": [choice], "usage": usage}) + b"\n\n"


class Streamer(asyncio.Protocol):
    """One connection of the upstream."""

    def __init__(self, times: dict[str, list[int]]) -> None:
        self._times = times
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio's."""
        # uvloop's are of no class of asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio's."""
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """As asyncio's."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if len(body) < length <= MAX_REQUEST_BYTES:
            return
        self._received = b""
        path = head.split(b" ", 2)[1]
        if path == TIMES:
            told = msgspec.json.encode(self._times)
            self._times.clear()
            self._answer(told)
        elif path == STREAMS:
            self._begin(body)
        elif head.startswith(b"POST "):
            # No Toolgap is here to restore anything.
            self._answer(b"{}", b"404 Not Found")
        else:
            self._answer(b"")

    def _answer(self, body: bytes, status: bytes = b"200 OK") -> None:
        self._transport.write(
            b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (status, len(body), body)
        )

    def _begin(self, body: bytes) -> None:
        now_ns = time.monotonic_ns()
        asked = msgspec.json.decode(body)
        made = script(asked["user"], asked["max_tokens"], asked.get("events_per_s", 25.0))
        times = self._times[asked["user"]] = [now_ns]
        self._next(iter(zip(made.events, made.delays_s, strict=True)), times, time.monotonic())

    def _next(self, rest: Iterator[tuple[bytes, float]], times: list[int], at_s: float) -> None:
        event, delay_s = next(rest, (b"", 0.0))
        if not event:
            self._transport.write(b"0\r\n\r\n")
            return
        at_s += delay_s

        def write() -> None:
            if len(times) == 1:
                self._transport.write(HEAD)
            times.append(time.monotonic_ns())
            self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
            self._next(rest, times, at_s)

        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, at_s - time.monotonic()), write)


HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


async def _serve_upstream(port: int) -> None:
    times: dict[str, list[int]] = {}
    server = await asyncio.get_running_loop().create_server(
        lambda: Streamer(times), "127.0.0.1", port, backlog=1024
    )
    async with server:
        await server.serve_forever()


def main(arguments: list[str]) -> bool:
    """Serve until a signal stops it; whether it could start."""
    what, port, *urls = arguments
    if what == "upstream":
        import uvloop

        uvloop.run(_serve_upstream(int(port)))
        return True
    return service.run(Config(upstreams=tuple(urls), port=int(port), restore=what == "restoring"))


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1:]) else 1)
