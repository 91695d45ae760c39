"""Carries out what the turns ask for: submits, cancels, waits for outcomes, from a thread of its own.

Its event loop shares nothing with that of the streams. Whatever a worker does or fails to do here is told to
the listeners, and nobody waits for it.
"""

import asyncio
import logging
import random
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from toolgap.client import SubmitFields, ToolgapError, ToolgapUnreachable
from toolgap.gateway.events import (
    Closed,
    Event,
    Hinted,
    Known,
    Listener,
    Paused,
    Refused,
    Returned,
    Submitted,
)
from toolgap.gateway.logs import where
from toolgap.gateway.policy import Settings
from toolgap.gateway.turns import Cancel, Owner, Step, Submit, Turns
from toolgap.gateway.watch import Seen
from toolgap.gateway.workers import WorkerQuietError, Workers, code_of
from toolgap.hooks.tool_calls import Message
from toolgap.protocol import OperationStatus
from toolgap.retries import Retries

logger = logging.getLogger("toolgap.gateway")

MAX_TASKS = 4096
"""Submits, cancels and waits under way at once; what is more is refused by the gateway itself."""

MAX_ACCEPTED = 4096
"""Conversations of which restores are remembered, for the question what was used of them."""

POLL_S = 25.0

T = TypeVar("T")


class Accepted(NamedTuple):
    """A restore that a worker has taken."""

    url: str
    key: str | None
    operation_id: str


class _Submission:
    """A submit that no worker has answered for good yet."""

    task: asyncio.Task[None]
    """Cancelled, it takes back what it may have begun at a worker."""

    def __init__(self, step: Submit) -> None:
        self.step = step
        self.wanted = True
        """Else it is taken back as soon as it is accepted."""


class Restoring:
    """The restores of a gateway.

    Args:
        place: The workers that a conversation of this affinity may have been served by, the likeliest first.
        settings: How the time is chosen.
        told_s: Seconds that tools take, by name.
        api_key: For restores; without one, that of each conversation's own requests is used.
        timeout_s: For a worker's replies.
        retry_for_s: How long a refusal that says when to try again is tried again, while the gap lasts.
        listeners: Told of every event.
        clock: Unix time that never jumps, in seconds.
    """

    def __init__(
        self,
        place: Callable[[str], Sequence[str]],
        *,
        settings: Settings | None = None,
        told_s: Mapping[str, float] | None = None,
        api_key: str | None = None,
        timeout_s: float = 10.0,
        retry_for_s: float = 30.0,
        listeners: Iterable[Listener] = (),
        clock: Callable[[], float],
    ) -> None:
        self._place = place
        self._turns = Turns(f"gw-{secrets.token_hex(6)}", settings, told_s)
        self._api_key = api_key
        self._timeout_s, self._retry_for_s = timeout_s, retry_for_s
        self._listeners = tuple(listeners)
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._cancels: set[asyncio.Task[None]] = set()
        self._submissions: dict[str, _Submission] = {}
        """By operation."""
        self._pausing: dict[str, _Submission] = {}
        """By conversation, those that were refused and are tried again after a pause."""
        self._accepted: OrderedDict[str, list[Accepted]] = OrderedDict()
        self._placed: dict[str, Sequence[str]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.new_event_loop()
        self._workers = Workers(timeout_s)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="toolgap-restores", daemon=True)
        self._thread.start()

    # ---- what the observer says; from any thread ----

    def asked(self, conversation: str) -> None:
        """A request of a conversation is under way."""
        self._soon(lambda now_s: self._asked(conversation, now_s))

    def answered(self, conversation: str, owner: Owner, upstream: str, seen: Seen) -> None:
        """It was answered, wholly."""
        self._soon(lambda now_s: self._answered(conversation, owner, upstream, seen, now_s))

    def forgotten(self, conversation: str) -> None:
        """A conversation is not known any more."""
        self._soon(lambda now_s: self._forget(conversation, now_s))

    # ---- what others say ----

    def upstreams_changed(self) -> None:
        """The health of an upstream is another: conversations may go on elsewhere."""
        self._soon(self._moved)

    async def progressed(self, call: str, left_s: float) -> None:
        """A tool call will run for so many seconds more.

        Raises:
            UnknownCallError, AmbiguousCallError
        """

        def tell(now_s: float) -> None:
            conversation, steps = self._turns.progressed(call, left_s, now_s)
            self._tell(Hinted(conversation=conversation, at_s=now_s, left_s=left_s))
            self._do(steps)

        await asyncio.wrap_future(self._ask(tell))

    async def tool_ended(self, call: str, result: Message | None = None) -> None:
        """A tool call has ended.

        Raises:
            UnknownCallError, AmbiguousCallError
        """

        def tell(now_s: float) -> None:
            conversation, last, steps = self._turns.tool_ended(call, now_s, result)
            if last:
                self._tell(Hinted(conversation=conversation, at_s=now_s, left_s=0.0))
            self._do(steps)

        await asyncio.wrap_future(self._ask(tell))

    async def session_ended(self, session: str) -> int:
        """The client says that its session is over.

        Returns:
            How many of its conversations were in a gap.
        """

        def tell(now_s: float) -> int:
            conversations = self._turns.of_session(session)
            for conversation in conversations:
                self._close(conversation, now_s)
            return len(conversations)

        return await asyncio.wrap_future(self._ask(tell))

    def close(self, timeout_s: float) -> None:
        """Cancel what is pending at the workers, and end the thread. May be called again."""
        self._soon(lambda _: self._stop(timeout_s))
        self._thread.join(timeout_s + 1.0)

    # ---- in the thread ----

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _soon(self, what: Callable[[float], object]) -> None:
        """Run it in the thread, after what was given before."""

        def run() -> None:
            try:
                what(self._clock())
            except Exception as error:  # noqa: BLE001 - a fault here must not end the restores of all others
                logger.error("a fault in the gateway's restores: %s", where(error))
            self._arm()

        try:
            self._loop.call_soon_threadsafe(run)
        except RuntimeError:
            # Closed: nothing is restored any more.
            return

    def _ask(self, what: Callable[[float], T]) -> Future[T]:
        answer: Future[T] = Future()

        def run(now_s: float) -> None:
            try:
                answer.set_result(what(now_s))
            except Exception as error:  # noqa: BLE001 - it is the caller's
                answer.set_exception(error)

        self._soon(run)
        return answer

    def _asked(self, conversation: str, now_s: float) -> None:
        gap_s = self._turns.returned(conversation, now_s)
        if gap_s is None:
            return
        # Its own request reads what is missing now: to try again would be too late. A submit that is under way goes
        # on: the continuation joins it, or it the continuation's read.
        self._stop_trying(conversation)
        self._tell(Returned(conversation=conversation, at_s=now_s, gap_s=gap_s))

    def _answered(self, conversation: str, owner: Owner, upstream: str, seen: Seen, now_s: float) -> None:
        self._spawn(self._ask_what_was_used(conversation, self._accepted.pop(conversation, [])))
        if not seen.calls:
            self._close(conversation, now_s)
            return
        paused_s = seen.whole_s if seen.calling_s is None else seen.calling_s
        steps = self._turns.paused(conversation, owner, seen.answer, seen.calls, paused_s)
        if conversation in self._turns:
            paused = Paused(
                conversation=conversation,
                at_s=paused_s,
                upstream=upstream,
                tools=tuple(call.tool for call in seen.calls),
                prompt_tokens=seen.usage.prompt_tokens,
                output_tokens=seen.usage.output_tokens,
                expected_gap_s=self._turns.gap_left_s(conversation, now_s),
            )
            self._note_place(owner.affinity)
            self._tell(paused)
        self._do(steps)

    def _close(self, conversation: str, now_s: float) -> None:
        was_there = conversation in self._turns
        self._do(self._turns.closed(conversation))
        if was_there:
            self._tell(Closed(conversation=conversation, at_s=now_s))

    def _forget(self, conversation: str, now_s: float) -> None:
        self._close(conversation, now_s)
        self._accepted.pop(conversation, None)

    def _note_place(self, affinity: str) -> None:
        self._placed[affinity] = self._place(affinity)
        if len(self._placed) > 2 * len(self._turns) + 64:
            here = self._turns.open_affinities()
            self._placed = {key: places for key, places in self._placed.items() if key in here}

    def _moved(self, now_s: float) -> None:
        here = self._turns.open_affinities()
        moved = []
        for affinity in here:
            places = self._place(affinity)
            before = self._placed.get(affinity)
            self._placed[affinity] = places
            if before is not None and before[:1] != places[:1]:
                moved.append(affinity)
        self._do(self._turns.moved(moved, now_s))

    def _arm(self) -> None:
        """Wake up when the policy wants to be asked again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed or (next_s := self._turns.next_s) is None:
            return
        left_s = max(next_s - self._clock(), 0.0)
        self._timer = self._loop.call_later(left_s, self._soon, self._due)

    def _due(self, now_s: float) -> None:
        self._do(self._turns.due(now_s))

    # ---- what is sent ----

    def _do(self, steps: Iterable[Step]) -> None:
        for step in steps:
            match step:
                case Submit():
                    self._submit(step)
                case Cancel():
                    self._cancel(step)

    def _submit(self, step: Submit) -> None:
        if self._closed or len(self._tasks) >= MAX_TASKS:
            self._refused(step, "", "gateway_busy")
            return
        submission = self._submissions[step.operation_id] = _Submission(step)
        submission.task = self._spawn(self._restore(submission))
        submission.task.add_done_callback(lambda _: self._submissions.pop(step.operation_id, None))

    def _stop_trying(self, conversation: str) -> None:
        pausing = self._pausing.get(conversation)
        if pausing is not None:
            pausing.task.cancel()

    def _cancel(self, step: Cancel) -> None:
        submission = self._submissions.get(step.operation_id)
        if submission is not None:
            # A cancel now could reach the worker before the submit does, and would find nothing.
            submission.wanted = False
            if self._pausing.get(step.conversation) is submission:
                self._stop_trying(step.conversation)
        for one in self._accepted.get(step.conversation, ()):
            if one.operation_id == step.operation_id:
                self._take_back(one)

    async def _restore(self, submission: _Submission) -> None:
        """Submit until it is accepted or refused for good."""
        step = submission.step
        urls = self._place(step.owner.affinity)
        key = self._key(step.owner)
        started_s = self._clock()
        retries = Retries(self._retry_for_s, self._clock, random.random)
        fields: SubmitFields = {"operation_id": step.operation_id}
        if step.lease_s is not None:
            fields["lease_s"] = step.lease_s
        if step.owner.replica is not None:
            fields["routed_dp_rank"] = step.owner.replica
        while True:
            if step.expected_gap_s is not None:
                fields["expected_gap_s"] = max(step.expected_gap_s - (self._clock() - started_s), 0.001)
            try:
                url, status = await self._workers.submit(urls, key, step.names, fields)
                break
            except (ToolgapError, ToolgapUnreachable, WorkerQuietError) as error:
                after_s = error.error.retry_after_s if isinstance(error, ToolgapError) else None
                pause_s = None if after_s is None else retries.pause_s(after_s)
                waiting = submission.wanted and self._turns.is_waiting(step.conversation)
                if pause_s is None or not waiting:
                    self._refused(step, urls[0] if urls else "", code_of(error))
                    return
            except asyncio.CancelledError:
                # It may have been accepted, and its answer lost.
                for url in urls:
                    self._take_back(Accepted(url, key, step.operation_id))
                raise
            self._pausing[step.conversation] = submission
            try:
                await asyncio.sleep(pause_s)
            finally:
                if self._pausing.get(step.conversation) is submission:
                    del self._pausing[step.conversation]
        accepted = Accepted(url, key, step.operation_id)
        self._took(step, accepted, status)
        if not submission.wanted:
            self._take_back(accepted)

    def _took(self, step: Submit, accepted: Accepted, status: OperationStatus) -> None:
        self._accepted.setdefault(step.conversation, []).append(accepted)
        self._accepted.move_to_end(step.conversation)
        while len(self._accepted) > MAX_ACCEPTED:
            self._accepted.popitem(last=False)
        self._tell(
            Submitted(
                conversation=step.conversation, at_s=self._clock(), upstream=accepted.url, status=status
            )
        )
        self._spawn(self._follow(step, accepted, status))

    async def _follow(self, step: Submit, accepted: Accepted, status: OperationStatus) -> None:
        """Wait for an operation's outcome."""
        try:
            while not status.state.terminal:
                status = await self._workers.status(*accepted, POLL_S)
        except (ToolgapError, ToolgapUnreachable) as error:
            # Its outcome is lost with the worker, or was pushed out of its log.
            self._refused(step, accepted.url, code_of(error))
            return
        took_s = status.elapsed_s if status.read_tokens else None
        self._turns.ended(step.conversation, step.operation, took_s)
        self._known(step.conversation, accepted, status)

    async def _ask_what_was_used(self, conversation: str, accepted: Iterable[Accepted]) -> None:
        for one in accepted:
            try:
                status = await self._workers.status(*one)
            except (ToolgapError, ToolgapUnreachable):
                continue
            if status.state.terminal and status.inserted_tokens:
                self._known(conversation, one, status, final=True)

    def _take_back(self, accepted: Accepted) -> None:
        task = self._spawn(self._send_cancel(accepted))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    async def _send_cancel(self, accepted: Accepted) -> None:
        try:
            await self._workers.cancel(*accepted)
        except (ToolgapError, ToolgapUnreachable) as error:
            logger.debug("not cancelled: %s", code_of(error))

    def _known(
        self, conversation: str, accepted: Accepted, status: OperationStatus, *, final: bool = False
    ) -> None:
        now_s = self._clock()
        self._tell(
            Known(conversation=conversation, at_s=now_s, upstream=accepted.url, status=status, final=final)
        )

    def _refused(self, step: Submit, url: str, code: str) -> None:
        self._turns.ended(step.conversation, step.operation)
        self._tell(
            Refused(
                conversation=step.conversation,
                at_s=self._clock(),
                upstream=url,
                operation_id=step.operation_id,
                code=code,
            )
        )

    def _key(self, owner: Owner) -> str | None:
        if self._api_key is not None:
            return self._api_key
        scheme, _, key = (owner.authorization or "").partition(" ")
        usable = scheme.lower() == "bearer" and key.isascii() and key.isprintable()
        return key.strip() or None if usable else None

    def _spawn(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(what)
        self._tasks.add(task)

        def done(_: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("a fault in the gateway's restores: %s", where(error))
            self._arm()

        task.add_done_callback(done)
        return task

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception as error:  # noqa: BLE001 - a listener's fault must not end the restores
                logger.error("a listener of the gateway's events failed: %s", where(error))

    def _stop(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        self._arm()
        self._do(self._turns.shut_down())
        self._loop.create_task(self._end(timeout_s)).add_done_callback(lambda _: self._loop.stop())

    async def _end(self, timeout_s: float) -> None:
        """Let submits be answered and cancels be sent, then leave everything."""
        end_s = time.monotonic() + timeout_s
        submitting = [submission.task for submission in self._submissions.values()]
        if submitting:
            await asyncio.wait(submitting, timeout=timeout_s / 2)
        for task in submitting:
            task.cancel()
        await asyncio.gather(*submitting, return_exceptions=True)
        while self._cancels and (left_s := end_s - time.monotonic()) > 0:
            await asyncio.wait(self._cancels, timeout=left_s)
        # One that ends may begin another.
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._workers.close()
