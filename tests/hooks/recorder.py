"""Toolgap's end of the wire for tests of what is sent: it takes every submit, and remembers it."""

import threading
from typing import Any

import httpx
import msgspec

from toolgap.client import Toolgap
from toolgap.protocol import CODES, Code, Error, ErrorReply, OperationStatus, State


class Recorder:
    """What was sent.

    Attributes:
        states: What submits are answered with, and then every status; ``restored`` if there is none left.
        refusals: What submits are refused with, before any is taken.
    """

    def __init__(self) -> None:
        self.commands: list[dict[str, Any]] = []
        self.states: dict[str, State] = {}
        self.refusals: list[Error] = []
        self.default = State.RESTORED
        self.reachable = True
        self.gate = threading.Event()
        self.gate.set()
        self._change = threading.Condition()

    @property
    def client(self) -> Toolgap:
        return Toolgap("http://toolgap.test", transport=httpx.MockTransport(self._answer))

    @property
    def submits(self) -> list[dict[str, Any]]:
        return self.sent("submit")

    @property
    def cancelled(self) -> list[str]:
        return [command["operation_id"] for command in self.sent("cancel")]

    def sent(self, action: str) -> list[dict[str, Any]]:
        return [command for command in self.commands if command["action"] == action]

    def wait_for_submits(self, count: int) -> None:
        with self._change:
            assert self._change.wait_for(lambda: len(self.submits) >= count, 60)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.gate.wait(60)
        if not self.reachable:
            raise httpx.ConnectError("nobody is there")
        command = msgspec.json.decode(request.content)
        with self._change:
            self.commands.append(command)
            self._change.notify_all()
        if command["action"] == "submit" and self.refusals:
            error = self.refusals.pop(0)
            reply = msgspec.json.encode(ErrorReply(error=error))
            return httpx.Response(CODES[error.code].status, content=reply)
        operation = command["operation_id"]
        if command["action"] == "cancel":
            self.states[operation] = State.CANCELLED
        status = OperationStatus(
            operation_id=operation,
            state=self.states.setdefault(operation, self.default),
            requested_tokens=100,
            aligned_tokens=96,
            resident_tokens=0,
            ttl_s=60,
            elapsed_s=0,
            namespace="n",
        )
        return httpx.Response(200, content=msgspec.json.encode(status))


def refusal(code: Code, retry_after_s: float | None = None) -> Error:
    return Error(code=code, message="no", retry_after_s=retry_after_s)
