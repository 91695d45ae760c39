"""A gateway or an upstream that is killed within a stream, and many streams at once, all in processes of their own."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import begin, chunk, read_body, respond, serving
from test_proxy import CHAT
from test_service import process

from toolgap.bench.gateway import Arm, Plan, run
from toolgap.childserver import free_port

pytestmark = pytest.mark.slow


class Endless:
    """An upstream that begins a stream and goes on with it until its client has gone."""

    def __init__(self) -> None:
        self.left = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != CHAT:
            await respond(send, b"ok")
            return
        await read_body(receive)
        await begin(send)
        await chunk(send, b"data: 1\n\n")
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


def test_a_gateway_that_is_killed_breaks_its_streams_and_leaves_nothing_behind() -> None:
    upstream = Endless()
    with (
        serving(upstream, lifespan="off") as (direct, _),
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        with process("--upstream", direct) as first:
            port = str(httpx.URL(first.url).port)
            with client.stream("POST", first.url + CHAT, content=b"{}") as reply:
                parts = reply.iter_raw()
                assert next(parts) == b"data: 1\n\n"
                first.child.send_signal(signal.SIGKILL)
                with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                    next(parts)
            first.ended()
        assert upstream.left.wait(30)
        with process("--upstream", direct, "--port", port) as second:
            assert second.url == first.url
            assert client.get(f"{second.url}/v1/models").content == b"ok"


@contextmanager
def upstream_process(port: int) -> Iterator["subprocess.Popen[bytes]"]:
    child = subprocess.Popen([sys.executable, "-m", "toolgap.bench.gateway_child", "upstream", str(port)])
    try:
        with httpx.Client(trust_env=False) as client:
            while True:
                try:
                    client.get(f"http://127.0.0.1:{port}/health")
                    break
                except httpx.ConnectError:
                    assert child.poll() is None
        yield child
    finally:
        child.kill()
        child.wait()


ENDLESS = b'{"user":"one","max_tokens":100000,"events_per_s":100}'
SHORT = b'{"user":"one","max_tokens":4,"events_per_s":100}'


def test_an_upstream_that_is_killed_breaks_its_streams_and_is_used_again_once_it_is_back() -> None:
    port = free_port()
    with (
        process("--upstream", f"http://127.0.0.1:{port}") as own,
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        with (
            upstream_process(port) as first,
            client.stream("POST", own.url + CHAT, content=ENDLESS) as reply,
        ):
            parts = reply.iter_raw()
            assert next(parts).startswith(b"data: ")
            first.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                for _ in parts:
                    pass
        gone = client.post(own.url + CHAT, content=SHORT)
        assert (gone.status_code, gone.json()["error"]["code"]) == (502, "upstream_unreachable")
        with upstream_process(port):
            assert client.post(own.url + CHAT, content=SHORT).content.endswith(b"data: [DONE]\n\n")
        own.stop()
        endings = [line["ending"] for line in own.ended() if line["message"] == "exchange"]
    assert endings == ["upstream_broke", "refused", "complete"]


def test_500_streams_at_once_are_equal_to_the_direct_ones_and_each_is_watched(tmp_path: Path) -> None:
    plan = Plan(
        streams=500,
        requests=1,
        events=20,
        events_per_s=10,
        rounds=1,
        seed=1,
        arms=(Arm.DIRECT, Arm.RESTORING),
    )
    [trials] = run(plan, logs=tmp_path)
    assert [(trial.asked, trial.whole, trial.equal, trial.unwatched) for trial in trials] == [
        (500, 500, 500, 0)
    ] * 2
