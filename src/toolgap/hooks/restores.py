"""Sends what the sessions' tool calls ask for, from a thread of its own: an agent never waits for it, and no
failure reaches it.
"""

import contextlib
import hashlib
import heapq
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple, Self, cast

from toolgap.client import DEFAULT_URL, SubmitFields, Toolgap, ToolgapError, ToolgapUnreachable
from toolgap.hooks.gaps import Gaps
from toolgap.hooks.tool_calls import Answer, Cancel, Message, Step, Submit, ToolCalls
from toolgap.protocol import Code, OperationStatus

logger = logging.getLogger("toolgap.hooks")

UNKNOWN_NAME = (Code.UNKNOWN_REQUEST, Code.NOT_SUPPORTED, Code.INVALID_FIELD)
"""Refusals of a name: another one of the same prefix may do."""

EXPECTED = (Code.NOT_WORTHWHILE, *UNKNOWN_NAME)
"""Refusals that are no news to whoever runs the agent."""


class Call(NamedTuple):
    """A tool call of an answer."""

    id: str
    tool: str


class _Session:
    def __init__(self, key: str) -> None:
        # Ids of operations are seen in the server's status: a session's name is not for everybody there.
        self.calls = ToolCalls(f"{hashlib.sha256(key.encode()).hexdigest()[:12]}-{time.time_ns():x}")
        self.started_s: dict[str, tuple[str, float]] = {}


class Restores:
    """The sessions of a process and the thread that submits and cancels for them. Safe to share.

    Args:
        server: Its URL, or a client of it, which then stays the caller's to close.
        api_key: SGLang's admin API key if it has one, else its API key, else None.
        fields: Fields of every submit, such as ``ttl_s``, ``lease_s`` or ``cache_salt``.
        expected_gap_s: Seconds that tools take, by name; of the others, those of earlier calls are measured.
        retry_for_s: How long a refusal that says when to try again is tried again.
        max_sessions: Sessions that are remembered; the one that was quiet longest is forgotten.
        max_waiting: Submits and cancels that may wait to be sent; what is more is dropped.
        strict: Raise the first failure, out of the next call: for tests.
        clock: In seconds.
    """

    def __init__(
        self,
        server: str | Toolgap = DEFAULT_URL,
        *,
        api_key: str | None = None,
        fields: SubmitFields | None = None,
        expected_gap_s: Mapping[str, float] | None = None,
        retry_for_s: float = 30.0,
        max_sessions: int = 1024,
        max_waiting: int = 1024,
        strict: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._owned = Toolgap(server, api_key=api_key) if isinstance(server, str) else None
        self._client: Toolgap = self._owned or cast("Toolgap", server)
        self._fields: SubmitFields = fields or {}
        self._gaps = Gaps(expected_gap_s)
        self._retry_for_s, self._strict, self._clock = retry_for_s, strict, clock
        self._max_sessions, self._max_waiting = max_sessions, max_waiting
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._change = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._numbers = count()
        self._sending = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._sent: OrderedDict[str, OperationStatus] = OrderedDict()
        self._failure: Exception | None = None
        self._unreachable = False
        self.refusals: Counter[Code] = Counter()
        """Submits that were refused for good, by the reason."""

    # ---- what a hook says ----

    def answered(self, session: str, answer: Answer, calls: Iterable[Call] = ()) -> None:
        """A model has answered in a session; ``calls`` says whose the calls in the answer are."""
        expected_s = self._gaps.expected_s([call.tool for call in calls])
        self._step(session, lambda state: state.calls.answered(answer, expected_s))

    def started(self, session: str, call: Call) -> None:
        """A tool call starts."""

        def step(state: _Session) -> list[Step]:
            state.started_s[call.id] = (call.tool, self._clock())
            return state.calls.started(call.id, self._gaps.expected_s([call.tool]))

        self._step(session, step)

    def expected(self, session: str, left_s: float) -> None:
        """A call that runs says when it will end: what has left host memory by then is read again."""
        self._step(session, lambda state: state.calls.again(left_s))

    def ended(self, session: str, call_id: str, result: Message | None = None) -> None:
        """A tool call has ended, with its result as the next request will show it, if that is known."""

        def step(state: _Session) -> list[Step]:
            tool, started_s = state.started_s.pop(call_id, (None, 0.0))
            if tool is not None:
                self._gaps.measured(tool, self._clock() - started_s)
            return state.calls.ended(call_id, result)

        self._step(session, step)

    def closed(self, session: str) -> None:
        """A session has ended."""
        with self._change:
            known = self._sessions.pop(session, None)
        if known is not None:
            self._put(known.calls.closed())

    @contextlib.contextmanager
    def harmless(self, what: str) -> Iterator[None]:
        """Around a hook's own work: what goes wrong there is logged, and the agent goes on."""
        try:
            yield
        except Exception as error:
            if self._strict:
                raise
            logger.warning("%s failed, so nothing is restored: %s: %s", what, type(error).__name__, error)

    # ---- what a test or an example asks ----

    def settle(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything has been sent that is to be sent now; False if it takes longer."""
        with self._change:
            done = self._change.wait_for(lambda: not (self._waiting or self._sending), timeout_s)
        self._raise_failure()
        return done

    def operations(self, timeout_s: float = 60.0) -> list[OperationStatus]:
        """Every operation that was accepted, the earliest first, as it stands now.

        Raises:
            ToolgapError, ToolgapUnreachable: the server does not say.
        """
        self.settle(timeout_s)
        with self._change:
            operations = list(self._sent)
        return [self._client.status(operation) for operation in operations]

    def report(self, timeout_s: float = 60.0) -> str:
        """What became of every operation, a line each, and how many submits were refused, and why."""
        lines = [
            f"{status.operation_id}: {status.state} ({status.reason or 'going on'}), "
            f"{status.inserted_tokens} of {status.aligned_tokens} tokens restored, {status.used_tokens} used"
            for status in self.operations(timeout_s)
        ]
        refused = [f"{count} refused: {code}" for code, count in self.refusals.items()]
        return "\n".join([*lines, *refused]) or "no tool was called"

    def close(self, timeout_s: float = 5.0) -> None:
        """End every session, and the thread once it has sent that. May be called again."""
        with self._change:
            sessions = list(self._sessions.values())
            self._sessions.clear()
        for session in sessions:
            self._put(session.calls.closed())
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._owned is not None:
            self._owned.close()
        self._raise_failure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- the thread ----

    def _step(self, session: str, step: Callable[[_Session], list[Step]]) -> None:
        with self._change:
            state = self._sessions.setdefault(session, _Session(session))
            self._sessions.move_to_end(session)
            steps = step(state)
            forgotten = None
            if len(self._sessions) > self._max_sessions:
                _, forgotten = self._sessions.popitem(last=False)
        self._put(steps)
        if forgotten is not None:
            self._put(forgotten.calls.closed())

    def _put(self, steps: Iterable[Step]) -> None:
        self._raise_failure()
        with self._change:
            for step in steps:
                if isinstance(step, Cancel) and self._forget(step.operation_id):
                    continue
                if self._closed or len(self._waiting) >= self._max_waiting:
                    logger.debug("dropped: %s", step.operation_id)
                    continue
                now_s = self._clock()
                heapq.heappush(
                    self._waiting,
                    _Waiting(now_s, next(self._numbers), step, now_s + self._retry_for_s),
                )
            if self._waiting and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="toolgap-restores", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def _forget(self, operation: str) -> bool:
        """Take back what has not been sent; True if there is nothing to cancel at the server."""
        kept = [w for w in self._waiting if w.step.operation_id != operation or isinstance(w.step, Cancel)]
        taken_back = len(kept) < len(self._waiting)
        if taken_back:
            self._waiting = kept
            heapq.heapify(self._waiting)
        known = self._sent.get(operation)
        return taken_back or (known is not None and known.state.terminal)

    def _run(self) -> None:
        while (waiting := self._next()) is not None:
            try:
                self._send(waiting)
            except Exception as error:
                logger.exception("a fault in Toolgap's hooks; the agent goes on")
                self._failure = self._failure or error
            finally:
                with self._change:
                    self._sending = False
                    self._change.notify_all()

    def _next(self) -> "_Waiting | None":
        with self._change:
            while True:
                if not self._waiting and self._closed:
                    return None
                left_s = self._waiting[0].due_s - self._clock() if self._waiting else None
                if left_s is not None and (left_s <= 0 or self._closed):
                    self._sending = True
                    return heapq.heappop(self._waiting)
                self._change.wait(left_s)

    def _send(self, waiting: "_Waiting") -> None:
        step = waiting.step
        try:
            match step:
                case Cancel():
                    self._cancel(step)
                case Submit():
                    self._submit(step)
        except ToolgapUnreachable as error:
            self._failed(error)
            if not self._unreachable:
                logger.warning("nothing is restored until the server answers again: %s", error)
            self._unreachable = True
        except ToolgapError as error:
            after_s = error.error.retry_after_s
            due_s = self._clock() + (after_s or 0.0)
            if after_s is not None and due_s < waiting.until_s and not self._closed:
                with self._change:
                    heapq.heappush(self._waiting, waiting._replace(due_s=due_s))
                return
            self._refused(error)
        else:
            self._unreachable = False

    def _cancel(self, step: Cancel) -> None:
        with contextlib.suppress(KeyError):
            if self._sent[step.operation_id].state.terminal:
                return
            self._remember(self._client.cancel(step.operation_id))

    def _submit(self, step: Submit) -> None:
        if any(self._is_active(operation) for operation in step.unless_active):
            return
        for index, name in enumerate(step.names):
            fields = cast("SubmitFields", {**self._fields, **name})
            fields["operation_id"] = step.operation_id
            if step.expected_gap_s is not None:
                fields["expected_gap_s"] = step.expected_gap_s
            try:
                status = self._client.submit(retry_for_s=0, **fields)
            except ToolgapError as error:
                if error.error.code in UNKNOWN_NAME and index + 1 < len(step.names):
                    continue
                raise
            self._remember(status)
            return

    def _is_active(self, operation: str) -> bool:
        known = self._sent.get(operation)
        if known is None or known.state.terminal:
            return False
        return not self._remember(self._client.status(operation)).state.terminal

    def _remember(self, status: OperationStatus) -> OperationStatus:
        with self._change:
            self._sent[status.operation_id] = status
            while len(self._sent) > self._max_waiting:
                self._sent.popitem(last=False)
        logger.debug("%s: %s", status.operation_id, status.state)
        return status

    def _refused(self, error: ToolgapError) -> None:
        code = error.error.code
        if code is Code.UNKNOWN_OPERATION:
            return
        self.refusals[code] += 1
        logger.log(logging.DEBUG if code in EXPECTED else logging.INFO, "not restored: %s", error)
        if code is not Code.NOT_WORTHWHILE:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if self._strict and self._failure is None:
            self._failure = error

    def _raise_failure(self) -> None:
        failure = self._failure if self._strict else None
        if failure is not None:
            self._failure = None
            raise failure


class _Waiting(NamedTuple):
    due_s: float
    number: int
    """Those due at the same time are sent in order."""
    step: Step
    until_s: float
    """When trying again is of no use any more."""


def as_restores(server: "str | Toolgap | Restores", options: Mapping[str, Any]) -> Restores:
    """What a hook was given, made one of these: a server, or one that several hooks share.

    Raises:
        TypeError: there are options beside one that has its own.
    """
    if not isinstance(server, Restores):
        return Restores(server, **options)
    if options:
        raise TypeError(f"{', '.join(options)}: give these to the Restores that the hooks share")
    return server
