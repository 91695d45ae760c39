"""The command line against a server that answers as told: for the tests of its commands."""

import functools
import json
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner, Result

from toolgap import terminal
from toolgap.cli import app
from toolgap.client import Toolgap
from toolgap.protocol import OperationStatus, Reason, State


def operation(state: State = State.RESTORING, reason: Reason | None = None, **fields: Any) -> OperationStatus:
    values = {"operation_id": "op-1", "requested_tokens": 1000, "aligned_tokens": 992, "resident_tokens": 0}
    values |= {"ttl_s": 60.0, "elapsed_s": 0.25, "namespace": "0123456789abcdef", **fields}
    return OperationStatus(state=state, reason=reason, **values)  # type: ignore[arg-type]


RESTORED = operation(State.RESTORED, Reason.COMPLETE)

Reply = Callable[[dict[str, Any]], httpx.Response]


class Server:
    """Answers as told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.reply: Reply = lambda _: reply(RESTORED)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = {name: value for name, value in json.loads(request.content).items() if value is not None}
        self.bodies.append(body)
        self.headers.append(request.headers)
        return self.reply(body)


def serving(monkeypatch: pytest.MonkeyPatch) -> Server:
    """Let the commands' client talk to a server of the test's own."""
    server = Server()
    monkeypatch.setattr(
        terminal, "Toolgap", functools.partial(Toolgap, transport=httpx.MockTransport(server))
    )
    return server


def reply(value: Any, status: int = 200) -> httpx.Response:
    return httpx.Response(status, content=msgspec.json.encode(value))


def run(*arguments: str, environ: dict[str, str] | None = None, stdin: str | bytes | None = None) -> Result:
    clean = {"TOOLGAP_URL": None, "TOOLGAP_API_KEY": None, "TOOLGAP_DEBUG": None, "COLUMNS": "100"}
    return CliRunner(env={**clean, **(environ or {})}).invoke(app, arguments, input=stdin)


def words(text: str) -> str:
    """The text without its wrapping and the frame that typer draws around complaints."""
    return " ".join(text.replace("│", " ").split())
