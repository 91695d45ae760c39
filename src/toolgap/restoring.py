"""A restore around a tool call: ``with client.restoring(...)`` and ``async with client.restoring(...)``.

Both forms have the same life:

- **Entering** submits, beside the tool call and not before it: no reply is waited for.
- **Leaving at the end of the block** leaves the operation alone. The continuation comes now, and joins a read
  that goes on; what has landed is there for it.
- **Leaving by an exception**, a cancelled task's and Ctrl-C's included, cancels the operation: no continuation
  comes. What has landed stays ordinary host cache. An error that the agent reports to its model is caught inside
  the block, or announced by ``keep()``.
- ``abandon()`` cancels it at once, where a continuation is known not to come.
- ``refresh(...)`` submits more of the prefix, such as the tool's result, in place of what was submitted.

Nothing of this raises into the agent, for a missed restore is no error: the continuation is served as ever. Why it
was missed is in ``error`` and, at level INFO, in the log of ``toolgap.client``. With ``strict`` every step waits for
its reply and raises what went wrong; only a failed cancel after an exception never takes that one's place.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, NamedTuple, Self, Unpack, cast

from toolgap import calls
from toolgap.calls import Call, Submission, SubmitFields, ToolgapError, ToolgapUnreachable
from toolgap.jobs import Tasks, Threads
from toolgap.protocol import PREFIX_FIELDS, PROMPT_FIELDS, Code, OperationStatus, Submit

logger = logging.getLogger("toolgap.client")

SHORTEST_GAP_S = 0.001
"""What is left of an expected gap that is over."""

_NO_ROOM = (Code.TOO_MANY_OPERATIONS, Code.HOST_BUDGET, Code.LEASE_BUDGET)
"""Refusals that an earlier operation of the same agent may be the cause of."""


class _Plan(NamedTuple):
    """A submit to come."""

    operation_id: str
    fields: SubmitFields
    problem: Exception | None
    """Why it cannot be sent."""


class _Record:
    """What both forms know of their operations. Does no I/O.

    Attributes:
        operation_id: Of the latest submit, also before its reply; a refresh changes it once it is accepted.
        last_status: The last that the server said of it; None before its first reply.
        error: Why the latest step failed; None if it did not.
    """

    def __init__(
        self, fields: SubmitFields, retry_for_s: float | None, timeout_s: float, *, strict: bool
    ) -> None:
        _check_names(fields)
        self.operation_id = fields.get("operation_id") or uuid.uuid4().hex
        self.last_status: OperationStatus | None = None
        self.error: Exception | None = None
        self._fields = fields
        self._retry_for_s = retry_for_s
        self._timeout_s = timeout_s
        self._strict = strict
        self._begun_s = time.monotonic()
        self._entered = False
        self._kept = False
        self._abandoned = False
        self._answered = False
        """Whether the server may know the operation."""
        self._open: set[str] = set()
        """Operations that may still read, or hold a lease."""

    @property
    def outcome(self) -> OperationStatus | None:
        """The operation's terminal record; None until ``status()``, or the submit's own reply, has brought it."""
        status = self.last_status
        return status if status is not None and status.state.terminal else None

    def keep(self) -> None:
        """Say that a continuation will come, however the block ends."""
        self._kept = True

    def _enter(self) -> None:
        if self._entered:
            raise RuntimeError("a restore is entered once: call restoring() for the next tool call")
        self._entered = True
        self._begun_s = time.monotonic()

    def _extend(self, fields: SubmitFields) -> None:
        """Fields of the next submit: those given take the place of the earlier ones."""
        _check_names(fields)
        earlier: dict[str, Any] = dict(self._fields)
        way = {name for name in PREFIX_FIELDS if fields.get(name) is not None}
        if way and not way & {name for name in PREFIX_FIELDS if earlier.get(name) is not None}:
            for name in (*PREFIX_FIELDS, *PROMPT_FIELDS, "api"):
                earlier.pop(name, None)
        if "request_id" in way:
            # They are the recorded request's own.
            for name in ("extra_key", "cache_salt", "lora_path"):
                earlier.pop(name, None)
        earlier.pop("operation_id", None)
        gap_s = earlier.get("expected_gap_s")
        if gap_s is not None:
            earlier["expected_gap_s"] = max(gap_s - (time.monotonic() - self._begun_s), SHORTEST_GAP_S)
        self._fields = cast(SubmitFields, {**earlier, **fields})
        self._begun_s = time.monotonic()
        self._abandoned = False

    def _plan(self, operation_id: str) -> _Plan:
        """The next submit as it is now: a job begins later, and the agent goes on with its messages meanwhile."""
        try:
            self._fields = calls.frozen(self._fields)
        except Exception as error:  # noqa: BLE001 - kept for the agent, which goes on
            return _Plan(operation_id, {}, error)
        return _Plan(operation_id, {**self._fields, "operation_id": operation_id}, None)

    def _submission(self, plan: _Plan, retry_for_s: float | None) -> Submission:
        if plan.problem is not None:
            raise plan.problem
        return Submission(plan.fields, retry_for_s, self._timeout_s)

    def _told(self, status: OperationStatus) -> None:
        if status.operation_id == self.operation_id:
            self.last_status = status
        if status.state.terminal and not status.lease_s:
            self._open.discard(status.operation_id)

    def _accepted(self, status: OperationStatus) -> None:
        self.operation_id = status.operation_id
        self.error = None
        self._answered = True
        self._open.add(status.operation_id)
        self._told(status)
        logger.debug("restoring %s: %s", status.operation_id, status.state)

    def _not_accepted(self, operation_id: str, error: Exception) -> None:
        self._failed("not restored", error)
        if isinstance(error, ToolgapUnreachable) and error.status_code is None:
            # Its reply may be what was lost.
            self._open.add(operation_id)
            self._answered |= operation_id == self.operation_id

    def _failed(self, what: str, error: Exception) -> None:
        self.error = error
        # A refusal is an answer, an unreachable server an operator's affair, and anything else a caller's mistake.
        level = logging.INFO if isinstance(error, ToolgapError | ToolgapUnreachable) else logging.WARNING
        logger.log(level, "%s: %s", what, error)

    def _not_cancelled(self, operation_id: str, error: Exception) -> None:
        if isinstance(error, ToolgapError) and error.error.code is Code.UNKNOWN_OPERATION:
            self._open.discard(operation_id)
        else:
            self._failed("not cancelled", error)

    def _ends_unused(self, *, raised: bool) -> bool:
        return self._abandoned or (raised and not self._kept)


def _check_names(fields: SubmitFields) -> None:
    if unknown := fields.keys() - set(Submit.__struct_fields__):
        raise TypeError(f"a submit has no field {', '.join(sorted(unknown))}")


def _is_no_room(error: Exception) -> bool:
    return isinstance(error, ToolgapError) and error.error.code in _NO_ROOM


class Restoring(_Record):
    """The sync form: see the module. Made by :meth:`toolgap.client.Toolgap.restoring`."""

    def __init__(
        self,
        submit: Callable[[Submission, Callable[[float], bool]], OperationStatus],
        send: Callable[[Call[OperationStatus]], OperationStatus],
        jobs: Threads,
        fields: SubmitFields,
        retry_for_s: float | None,
        timeout_s: float,
        *,
        strict: bool,
    ) -> None:
        super().__init__(fields, retry_for_s, timeout_s, strict=strict)
        self._submit = submit
        self._send = send
        self._jobs = jobs
        self._job: threading.Thread | None = None
        self._left = threading.Event()

    def __enter__(self) -> Self:
        self._enter()
        plan = self._plan(self.operation_id)
        try:
            self._run(lambda: self._start(plan))
        except BaseException:
            self._leave(raised=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(raised=kind is not None)

    def refresh(self, **fields: Unpack[SubmitFields]) -> None:
        """Submit again, in place of what was submitted: with more of the prefix, or to have it back.

        Fields that are not given stay as they were. The earlier operation is cancelled when the new one is accepted,
        which goes on with its read, and stands in for it otherwise.
        """
        self._extend(fields)
        plan = self._plan(fields.get("operation_id") or uuid.uuid4().hex)
        self._run(lambda: self._replace(plan))

    def abandon(self) -> None:
        """Cancel: no continuation will come."""
        self._abandoned = True
        self._run(self._cancel)

    def status(self, wait_s: float | None = None) -> OperationStatus | None:
        """Ask where the operation stands; with ``wait_s`` once it has ended or that time is up.

        Waits for the submit's reply first. Also answers after the block, such as with ``used_tokens`` when the
        continuation has begun.

        Returns:
            The answer, or the last one if there is none now; None if the operation was never accepted.
        """
        if self._job is not None:
            self._job.join()
        if self._answered:
            try:
                self._told(self._send(calls.asking(self.operation_id, wait_s)))
            except Exception as error:
                self._failed("no status", error)
                if self._strict:
                    raise
        return self.last_status

    def _leave(self, *, raised: bool) -> None:
        self._left.set()
        if self._ends_unused(raised=raised):
            try:
                self._job = self._jobs.start(self._cancel, self._job)
            except RuntimeError as error:
                self._failed("not cancelled", error)

    def _run(self, job: Callable[[], None]) -> None:
        self.error = None
        try:
            self._job = self._jobs.start(job, self._job)
        except RuntimeError as error:
            self._failed("not restored", error)
            if self._strict:
                raise
            return
        if self._strict:
            self._job.join()
            if self.error is not None:
                raise self.error

    def _start(self, plan: _Plan) -> None:
        try:
            self._accepted(self._submit(self._submission(plan, self._retry_for_s), self._left.wait))
        except Exception as error:  # noqa: BLE001 - kept for the agent, which goes on
            self._not_accepted(plan.operation_id, error)

    def _replace(self, plan: _Plan) -> None:
        earlier = set(self._open)
        if earlier:
            try:
                self._accepted(self._submit(self._submission(plan, 0.0), self._left.wait))
            except Exception as error:  # noqa: BLE001 - kept for the agent, which goes on
                if not _is_no_room(error):
                    self._not_accepted(plan.operation_id, error)
                    return
                self._cancel(earlier)
                self._start(plan)
            else:
                self._cancel(earlier)
        else:
            self._start(plan)

    def _cancel(self, operation_ids: Iterable[str] | None = None) -> None:
        for operation_id in list(self._open if operation_ids is None else operation_ids):
            try:
                self._told(self._send(calls.cancelling(operation_id)))
            except Exception as error:  # noqa: BLE001 - kept for the agent, which goes on
                self._not_cancelled(operation_id, error)
            else:
                self._open.discard(operation_id)


class AsyncRestoring(_Record):
    """The async form: see the module. Made by :meth:`toolgap.client.AsyncToolgap.restoring`.

    Its requests are tasks beside the block's: a tool that blocks the event loop also holds up the submit, so run such
    a tool in a thread (``asyncio.to_thread``).
    """

    def __init__(
        self,
        submit: Callable[[Submission, Callable[[float], Awaitable[bool]]], Awaitable[OperationStatus]],
        send: Callable[[Call[OperationStatus]], Awaitable[OperationStatus]],
        jobs: Tasks,
        fields: SubmitFields,
        retry_for_s: float | None,
        timeout_s: float,
        *,
        strict: bool,
    ) -> None:
        super().__init__(fields, retry_for_s, timeout_s, strict=strict)
        self._submit = submit
        self._send = send
        self._jobs = jobs
        self._job: asyncio.Task[None] | None = None
        self._left = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._enter()
        plan = self._plan(self.operation_id)
        try:
            await self._run(lambda: self._start(plan))
        except BaseException:
            self._leave(raised=True)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(raised=kind is not None)

    async def refresh(self, **fields: Unpack[SubmitFields]) -> None:
        """As :meth:`Restoring.refresh`."""
        self._extend(fields)
        plan = self._plan(fields.get("operation_id") or uuid.uuid4().hex)
        await self._run(lambda: self._replace(plan))

    async def abandon(self) -> None:
        """As :meth:`Restoring.abandon`."""
        self._abandoned = True
        await self._run(self._cancel)

    async def status(self, wait_s: float | None = None) -> OperationStatus | None:
        """As :meth:`Restoring.status`."""
        if self._job is not None:
            await asyncio.wait([self._job])
        if self._answered:
            try:
                self._told(await self._send(calls.asking(self.operation_id, wait_s)))
            except Exception as error:
                self._failed("no status", error)
                if self._strict:
                    raise
        return self.last_status

    def _leave(self, *, raised: bool) -> None:
        self._left.set()
        if self._ends_unused(raised=raised):
            try:
                self._job = self._jobs.start(self._cancel, self._job)
            except RuntimeError as error:
                self._failed("not cancelled", error)

    async def _run(self, job: Callable[[], Any]) -> None:
        self.error = None
        try:
            self._job = self._jobs.start(job, self._job)
        except RuntimeError as error:
            self._failed("not restored", error)
            if self._strict:
                raise
            return
        if self._strict:
            await asyncio.wait([self._job])
            if self.error is not None:
                raise self.error

    async def _start(self, plan: _Plan) -> None:
        try:
            submission = self._submission(plan, self._retry_for_s)
            self._accepted(await self._submit(submission, self._wait_to_leave))
        except Exception as error:  # noqa: BLE001 - kept for the agent, which goes on
            self._not_accepted(plan.operation_id, error)

    async def _replace(self, plan: _Plan) -> None:
        earlier = set(self._open)
        if earlier:
            try:
                submission = self._submission(plan, 0.0)
                self._accepted(await self._submit(submission, self._wait_to_leave))
            except Exception as error:  # noqa: BLE001 - kept for the agent, which goes on
                if not _is_no_room(error):
                    self._not_accepted(plan.operation_id, error)
                    return
                await self._cancel(earlier)
                await self._start(plan)
            else:
                await self._cancel(earlier)
        else:
            await self._start(plan)

    async def _cancel(self, operation_ids: Iterable[str] | None = None) -> None:
        for operation_id in list(self._open if operation_ids is None else operation_ids):
            try:
                self._told(await self._send(calls.cancelling(operation_id)))
            except Exception as error:  # noqa: BLE001 - kept for the agent, which goes on
                self._not_cancelled(operation_id, error)
            else:
                self._open.discard(operation_id)

    async def _wait_to_leave(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._left.wait(), seconds)
        except TimeoutError:
            return False
        return True
