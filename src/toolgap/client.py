"""Sync and async client of ``POST /hicache/prefetch``.

Both clients have the same methods. What a call sends and how its reply is read is said once, in
:class:`Call`; the classes only do the I/O::

    with Toolgap("http://127.0.0.1:30000") as toolgap:
        operation = toolgap.submit(input_ids=prefix)
        outcome = toolgap.wait(operation.operation_id)
"""

import asyncio
import contextlib
import math
import operator
import random
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

import httpx
import msgspec

from toolgap.protocol import (
    MAX_WAIT_S,
    PATH,
    Api,
    Cancel,
    Code,
    Command,
    Error,
    ErrorReply,
    OperationStatus,
    Overview,
    Resolve,
    Resolved,
    Status,
    Submit,
    Target,
)
from toolgap.retries import SHORTEST_PAUSE_S, Retries

DEFAULT_URL = "http://127.0.0.1:30000"

REQUEST_TIMEOUT_S = 40.0
"""Longer than a server takes to say that its scheduler does not answer (TOOLGAP_REPLY_TIMEOUT_S)."""

_LOOPBACK = ("127.0.0.1", "localhost", "::1")

LONGEST_POLL_S = 25.0
"""One long poll of :meth:`Toolgap.wait`: shorter than proxies usually allow."""

R = TypeVar("R", OperationStatus, Overview, Resolved)


class ToolgapError(Exception):
    """The server refused a call; ``error`` says why."""

    def __init__(self, error: Error, status_code: int) -> None:
        super().__init__(error.message)
        self.error = error
        self.status_code = status_code


class ToolgapUnreachable(Exception):  # noqa: N818 - named for what it says, as ConnectionRefused would be
    """No answer from Toolgap: the connection failed, or something else answered in its place.

    Attributes:
        status_code: Of the reply that is not Toolgap's (401 or 403: SGLang wants an API key; 404: the
            server runs without Toolgap); None if there was no reply.
    """

    def __init__(self, message: str, status_code: int | None = None) -> None:
        super().__init__(message)
        self.status_code = status_code


class PrefixFields(TypedDict, total=False):
    """Arguments that name a prefix: fields of :class:`toolgap.protocol.NamedPrefix`."""

    input_ids: Sequence[int] | None
    text: str | None
    request_id: str | None
    messages: Sequence[Mapping[str, Any]] | None
    api: Api | None
    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: Any
    system: Any
    thinking: Any
    output_config: Any
    chat_template_kwargs: Mapping[str, Any] | None
    reasoning_effort: Any
    reasoning: Any
    response_format: Mapping[str, Any] | None
    continue_final_message: bool | None
    task: str | None
    model: str | None
    extra_key: str | None
    cache_salt: str | None
    lora_path: str | None
    routed_dp_rank: int | None


class SubmitFields(PrefixFields, total=False):
    """Arguments of ``submit``: fields of :class:`toolgap.protocol.Submit`."""

    operation_id: str | None
    ttl_s: float | None
    expected_gap_s: float | None
    target: Target | None
    lease_s: float | None
    namespace: str | None
    force: bool | None


@dataclass(frozen=True)
class Call(Generic[R]):
    """One request to the endpoint and the type of its reply."""

    command: Command
    reply: type[R]

    def request(self, timeout_s: float) -> dict[str, Any]:
        """Arguments of ``httpx.Client.post`` beside the path."""
        poll_s = getattr(self.command, "wait_s", None) or 0.0
        return {
            "content": msgspec.json.encode(self.command),
            "headers": {"Content-Type": "application/json"},
            "timeout": httpx.Timeout(timeout_s, read=timeout_s + poll_s),
        }

    def read(self, response: httpx.Response) -> R:
        """The reply.

        Raises:
            ToolgapError: it is a refusal.
            ToolgapUnreachable: it is not Toolgap's.
        """
        try:
            if response.status_code == httpx.codes.OK:
                return msgspec.json.decode(response.content, type=self.reply)
            refusal = msgspec.json.decode(response.content, type=ErrorReply)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise ToolgapUnreachable(_foreign(response), response.status_code) from None
        raise ToolgapError(refusal.error, response.status_code)


def _foreign(response: httpx.Response) -> str:
    url = response.request.url
    match response.status_code:
        case 401 | 403 as status:
            return f"{url} answered {status}: it wants the server's API key (the admin key, if it has one)"
        case 404 | 405 as status:
            return (
                f"{url} answered {status}: the server runs without Toolgap; `toolgap doctor --url` says why"
            )
        case status:
            return f"{url} answered {status}, and not as Toolgap does: {response.text[:200]!r}"


def _named(fields: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(fields)
    if values.get("input_ids") is not None:
        values["input_ids"] = [operator.index(token) for token in values["input_ids"]]
    return values


def _resolve(fields: PrefixFields) -> Call[Resolved]:
    return Call(Resolve(**_named(fields)), Resolved)


def _submit(fields: SubmitFields) -> Submit:
    values = _named(fields)
    for field in ("ttl_s", "expected_gap_s", "lease_s"):
        _check_finite(field, values.get(field))
    return Submit(**values)


PASSING = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)
"""Failures of the connection after which a server may well answer."""


class Submission:
    """A submit and its retries.

    Attributes:
        call: What to send next.
        timeout_s: How long its reply may take.
    """

    def __init__(self, fields: SubmitFields, retry_for_s: float | None, timeout_s: float) -> None:
        submit = _submit(fields)
        self._gap_s = submit.expected_gap_s
        limit_s = max(self._gap_s or 0.0, 0.0) if retry_for_s is None else retry_for_s
        if not (math.isfinite(limit_s) and limit_s >= 0):
            raise ValueError(f"retry_for_s must be a finite number of seconds, 0 or more, not {limit_s}")
        if limit_s > 0 and submit.operation_id is None:
            # An attempt whose reply was lost may have been accepted: the next one must name the same operation.
            submit.operation_id = uuid.uuid4().hex
        self.call = Call(submit, OperationStatus)
        self.timeout_s = timeout_s
        self._retries = Retries(limit_s, time.monotonic, random.random)

    def pause_s(self, error: ToolgapError | ToolgapUnreachable) -> float | None:
        """How long to wait after a failed attempt; None if it was the last one."""
        match error:
            case ToolgapError():
                after_s = error.error.retry_after_s
            case ToolgapUnreachable():
                after_s = SHORTEST_PAUSE_S if isinstance(error.__cause__, PASSING) else None
        pause_s = None if after_s is None else self._retries.pause_s(after_s)
        if pause_s is not None:
            self.timeout_s = min(self.timeout_s, max(self._retries.left_s - pause_s, _SHORTEST_TIMEOUT_S))
            if self._gap_s is not None:
                gap_s = max(self._gap_s - self._retries.elapsed_s - pause_s, _SHORTEST_GAP_S)
                submit = msgspec.structs.replace(self.call.command, expected_gap_s=gap_s)
                self.call = Call(submit, OperationStatus)
        return pause_s


_SHORTEST_TIMEOUT_S = 1.0
"""For a reply that comes just after the limit of the retries."""

_SHORTEST_GAP_S = 0.001
"""What is left of a gap that is over: a gap is more than 0."""


def _status(operation_id: str, wait_s: float | None) -> Call[OperationStatus]:
    _check_finite("wait_s", wait_s)
    return Call(Status(operation_id=operation_id, wait_s=wait_s), OperationStatus)


def _check_finite(field: str, value: float | None) -> None:
    # JSON has no NaN and no infinity: they would arrive as null, as if nothing had been given.
    if value is not None and not math.isfinite(value):
        message = f"{field} must be a finite number of seconds, not {value}"
        raise ToolgapError(
            Error(code=Code.INVALID_FIELD, message=message, field=field), httpx.codes.BAD_REQUEST
        )


_OVERVIEW = Call(Status(), Overview)


def _cancel(operation_id: str) -> Call[OperationStatus]:
    return Call(Cancel(operation_id=operation_id), OperationStatus)


Wait = Generator[Call[OperationStatus], OperationStatus, OperationStatus]


def _wait(operation_id: str, timeout_s: float, clock: Callable[[], float]) -> Wait:
    """Long polls until the operation ends: yields calls, is sent their replies, returns the outcome."""
    end_s = clock() + timeout_s
    while True:
        left_s = max(0.0, end_s - clock())
        status = yield _status(operation_id, min(left_s, LONGEST_POLL_S, MAX_WAIT_S))
        if status.state.terminal:
            return status
        if left_s == 0.0:
            raise TimeoutError(f"operation {operation_id} is still {status.state} after {timeout_s:g} s")


@contextlib.contextmanager
def _transport(url: httpx.URL) -> Iterator[None]:
    """Turn httpx's errors into :class:`ToolgapUnreachable`."""
    try:
        yield
    except httpx.TransportError as error:
        what = str(error) or type(error).__name__
        raise ToolgapUnreachable(f"no answer from {url}: {what}") from error


def connection(url: str, api_key: str | None) -> dict[str, Any]:
    """Arguments of httpx's clients for a server.

    Raises:
        ValueError: the URL or the key cannot be used.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{url!r} is no URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} is no URL of a server: write one like {DEFAULT_URL}")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("the API key has characters that an HTTP header cannot carry")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    return {"base_url": url, "headers": headers, "trust_env": not is_local(url)}


def is_local(url: str) -> bool:
    """Whether a server runs on this machine: then a proxy named in the environment is not asked."""
    return httpx.URL(url).host in _LOOPBACK


class Toolgap:
    """A server's endpoint. A context manager; safe to share between threads.

    Args:
        url: The server, such as ``http://127.0.0.1:30000``.
        api_key: SGLang's admin API key if it has one, else its API key, else None.
        timeout_s: For connecting, and for the reply beyond what a call asks the server to wait.
        transport: Replaces httpx's own.

    Raises:
        ValueError: the URL or the key cannot be used.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._http = httpx.Client(**connection(url, api_key), transport=transport)

    def submit(self, *, retry_for_s: float | None = None, **fields: Unpack[SubmitFields]) -> OperationStatus:
        """Start restoring a prefix; answers at once. See :class:`SubmitFields` for the other arguments.

        Exactly one of ``input_ids`` and ``text`` is given. A refusal that says when to try again, and a
        connection that fails, are tried again until ``retry_for_s`` is over: no attempt begins later, and a
        repeated one waits for its reply a second longer at most. The last failure is raised as it is.

        Args:
            retry_for_s: For how long; 0 never tries again. Without it ``expected_gap_s`` is the limit, since
                a restore is of no use once the continuation is due; without that too, nothing is tried again.
            **fields: What to restore.

        Raises:
            ToolgapError: the server refused.
            ToolgapUnreachable: no answer from Toolgap.
            ValueError: ``retry_for_s`` is negative, infinite or no number.
        """
        submission = Submission(fields, retry_for_s, self._timeout_s)
        while True:
            try:
                return self._send(submission.call, submission.timeout_s)
            except (ToolgapError, ToolgapUnreachable) as error:
                pause_s = submission.pause_s(error)
                if pause_s is None:
                    raise
            time.sleep(pause_s)

    def resolve(self, **fields: Unpack[PrefixFields]) -> Resolved:
        """Which tokens a prefix is; restores nothing."""
        return self._send(_resolve(fields))

    def status(self, operation_id: str, wait_s: float | None = None) -> OperationStatus:
        """Where an operation stands; with ``wait_s`` once it has ended or that time is up."""
        return self._send(_status(operation_id, wait_s))

    def overview(self) -> Overview:
        """Active operations, recent outcomes and the engine."""
        return self._send(_OVERVIEW)

    def cancel(self, operation_id: str) -> OperationStatus:
        """Stop an operation's pending work. Idempotent; what has landed stays."""
        return self._send(_cancel(operation_id))

    def wait(self, operation_id: str, timeout_s: float = 60.0) -> OperationStatus:
        """The operation's outcome, as soon as it has ended.

        Raises:
            TimeoutError: it has not ended in time; it goes on.
        """
        steps = _wait(operation_id, timeout_s, time.monotonic)
        try:
            call = next(steps)
            while True:
                call = steps.send(self._send(call))
        except StopIteration as end:
            outcome: OperationStatus = end.value
            return outcome

    def close(self) -> None:
        """Close connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _send(self, call: Call[R], timeout_s: float | None = None) -> R:
        with _transport(self._http.base_url):
            response = self._http.post(PATH, **call.request(timeout_s or self._timeout_s))
        return call.read(response)


class AsyncToolgap:
    """:class:`Toolgap` with ``async`` methods, for one event loop."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(**connection(url, api_key), transport=transport)

    async def submit(
        self, *, retry_for_s: float | None = None, **fields: Unpack[SubmitFields]
    ) -> OperationStatus:
        """As :meth:`Toolgap.submit`."""
        submission = Submission(fields, retry_for_s, self._timeout_s)
        while True:
            try:
                return await self._send(submission.call, submission.timeout_s)
            except (ToolgapError, ToolgapUnreachable) as error:
                pause_s = submission.pause_s(error)
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    async def resolve(self, **fields: Unpack[PrefixFields]) -> Resolved:
        """As :meth:`Toolgap.resolve`."""
        return await self._send(_resolve(fields))

    async def status(self, operation_id: str, wait_s: float | None = None) -> OperationStatus:
        """As :meth:`Toolgap.status`."""
        return await self._send(_status(operation_id, wait_s))

    async def overview(self) -> Overview:
        """As :meth:`Toolgap.overview`."""
        return await self._send(_OVERVIEW)

    async def cancel(self, operation_id: str) -> OperationStatus:
        """As :meth:`Toolgap.cancel`."""
        return await self._send(_cancel(operation_id))

    async def wait(self, operation_id: str, timeout_s: float = 60.0) -> OperationStatus:
        """As :meth:`Toolgap.wait`."""
        steps = _wait(operation_id, timeout_s, time.monotonic)
        try:
            call = next(steps)
            while True:
                call = steps.send(await self._send(call))
        except StopIteration as end:
            outcome: OperationStatus = end.value
            return outcome

    async def close(self) -> None:
        """Close connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _send(self, call: Call[R], timeout_s: float | None = None) -> R:
        with _transport(self._http.base_url):
            response = await self._http.post(PATH, **call.request(timeout_s or self._timeout_s))
        return call.read(response)
