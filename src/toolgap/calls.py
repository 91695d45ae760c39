"""What a call of ``POST /hicache/prefetch`` sends, and how its reply is read: no I/O.

Both clients share it; see :mod:`toolgap.client`.
"""

import contextlib
import math
import operator
import random
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypedDict, TypeVar, cast

import httpx
import msgspec

from toolgap.protocol import (
    MAX_WAIT_S,
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
        """Arguments of ``httpx.Client.post`` beside the path.

        Raises:
            TypeError: a field holds what JSON cannot.
            ValueError: a text is none, such as one with lone surrogates.
        """
        poll_s = getattr(self.command, "wait_s", None) or 0.0
        return {
            "content": msgspec.json.encode(self.command, enc_hook=_plain),
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


def _plain(value: Any) -> Any:
    """An SDK's object as it would send it itself: messages may hold what its last reply gave."""
    if callable(dump := getattr(value, "model_dump", None)):
        return dump(mode="json", exclude_unset=True)
    raise TypeError(f"a field holds a {type(value).__name__}, which JSON cannot: give plain values")


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


def frozen(fields: SubmitFields) -> SubmitFields:
    """The same fields as they are now, whatever their owner then does with his lists.

    Raises:
        TypeError: a field holds what JSON cannot.
        ValueError: a text is none, such as one with lone surrogates.
    """
    values = {
        name: msgspec.Raw(msgspec.json.encode(value, enc_hook=_plain))
        if isinstance(value, Sequence | Mapping) and not isinstance(value, str)
        else value
        for name, value in fields.items()
        if name != "input_ids"
    }
    if (token_ids := fields.get("input_ids")) is not None:
        values["input_ids"] = list(token_ids)
    return cast(SubmitFields, values)


def resolving(fields: PrefixFields) -> Call[Resolved]:
    """A call for a prefix's tokens."""
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


def asking(operation_id: str, wait_s: float | None) -> Call[OperationStatus]:
    """A call for an operation's status."""
    _check_finite("wait_s", wait_s)
    return Call(Status(operation_id=operation_id, wait_s=wait_s), OperationStatus)


def _check_finite(field: str, value: float | None) -> None:
    # JSON has no NaN and no infinity: they would arrive as null, as if nothing had been given.
    if value is not None and not math.isfinite(value):
        message = f"{field} must be a finite number of seconds, not {value}"
        raise ToolgapError(
            Error(code=Code.INVALID_FIELD, message=message, field=field), httpx.codes.BAD_REQUEST
        )


OVERVIEW = Call(Status(), Overview)


def cancelling(operation_id: str) -> Call[OperationStatus]:
    """A call that cancels an operation."""
    return Call(Cancel(operation_id=operation_id), OperationStatus)


Wait = Generator[Call[OperationStatus], OperationStatus, OperationStatus]


def waiting(operation_id: str, timeout_s: float, clock: Callable[[], float]) -> Wait:
    """Long polls until the operation ends: yields calls, is sent their replies, returns the outcome."""
    end_s = clock() + timeout_s
    while True:
        left_s = max(0.0, end_s - clock())
        status = yield asking(operation_id, min(left_s, LONGEST_POLL_S, MAX_WAIT_S))
        if status.state.terminal:
            return status
        if left_s == 0.0:
            raise TimeoutError(f"operation {operation_id} is still {status.state} after {timeout_s:g} s")


@contextlib.contextmanager
def transport_errors(url: httpx.URL) -> Iterator[None]:
    """Turn httpx's errors into :class:`ToolgapUnreachable`."""
    try:
        yield
    except httpx.RequestError as error:
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
