"""Sync and async client of ``POST /hicache/prefetch``.

Both clients have the same methods. What a call sends and how its reply is read is said once, in
:mod:`toolgap.calls`; the classes only do the I/O::

    with Toolgap("http://127.0.0.1:30000") as toolgap:
        operation = toolgap.submit(input_ids=prefix)
        outcome = toolgap.wait(operation.operation_id)

Around a tool call, :meth:`Toolgap.restoring` does all that an agent needs, and never raises into it::

    with toolgap.restoring(request_id=completion.id, expected_gap_s=20.0):
        result = run_tool()
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Self, Unpack

import httpx

from toolgap import calls
from toolgap.calls import (
    DEFAULT_URL,
    REQUEST_TIMEOUT_S,
    Call,
    PrefixFields,
    R,
    Submission,
    SubmitFields,
    ToolgapError,
    ToolgapUnreachable,
    connection,
    is_local,
)
from toolgap.jobs import Tasks, Threads
from toolgap.protocol import PATH, OperationStatus, Overview, Resolved
from toolgap.restoring import AsyncRestoring, Restoring

__all__ = [
    "DEFAULT_URL",
    "REQUEST_TIMEOUT_S",
    "AsyncRestoring",
    "AsyncToolgap",
    "PrefixFields",
    "Restoring",
    "SubmitFields",
    "Toolgap",
    "ToolgapError",
    "ToolgapUnreachable",
    "connection",
    "is_local",
]


class Toolgap:
    """A server's endpoint. A context manager; safe to share between threads.

    Args:
        url: The server, such as ``http://127.0.0.1:30000``.
        api_key: SGLang's admin API key if it has one, else its API key, else None.
        timeout_s: For connecting, and for the reply beyond what a call asks the server to wait.
        strict: Whether :meth:`restoring` raises what goes wrong. (The other methods always do.)
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
        strict: bool = False,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._strict = strict
        self._jobs = Threads()
        self._http = httpx.Client(**connection(url, api_key), transport=transport)

    def submit(self, *, retry_for_s: float | None = None, **fields: Unpack[SubmitFields]) -> OperationStatus:
        """Start restoring a prefix; answers at once. See :class:`SubmitFields` for the other arguments.

        Exactly one of ``input_ids``, ``text``, ``messages`` and ``request_id`` is given. A refusal that says when to
        try again, and a connection that fails, are tried again until ``retry_for_s`` is over: no attempt begins
        later, and a repeated one waits for its reply a second longer at most. The last failure is raised as it is.

        Args:
            retry_for_s: For how long; 0 never tries again. Without it ``expected_gap_s`` is the limit, since
                a restore is of no use once the continuation is due; without that too, nothing is tried again.
            **fields: What to restore.

        Raises:
            ToolgapError: the server refused.
            ToolgapUnreachable: no answer from Toolgap.
            ValueError: ``retry_for_s`` is negative, infinite or no number.
        """
        return self._submit(Submission(fields, retry_for_s, self._timeout_s), time.sleep)

    def restoring(
        self, *, retry_for_s: float | None = None, strict: bool | None = None, **fields: Unpack[SubmitFields]
    ) -> Restoring:
        """A context manager around a tool call: submits on entry, and cancels if no continuation comes.

        See :mod:`toolgap.restoring` for what it does when. It never delays the block, and raises nothing into it.

        Args:
            retry_for_s: As in :meth:`submit`; the end of the block ends the retries too.
            strict: Whether each step waits for its reply and raises what goes wrong; by default as the client.
            **fields: What to restore, as in :meth:`submit`.

        Raises:
            TypeError: a submit has no such field.
        """
        return Restoring(
            self._submit,
            self._send,
            self._jobs,
            fields,
            retry_for_s,
            self._timeout_s,
            strict=self._strict if strict is None else strict,
        )

    def resolve(self, **fields: Unpack[PrefixFields]) -> Resolved:
        """Which tokens a prefix is; restores nothing."""
        return self._send(calls.resolving(fields))

    def status(self, operation_id: str, wait_s: float | None = None) -> OperationStatus:
        """Where an operation stands; with ``wait_s`` once it has ended or that time is up."""
        return self._send(calls.asking(operation_id, wait_s))

    def overview(self) -> Overview:
        """Active operations, recent outcomes and the engine."""
        return self._send(calls.OVERVIEW)

    def cancel(self, operation_id: str) -> OperationStatus:
        """Stop an operation's pending work. Idempotent; what has landed stays."""
        return self._send(calls.cancelling(operation_id))

    def wait(self, operation_id: str, timeout_s: float = 60.0) -> OperationStatus:
        """The operation's outcome, as soon as it has ended.

        Raises:
            TimeoutError: it has not ended in time; it goes on.
        """
        steps = calls.waiting(operation_id, timeout_s, time.monotonic)
        try:
            call = next(steps)
            while True:
                call = steps.send(self._send(call))
        except StopIteration as end:
            outcome: OperationStatus = end.value
            return outcome

    def close(self) -> None:
        """Close connections, once what :meth:`restoring` has started is done, or after two seconds."""
        self._jobs.close()
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _submit(self, submission: Submission, pause: Callable[[float], bool | None]) -> OperationStatus:
        """Try until it is accepted, refused for good, or the pause between two attempts ends with True."""
        while True:
            try:
                return self._send(submission.call, submission.timeout_s)
            except (ToolgapError, ToolgapUnreachable) as error:
                pause_s = submission.pause_s(error)
                if pause_s is None or pause(pause_s):
                    raise

    def _send(self, call: Call[R], timeout_s: float | None = None) -> R:
        with calls.transport_errors(self._http.base_url):
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
        strict: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._strict = strict
        self._jobs = Tasks()
        self._http = httpx.AsyncClient(**connection(url, api_key), transport=transport)

    async def submit(
        self, *, retry_for_s: float | None = None, **fields: Unpack[SubmitFields]
    ) -> OperationStatus:
        """As :meth:`Toolgap.submit`."""
        return await self._submit(Submission(fields, retry_for_s, self._timeout_s), asyncio.sleep)

    def restoring(
        self, *, retry_for_s: float | None = None, strict: bool | None = None, **fields: Unpack[SubmitFields]
    ) -> AsyncRestoring:
        """As :meth:`Toolgap.restoring`, for ``async with``."""
        return AsyncRestoring(
            self._submit,
            self._send,
            self._jobs,
            fields,
            retry_for_s,
            self._timeout_s,
            strict=self._strict if strict is None else strict,
        )

    async def resolve(self, **fields: Unpack[PrefixFields]) -> Resolved:
        """As :meth:`Toolgap.resolve`."""
        return await self._send(calls.resolving(fields))

    async def status(self, operation_id: str, wait_s: float | None = None) -> OperationStatus:
        """As :meth:`Toolgap.status`."""
        return await self._send(calls.asking(operation_id, wait_s))

    async def overview(self) -> Overview:
        """As :meth:`Toolgap.overview`."""
        return await self._send(calls.OVERVIEW)

    async def cancel(self, operation_id: str) -> OperationStatus:
        """As :meth:`Toolgap.cancel`."""
        return await self._send(calls.cancelling(operation_id))

    async def wait(self, operation_id: str, timeout_s: float = 60.0) -> OperationStatus:
        """As :meth:`Toolgap.wait`."""
        steps = calls.waiting(operation_id, timeout_s, time.monotonic)
        try:
            call = next(steps)
            while True:
                call = steps.send(await self._send(call))
        except StopIteration as end:
            outcome: OperationStatus = end.value
            return outcome

    async def close(self) -> None:
        """As :meth:`Toolgap.close`."""
        await self._jobs.close()
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _submit(
        self, submission: Submission, pause: Callable[[float], Awaitable[bool | None]]
    ) -> OperationStatus:
        """As :meth:`Toolgap._submit`."""
        while True:
            try:
                return await self._send(submission.call, submission.timeout_s)
            except (ToolgapError, ToolgapUnreachable) as error:
                pause_s = submission.pause_s(error)
                if pause_s is None or await pause(pause_s):
                    raise

    async def _send(self, call: Call[R], timeout_s: float | None = None) -> R:
        with calls.transport_errors(self._http.base_url):
            response = await self._http.post(PATH, **call.request(timeout_s or self._timeout_s))
        return call.read(response)
