"""Which upstream gets a request: by its session, else the least busy, and never one that may have got it before."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import gateway, raw, read_body, reset, respond, serving, unused_url
from test_observing import Recorder
from test_proxy import CHAT
from test_proxy_faults import OK, answering

from toolgap.gateway.connections import Connections
from toolgap.gateway.upstreams import Health, Upstream, Upstreams, order

pytestmark = pytest.mark.slow

URLS = st.lists(st.integers(1, 9999).map("http://h:{}".format), min_size=1, max_size=6, unique=True)


def upstreams(urls: list[str]) -> list[Upstream]:
    return [Upstream(url, httpx.MockTransport(lambda _: httpx.Response(200))) for url in urls]


@settings(deadline=None)
@given(urls=URLS, key=st.text(max_size=9), data=st.data())
def test_a_session_stays_whatever_becomes_of_other_servers(urls: list[str], key: str, data: Any) -> None:
    first = order(upstreams(urls), key)[0].url
    kept = data.draw(st.lists(st.sampled_from(urls), unique=True))
    assert order(upstreams(data.draw(st.permutations(sorted({first, *kept})))), key)[0].url == first


@settings(deadline=None)
@given(urls=URLS, key=st.none() | st.text(max_size=9), health=st.data())
def test_the_healthy_come_first_and_nobody_is_left_out(urls: list[str], key: str | None, health: Any) -> None:
    servers = upstreams(urls)
    for one in servers:
        one.health = health.draw(st.sampled_from(Health))
        one.in_flight = health.draw(st.integers(0, 3))
    ordered = order(servers, key)
    assert sorted(one.url for one in ordered) == sorted(urls)
    ranks = [{Health.DRAINING: 1, Health.DOWN: 2}.get(one.health, 0) for one in ordered]
    assert ranks == sorted(ranks)
    if key is None:
        for rank in set(ranks):
            busy = [one.in_flight for one, of in zip(ordered, ranks, strict=True) if of == rank]
            assert busy == sorted(busy)


def test_sessions_spread_over_all_servers() -> None:
    servers = upstreams([f"http://h:{port}" for port in range(1, 5)])
    counts = dict.fromkeys((one.url for one in servers), 0)
    for number in range(4000):
        counts[order(servers, f"session {number}")[0].url] += 1
    assert all(850 < count < 1150 for count in counts.values())


@pytest.fixture
def pool() -> Iterator[list[str]]:
    """Three servers, each of which answers with its number."""
    with ExitStack() as stack:
        urls: list[str] = []
        for number in range(3):

            async def app(scope: Any, receive: Any, send: Any, own: bytes = b"%d" % number) -> None:
                await read_body(receive)
                await respond(send, own)

            urls.append(stack.enter_context(serving(app, lifespan="off"))[0])
        yield urls


def test_requests_of_a_session_go_to_one_server(pool: list[str]) -> None:
    with gateway(*pool, observer=Recorder(), session_timeout_s=10) as url:
        answers = {
            body: {httpx.post(url + CHAT, content=body, trust_env=False).content for _ in range(3)}
            for body in (b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h")
        }
    assert all(len(of_one) == 1 for of_one in answers.values())
    assert len(set.union(*answers.values())) > 1


def test_what_cannot_be_connected_to_is_passed_over(pool: list[str]) -> None:
    dead = [unused_url(), unused_url()]
    with gateway(*dead, pool[0], check_interval_s=1000) as url:
        for body in (b"{}", b"x" * 2_000_000):
            reply = httpx.post(url + CHAT, content=body, trust_env=False)
            assert (reply.status_code, reply.content) == (200, b"0")


def test_who_may_have_got_a_request_is_its_only_one() -> None:
    asked = []

    def handle(connection: socket.socket) -> None:
        asked.append(1)
        reset(connection)

    with (
        raw(answering(handle)) as one,
        raw(answering(handle)) as two,
        gateway(one, two) as url,
    ):
        assert httpx.post(url + CHAT, content=b"{}", trust_env=False).status_code == 502
    assert asked == [1]


def test_health_is_what_the_check_finds() -> None:
    status = 503
    waiting = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["path"] == "/base/live"
        await respond(send, status=status)

    def checking(url: str, timeout_s: float, changes: list[Health]) -> tuple[Upstreams, Upstream]:
        upstream = Upstream(url, Connections(max_idle=1, idle_s=1))
        return (
            Upstreams(
                [upstream],
                check_path="/live",
                check_interval_s=1,
                check_timeout_s=timeout_s,
                on_change=lambda one: changes.append(one.health),
            ),
            upstream,
        )

    async def main(url: str, silent: str) -> list[Health]:
        nonlocal status
        changes: list[Health] = []
        servers, one = checking(url, 30, changes)
        await servers.check(one)
        ready = [servers.is_ready]
        for answered in (404, 200):
            status = answered
            await servers.check(one)
        ready.append(servers.is_ready)
        assert ready == [False, True]
        for other, timeout_s in ((silent, 0.05), (unused_url(), 30)):
            checked, one = checking(other, timeout_s, changes)
            await checked.check(one)
            await checked.aclose()
        waiting.set()
        await servers.aclose()
        return changes

    def handle(connection: socket.socket) -> None:
        assert waiting.wait(30)
        connection.sendall(OK)

    with serving(app, lifespan="off") as (url, _), raw(handle) as silent:
        changes = anyio.run(main, f"{url}/base", silent)
    assert changes == [Health.DRAINING, Health.UP, Health.DOWN, Health.DOWN]
