"""The gateway as a service: its own routes, its log, its command, and how it stops."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import pytest
from servers import begin, chunk, gateway, read_body, respond, serving, unused_url
from test_proxy import CHAT
from typer.testing import CliRunner

from toolgap.cli import app as cli
from toolgap.terminal import Exit

pytestmark = pytest.mark.slow

SECRETS = ("sk-secret", "the prompt", "in-the-query")


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["path"] == "/health":
        await respond(send)
        return
    await read_body(receive)
    await respond(send, b"{}", status=401 if scope["path"] == "/v1/messages" else 200)


class Process:
    """A gateway of its own, started by the command."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "toolgap", "gateway", "--port", "0", *arguments]
        self.child: Any = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[dict[str, Any]] = []
        self._errors: Any = self.child.stderr
        self.url = ""
        for line in self._errors or ():
            self.lines.append(json.loads(line))
            if found := re.search(r"running on (http://[\d.:]+)", self.lines[-1]["message"]):
                self.url = found[1]
                break
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        self.lines.extend(json.loads(line) for line in self._errors)

    def stop(self) -> None:
        self.child.send_signal(signal.SIGTERM)

    def ended(self) -> list[dict[str, Any]]:
        self.child.wait(60)
        self._reader.join(30)
        return self.lines


@contextmanager
def process(*arguments: str) -> Iterator[Process]:
    started = Process(*arguments)
    try:
        yield started
    finally:
        started.child.kill()
        started.ended()
        started.child.stderr.close()


def test_the_log_is_json_and_has_neither_keys_nor_prompts() -> None:
    headers = {"authorization": "Bearer sk-secret", "x-api-key": "sk-secret", "x-request-id": "mine"}
    body = json.dumps({"messages": [{"role": "user", "content": "the prompt"}]})
    with serving(app, lifespan="off") as (direct, _), process("--upstream", direct) as own:
        for path in (CHAT, "/v1/messages"):
            httpx.post(f"{own.url}{path}?key=in-the-query", content=body, headers=headers, trust_env=False)
        httpx.get(f"{own.url}/v1/models", trust_env=False)
        own.stop()
        lines = own.ended()
    exchanges = [line for line in lines if line["message"] == "exchange"]
    assert [(line["path"], line["status"], line["ending"]) for line in exchanges] == [
        (CHAT, 200, "complete"),
        ("/v1/messages", 401, "complete"),
        ("/v1/models", 200, "complete"),
    ]
    assert [line["request_id"] == "mine" for line in exchanges] == [True, True, False]
    assert exchanges[0]["request_bytes"] == len(body)
    assert not any(secret in json.dumps(lines) for secret in SECRETS)


@pytest.mark.parametrize("patient", [True, False])
def test_a_stream_may_end_before_the_gateway_does(patient: bool) -> None:
    go = threading.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            await respond(send)
            return
        await read_body(receive)
        await begin(send)
        await chunk(send, b"first")
        await anyio.to_thread.run_sync(go.wait)
        await send({"type": "http.response.body", "body": b"last"})

    with (
        serving(slow, lifespan="off") as (direct, _),
        process("--upstream", direct, "--drain-s", "60" if patient else "1") as own,
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        with client.stream("POST", own.url + CHAT, content=b"{}") as reply:
            parts = reply.iter_raw()
            assert next(parts) == b"first"
            own.stop()
            if patient:
                # It has stopped to listen once a new connection is refused.
                while is_listening(own.url):
                    pass
                go.set()
                assert list(parts) == [b"last"]
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    list(parts)
                go.set()
        lines = own.ended()
    endings = [line["ending"] for line in lines if line["message"] == "exchange"]
    assert endings == ["complete" if patient else "cancelled"]


def is_listening(url: str) -> bool:
    parsed = httpx.URL(url)
    assert parsed.port is not None
    try:
        socket.create_connection((parsed.host, parsed.port), timeout=30).close()
    except ConnectionError:
        return False
    return True


def test_its_own_routes_are_about_itself() -> None:
    checked = threading.Event()

    async def upstream(scope: Any, receive: Any, send: Any) -> None:
        await respond(send, b"{}")
        checked.set()

    with serving(upstream, lifespan="off") as (direct, _), gateway(direct, unused_url()) as url:
        assert checked.wait(30)
        assert httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
        while (ready := httpx.get(f"{url}/readyz", trust_env=False)).status_code != 200:
            pass
        assert ready.json()["upstreams"][direct] == "up"
        httpx.post(url + CHAT, content=b"{}", trust_env=False)
        httpx.get(f"{url}/{'x' * 50}", trust_env=False)
        metrics = httpx.get(f"{url}/metrics", trust_env=False).text
    assert f'upstream_health{{health="up",upstream="{direct}"}} 1.0' in metrics
    assert f'exchanges_total{{ending="complete",path="{CHAT}",status="200"}} 1.0' in metrics
    assert 'path="other"' in metrics
    assert "xxxx" not in metrics


def test_it_is_not_ready_without_an_upstream_that_answers() -> None:
    missing = unused_url()
    with gateway(missing) as url:
        reply = httpx.get(f"{url}/readyz", trust_env=False)
        assert reply.status_code == 503
        assert reply.json()["upstreams"].keys() == {missing}
        assert httpx.get(f"{url}/healthz", trust_env=False).status_code == 200


def test_the_command_shows_its_settings_and_complains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = CliRunner()
    shown = runner.invoke(cli, ["gateway", "--upstream", "http://a:1", "--port", "7", "--print"])
    file = tmp_path / "gateway.toml"
    file.write_text(shown.stdout)
    monkeypatch.setenv("TOOLGAP_GATEWAY_CONFIG", str(file))
    monkeypatch.setenv("TOOLGAP_GATEWAY_HOST", "::1")
    again = json.loads(runner.invoke(cli, ["gateway", "--print", "--json"]).stdout)
    assert (again["port"], again["host"], again["upstreams"]) == (7, "::1", ["http://a:1"])
    monkeypatch.delenv("TOOLGAP_GATEWAY_CONFIG")
    wrong = runner.invoke(cli, ["gateway", "--print"])
    assert wrong.exit_code == Exit.USAGE
    assert "give --upstream" in wrong.stderr


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "toolgap", "gateway", "--upstream", unused_url(), "--port", port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == Exit.FAILED
    assert "address already in use" in ended.stderr
