"""What an observer gets, and that nothing it does reaches a stream."""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from servers import begin, chunk, gateway, raw, read_body, respond, serving
from test_proxy import CHAT
from test_proxy_faults import STREAM, answering

from toolgap.gateway.headers import Headers
from toolgap.gateway.observing import EVENT_BYTES, Asked, Ending, Observation, Observing, Place

pytestmark = pytest.mark.slow


class Recorder:
    """Writes down what it is shown; each step may be made to do something else."""

    def __init__(self, **instead: Callable[[], Any]) -> None:
        self.steps: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()
        self.done = threading.Event()
        self._instead = instead

    def place(self, request: Asked) -> Place | None:
        self._step("session", request.body)
        return Place(str(request.body))

    def asked(self, request: Asked) -> Observation | None:
        self._step("asked", request.path, request.body)
        return self

    def answering(self, upstream: str, status: int, headers: Headers) -> None:
        self._step("answering", upstream, status)

    def data(self, part: bytes) -> None:
        self._step("data", part)

    def ended(self, ending: Ending) -> None:
        try:
            self._step("ended", ending)
        finally:
            self.done.set()

    def _step(self, name: str, *what: Any) -> None:
        self.threads.add(threading.get_ident())
        self.steps.append((name, *what))
        if name in self._instead:
            self._instead[name]()


def fail() -> None:
    raise RuntimeError("the prompt")


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/health":
        await respond(send)
        return
    body = await read_body(receive)
    await begin(send)
    for part in (b"data: 1\n\n", b"data: 2\n\n"):
        await chunk(send, part)
    await send({"type": "http.response.body", "body": body[:100]})


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"toolgap_gateway_{name} ")))


def test_an_observer_gets_the_request_then_the_answer_in_order() -> None:
    recorder = Recorder()
    with serving(app, lifespan="off") as (direct, _), gateway(direct, observer=recorder) as url:
        httpx.post(f"{url}{CHAT}?key=1", content=b"{}", trust_env=False)
        assert recorder.done.wait(30)
    first, second, *data, last = recorder.steps
    assert first == ("asked", CHAT, b"{}")
    assert second == ("answering", direct, 200)
    assert {name for name, _ in data} == {"data"}
    assert b"".join(part for _, part in data) == b"data: 1\n\ndata: 2\n\n{}"
    assert last == ("ended", Ending.COMPLETE)
    assert len(recorder.threads) == 1
    assert threading.get_ident() not in recorder.threads


def test_other_paths_and_methods_are_not_shown_and_long_bodies_without_them() -> None:
    recorder = Recorder()
    with (
        serving(app, lifespan="off") as (direct, _),
        gateway(direct, observer=recorder, max_observed_body_bytes=10) as url,
    ):
        httpx.post(f"{url}/v1/embeddings", content=b"{}", trust_env=False)
        httpx.get(url + CHAT, trust_env=False)
        assert httpx.post(url + CHAT, content=b"x" * 11, trust_env=False).content.endswith(b"x" * 11)
        assert recorder.done.wait(30)
    assert recorder.steps[0] == ("asked", CHAT, None)


@pytest.mark.parametrize("step", ["asked", "answering", "data", "ended", "session"])
def test_an_observer_that_fails_is_counted_and_the_stream_is_whole(
    step: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(**{step: fail})
    with (
        serving(app, lifespan="off") as (direct, _),
        serving(app, lifespan="off") as (other, _),
        gateway(direct, other, observer=recorder, session_timeout_s=10) as url,
    ):
        for _ in range(2):
            reply = httpx.post(url + CHAT, content=b"{}", trust_env=False)
            assert reply.content == b"data: 1\n\ndata: 2\n\n{}"
        if step != "asked":
            assert recorder.done.wait(30)
        assert metric(url, "observer_errors_total") >= 1
    told = [record.getMessage() for record in caplog.records if "observer failed" in record.getMessage()]
    assert len(told) == 1
    assert "RuntimeError" in told[0]
    assert "the prompt" not in caplog.text


def test_an_observer_that_hangs_delays_nothing() -> None:
    release = threading.Event()
    recorder = Recorder(asked=lambda: release.wait(60), session=lambda: release.wait(60))
    try:
        with (
            serving(app, lifespan="off") as (direct, _),
            serving(app, lifespan="off") as (other, _),
            gateway(direct, other, observer=recorder, max_backlog_bytes=4 * EVENT_BYTES) as url,
        ):
            for _ in range(3):
                reply = httpx.post(url + CHAT, content=b"{}" * 200, trust_env=False)
                assert reply.content.startswith(b"data: 1\n\ndata: 2\n\n{}")
            assert metric(url, "unseen_exchanges_total") == 3
            release.set()
            assert recorder.done.wait(30)
    finally:
        release.set()
    assert ("ended", Ending.UNSEEN) in recorder.steps


def test_an_ending_says_what_broke() -> None:
    def handle(connection: socket.socket) -> None:
        connection.sendall(STREAM + b"1\r\nx\r\n")

    recorder = Recorder()
    with raw(answering(handle)) as direct, gateway(direct, observer=recorder) as url:
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(url + CHAT, content=b"{}", trust_env=False)
        assert recorder.done.wait(30)
    assert recorder.steps[-1] == ("ended", Ending.UPSTREAM_BROKE)


def test_a_place_is_waited_for_and_no_longer_than_told() -> None:
    release = threading.Event()
    request = Asked("id", "POST", CHAT, [], b"s")

    async def ask(recorder: Recorder, timeout_s: float) -> Place | None:
        observing = Observing(recorder, max_backlog_bytes=1000, session_timeout_s=timeout_s)
        place = await observing.place(request)
        release.set()
        await asyncio.to_thread(observing.close)
        return place

    assert asyncio.run(ask(Recorder(), 30)) == Place("b's'")
    release.clear()
    assert asyncio.run(ask(Recorder(session=lambda: release.wait(30)), 0.05)) is None
    assert asyncio.run(ask(Recorder(session=fail), 30)) is None
