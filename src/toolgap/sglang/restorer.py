"""In the scheduler's process: drives operations through SGLang's own prefetch, and joins requests to them.

All of it runs in the scheduler's thread. On several ranks each rank runs the same code on the same
broadcast messages and rank-agreed engine state; only :meth:`Restorer.decide` reads the clock to decide,
on one rank, and its decisions come back as a broadcast message.
"""

import hashlib
import logging
import time
import uuid
from array import array
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from toolgap.admission import Budget, check_budget, retry_after_s
from toolgap.operations import (
    CANCELLED,
    EXPIRED,
    STALLED,
    Limits,
    Operation,
    OperationLog,
    Stop,
    outcome_state,
)
from toolgap.protocol import (
    Code,
    EngineStatus,
    ErrorReply,
    OperationStatus,
    Overview,
    Reason,
    Refused,
    State,
)
from toolgap.settings import Settings
from toolgap.sglang.internals import Engine, Prefix, Read, cause
from toolgap.sglang.messages import (
    CancelOperation,
    Decide,
    Describe,
    HicachePrefetchReqInput,
    HicachePrefetchReqOutput,
    Quiesce,
    Restore,
    decode_order,
    encode_order,
)
from toolgap.sglang.storage_calls import StorageCalls

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 4
"""Reads that one operation may issue or follow, one after another."""

_LONGEST_STEP_S = 0.25
"""What one scheduler step may add to the watch, however long it took."""

_DRAIN_PASSES = 5000
_DRAIN_PAUSE_S = 0.001
"""How long a flush waits for the batch in flight, in passes: a count is the same on every rank."""

_to_json = msgspec.json.Encoder().encode


class Join(NamedTuple):
    """A request that waits for an operation."""

    operation_id: str
    since_s: float
    budget_s: float


class LeftCall(NamedTuple):
    """A storage call that an operation left running when it ended."""

    operation: Any
    """SGLang's record of it."""
    stalled_from_s: float
    """When to take it for one that hangs, and to refuse more work for the thread that makes it."""


class Work:
    """What the restorer keeps of an active operation beside its record."""

    def __init__(self, operation: Operation, prefix: Prefix, request: HicachePrefetchReqInput) -> None:
        self.operation = operation
        self.prefix = prefix
        self.request = request
        self.attempts = 0
        self.read: Read | None = None
        self.leader: Work | None = None
        """Another operation whose read this one waits for."""
        self.leading_request: Any = None
        """An ordinary request's read that this one waits for, by its handle."""
        self.joined: set[Any] = set()
        """Handles of requests that wait for this operation."""
        self.declined: set[Any] = set()
        """Handles of requests whose wait ran out: they go on without, and read nothing of it twice."""

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly one read is waited for."""
        assert [self.read, self.leader, self.leading_request].count(None) == 2
        assert self.operation.waiting_requests == len(self.joined)


class Restorer:
    """The operations of one scheduler."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        calls: StorageCalls,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.calls = calls
        self.clock = clock
        self.watch_s = 0.0
        """Time in which the scheduler took its steps: it stands still during a pause or a long prefill."""
        self._last_decision_s = clock()
        self.log = OperationLog(max_outcomes=settings.max_outcomes, clock=clock, watch=lambda: self.watch_s)
        self.limits = Limits(settings.stall_timeout_s, settings.stop_grace_s)
        self.work: dict[str, Work] = {}
        """Active operations by id. Empty means that every hook returns at once."""
        self.joins: dict[Any, Join] = {}
        self.left: list[LeftCall] = []
        """Storage calls that were left running by operations that ended."""
        self.weights_epoch = 0
        self.stale_cache = False
        self.stale_storage = False
        self.storage_was_replaced = False
        self._namespace: str | None = None

    # ---- messages ----

    def handle(self, request: HicachePrefetchReqInput) -> HicachePrefetchReqOutput | None:
        """Carry out one order from the HTTP process. Never raises."""
        try:
            return self._carry_out(request)
        except Refused as refusal:
            error = refusal
        except Exception:
            logger.exception("toolgap: a request failed")
            error = Refused(Code.INTERNAL_ERROR, "a fault in toolgap; see the server's log")
        return HicachePrefetchReqOutput(
            rid=request.rid,
            status=error.status,
            body=_to_json(ErrorReply(error=error.error)),
            retry_after_s=error.error.retry_after_s,
        )

    def _carry_out(self, request: HicachePrefetchReqInput) -> HicachePrefetchReqOutput | None:
        match decode_order(request):
            case Restore() as order:
                return self._reply(request, self.submit(order, request))
            case Describe(operation_id=None):
                return self._reply(request, self.overview())
            case Describe(operation_id=str(operation_id)):
                return self._reply(request, self._known(operation_id).status(self.clock()))
            case CancelOperation(operation_id=operation_id):
                return self._reply(request, self.cancel(operation_id))
            case Quiesce():
                self._quiesce_for_release()
                return HicachePrefetchReqOutput(rid=request.rid, status=200, body=b"{}")
            case Decide() as decision:
                self._apply(decision)
        return None

    def _reply(
        self, request: HicachePrefetchReqInput, body: OperationStatus | Overview
    ) -> HicachePrefetchReqOutput:
        output = HicachePrefetchReqOutput(rid=request.rid, status=200, body=_to_json(body))
        if isinstance(body, OperationStatus):
            output.operation_id, output.ended = body.operation_id, body.state.terminal
        return output

    def _known(self, operation_id: str) -> Operation:
        operation = self.log.find(operation_id)
        if operation is None:
            raise Refused(
                Code.UNKNOWN_OPERATION,
                f"no operation {operation_id!r} is active or among the {self.settings.max_outcomes} most recent",
                field="operation_id",
            )
        return operation

    # ---- submit ----

    def submit(self, order: Restore, request: HicachePrefetchReqInput) -> OperationStatus:
        """Accept an operation and start it.

        Raises:
            Refused: 409, 429, 501 or 503, with the reason.
        """
        token_ids = array("q")
        token_ids.frombytes(request.token_ids)
        prefix = Prefix(token_ids, order.extra_key, order.cache_salt or None)
        fingerprint = _fingerprint(prefix)
        known = self.log.find(order.operation_id)
        if known is not None:
            if known.fingerprint != fingerprint:
                raise Refused(
                    Code.OPERATION_CONFLICT,
                    f"operation {order.operation_id!r} is one of another prefix: choose another id",
                    field="operation_id",
                )
            return known.status(self.clock())
        self._check_gates(order)
        operation = Operation(
            operation_id=order.operation_id,
            fingerprint=fingerprint,
            namespace=self.namespace,
            requested_tokens=len(token_ids),
            aligned_tokens=self.engine.align(len(token_ids)),
            ttl_s=order.ttl_s,
            submitted_ts=time.time(),
            dp_rank=order.dp_rank,
        )
        match = self.engine.match(prefix)
        operation.resident_tokens = min(match.resident_tokens, operation.aligned_tokens)
        wanted_tokens = operation.aligned_tokens - operation.resident_tokens
        work = Work(operation, prefix, request)
        if wanted_tokens >= self.engine.prefetch_threshold_tokens and not self._find_leader(
            work, operation.resident_tokens
        ):
            if not self.engine.can_anchor(match):
                raise Refused(
                    Code.ANCHOR_NOT_BACKED_UP,
                    f"the first {operation.resident_tokens} tokens are on the device only, and pages cannot be "
                    "attached behind them before SGLang has backed them up",
                    retry_after_s=1.0,
                )
            self._check_budget(wanted_tokens)
        else:
            self._check_budget(0)
        # Kept for its return address only. SGLang still has to pass the message itself on to the next stage.
        work.request = msgspec.structs.replace(request, token_ids=b"")
        self.log.accept(operation)
        self.work[operation.operation_id] = work
        try:
            self._start(work)
        except Refused:
            self.work.pop(operation.operation_id)
            self.log.active.pop(operation.operation_id)
            raise
        return operation.status(self.clock())

    def _check_gates(self, order: Restore) -> None:
        engine = self.engine
        if obstacle := engine.obstacle():
            raise Refused(Code.NOT_SUPPORTED, obstacle)
        if order.namespace is not None and order.namespace != self.namespace:
            raise Refused(
                Code.NAMESPACE_MISMATCH,
                f"this server's namespace is {self.namespace}: model, weights, KV layout or storage differ",
                field="namespace",
            )
        if obstacle := engine.storage_obstacle():
            if self.storage_was_replaced and not engine.storage_backend:
                raise Refused(Code.STORAGE_REPLACED, "the storage backend was detached: attach one first")
            raise Refused(Code.NOT_SUPPORTED, obstacle)
        if self.stale_cache or self.stale_storage:
            raise Refused(
                Code.STORAGE_STALE,
                "weights were updated, and the cache or storage may hold KV of the old ones: POST /flush_cache, then "
                "POST /hicache/storage-backend/clear",
            )
        if engine.paused:
            raise Refused(Code.PAUSED, "the engine is paused", retry_after_s=1.0)
        if engine.flush_pending:
            raise Refused(Code.FLUSH_PENDING, "a flush waits for the engine to be idle", retry_after_s=1.0)
        if self._stalled_calls():
            raise Refused(
                Code.STORAGE_STALLED,
                "a storage call that was given up has not returned yet",
                retry_after_s=5.0,
            )

    def _check_budget(self, wanted_tokens: int) -> None:
        check_budget(
            Budget(self.settings.max_operations, self.max_operation_tokens),
            active_operations=len(self.work),
            active_tokens=self.engine.own_tokens,
            wanted_tokens=wanted_tokens,
            retry_after_s=retry_after_s(
                operation.ended_at - operation.accepted_at
                for operation in self.log.outcomes.values()
                if operation.ended_at is not None
            ),
        )

    @property
    def max_operation_tokens(self) -> int:
        """Host memory that active operations may read into."""
        return self.engine.align(int(self.engine.host_total_tokens * self.settings.host_share))

    @property
    def namespace(self) -> str:
        """Fingerprint of what this server's KV is valid for."""
        if self._namespace is None:
            self._namespace = self.engine.namespace(self.weights_epoch)
        return self._namespace

    def _start(self, work: Work) -> None:
        """Read what is missing now, or follow a read of it, or end."""
        operation, engine = work.operation, self.engine
        work.read = work.leader = work.leading_request = None
        operation.following = False
        work.attempts += 1
        match = engine.match(work.prefix)
        missing_tokens = operation.aligned_tokens - match.resident_tokens
        if operation.aligned_tokens == 0:
            self._end(work, State.MISS, Reason.BELOW_THRESHOLD)
        elif missing_tokens <= 0:
            nothing_read = operation.resident_tokens >= operation.aligned_tokens
            self._end(work, State.RESTORED, Reason.ALREADY_RESIDENT if nothing_read else Reason.COMPLETE)
        elif missing_tokens < engine.prefetch_threshold_tokens:
            self._end_by(work, match.resident_tokens, Reason.BELOW_THRESHOLD)
        elif work.attempts > _MAX_ATTEMPTS:
            self._end_by(work, match.resident_tokens, Reason.NOT_INSERTED)
        elif leader := self._find_leader(work, match.resident_tokens):
            operation.following = True
            if isinstance(leader, Work):
                work.leader = leader
            else:
                work.leading_request = leader
        else:
            work.read = engine.issue(operation.operation_id, work.attempts, work.prefix, match)
            if work.read is None:
                if work.attempts == 1:
                    raise Refused(
                        Code.RATE_LIMITED,
                        "ordinary requests' reads occupy SGLang's prefetch capacity",
                        retry_after_s=1.0,
                    )
                self._end_by(work, match.resident_tokens, Reason.HOST_CAPACITY)
            else:
                self.log.advance(operation, State.QUERYING)

    def _find_leader(self, work: Work, resident_tokens: int) -> "Work | Any | None":
        """A read in flight that brings most of what is missing: an operation's, or a request's handle."""
        aligned_tokens = work.operation.aligned_tokens
        for other in self.work.values():
            if other is work or other.leader is not None:
                continue
            shared = self.engine.align(work.prefix.shared_tokens(other.prefix))
            if self._worth_waiting(shared, resident_tokens, other.operation.aligned_tokens):
                return other
        for read in self.engine.ordinary_reads():
            shared = self.engine.align(work.prefix.shared_tokens(read.prefix))
            end_tokens = max(self.engine.align(len(read.prefix.token_ids) - 1), shared)
            if self._worth_waiting(min(shared, aligned_tokens), resident_tokens, end_tokens):
                return read.handle
        return None

    def _worth_waiting(self, shared_tokens: int, resident_tokens: int, read_end_tokens: int) -> bool:
        """Whether to wait for a read that ends at ``read_end_tokens`` for what is shared with it.

        Not for less than SGLang would read at all, and not if most of the read is of no use here: a
        request that shares a system prompt with a long restore does not wait for the rest of it.
        """
        gained_tokens = shared_tokens - resident_tokens
        return (
            gained_tokens >= self.engine.prefetch_threshold_tokens
            and read_end_tokens - shared_tokens <= gained_tokens
        )

    # ---- the join ----

    def intercept(self, handle: Any, prefix: Prefix, matched_tokens: int) -> bool:
        """Whether a request's own storage read is left out, since an operation reads those pages.

        Called when SGLang is about to issue that read. The request waits in SGLang's queue until
        :meth:`holds` lets it go.
        """
        if not self.settings.join:
            return False
        before = self.joins.get(handle)
        for work in self.work.values():
            shared = self.engine.align(work.prefix.shared_tokens(prefix))
            if not self._worth_waiting(shared, matched_tokens, work.operation.aligned_tokens):
                continue
            if handle in work.declined or (
                before is not None and before.operation_id == work.operation.operation_id
            ):
                return True
            self._leave(handle)
            budget_s = self.settings.join_timeout_s or self.engine.wait_budget_s(shared - matched_tokens)
            self.joins[handle] = Join(work.operation.operation_id, self.clock(), budget_s)
            work.joined.add(handle)
            work.operation.joined_requests += 1
            work.operation.waiting_requests = len(work.joined)
            return True
        self._leave(handle)
        return False

    def holds(self, handle: Any) -> bool:
        """Whether a request still waits for an operation."""
        return handle in self.joins

    def forget(self, handle: Any) -> None:
        """A request was aborted or retried."""
        self._leave(handle)
        for work in self.work.values():
            work.declined.discard(handle)

    def _leave(self, handle: Any) -> None:
        join = self.joins.pop(handle, None)
        if join is not None and (work := self.work.get(join.operation_id)) is not None:
            work.joined.discard(handle)
            work.operation.waiting_requests = len(work.joined)

    # ---- progress and end ----

    def poll(self) -> None:
        """Follow the engine: called once a scheduler step, after SGLang drained its events."""
        if self.engine.flush_pending:
            self._stop_all(Stop(State.CANCELLED, Reason.FLUSHED))
        for work in list(self.work.values()):
            if work.operation.ended_at is not None:
                continue
            if work.read is not None:
                if self.engine.in_flight(work.read):
                    self.log.advance(work.operation, *self.engine.progress(work.read))
                else:
                    self._conclude(work)
            elif work.leader is not None:
                self.log.advance(work.operation, work.leader.operation.state)
            elif not self.engine.is_reading(work.leading_request):
                self._start(work)

    def _conclude(self, work: Work) -> None:
        """The operation's own read is over: take its result and end."""
        assert work.read is not None
        read, operation, engine = work.read, work.operation, self.engine
        result = engine.conclude(read)
        operation.read_tokens += result.read_tokens
        operation.inserted_tokens += result.inserted_tokens
        if result.read_tokens:
            operation.read_at = result.returned_at
            operation.first_read_at = operation.first_read_at or result.returned_at
        operation.dropped_tokens += result.read_tokens - result.inserted_tokens
        if result.found_tokens is not None:
            operation.found_tokens = result.found_tokens
        known_end_tokens = None
        if (
            operation.stop is None
            and result.found_tokens is not None
            and result.read_tokens == result.found_tokens
        ):
            # Storage holds nothing behind this: whoever shares more need not ask again.
            known_end_tokens = read.start_tokens + result.found_tokens
        if operation.stop is not None:
            self._end(work, *operation.stop, known_end_tokens=known_end_tokens)
            return
        reason = cause(result, read.span_tokens, engine.prefetch_threshold_tokens)
        resident_tokens = engine.match(work.prefix).resident_tokens
        if reason is Reason.COMPLETE and resident_tokens < operation.aligned_tokens:
            reason = Reason.NOT_INSERTED
        self._end_by(work, resident_tokens, reason, known_end_tokens=known_end_tokens)

    def _end_by(
        self,
        work: Work,
        resident_tokens: int,
        reason: Reason,
        *,
        known_end_tokens: int | None = None,
    ) -> None:
        state = outcome_state(work.operation.aligned_tokens, resident_tokens, reason)
        if state is State.RESTORED:
            reason = Reason.COMPLETE
        self._end(work, state, reason, known_end_tokens=known_end_tokens)

    def _end(self, work: Work, state: State, reason: Reason, *, known_end_tokens: int | None = None) -> None:
        """Give the outcome, tell the HTTP process, and let everyone go on who waited for it."""
        operation = work.operation
        del self.work[operation.operation_id]
        self.log.end(operation, state, reason)
        logger.info(
            "toolgap: %s %s (%s): requested=%d resident=%d found=%s read=%d inserted=%d joined=%d in %.3f s",
            operation.operation_id,
            state,
            reason,
            operation.requested_tokens,
            operation.resident_tokens,
            operation.found_tokens,
            operation.read_tokens,
            operation.inserted_tokens,
            operation.joined_requests,
            (operation.ended_at or 0.0) - operation.accepted_at,
        )
        self._tell(work)
        waiting = set(work.joined)
        for handle in waiting:
            self.joins.pop(handle, None)
        work.joined.clear()
        stalled = reason is Reason.STORAGE_STALLED
        for other in [other for other in self.work.values() if other.leader is work]:
            if other.operation.ended_at is None and stalled:
                self._end(other, State.FAILED, Reason.STORAGE_STALLED)
            elif other.operation.ended_at is None:
                self._resume(other, work, known_end_tokens)
        if stalled:
            return  # whoever asked storage now would wait for the same thread
        self.engine.refetch(
            waiting if known_end_tokens is None else set(self._still_missing(waiting, work, known_end_tokens))
        )

    def _tell(self, work: Work) -> None:
        """Send the outcome to those who wait for it in the HTTP process."""
        status = work.operation.status(self.clock())
        news = HicachePrefetchReqOutput(
            status=200, body=_to_json(status), operation_id=status.operation_id, ended=True
        )
        self.engine.send(news, work.request)

    def _resume(self, follower: Work, leader: Work, known_end_tokens: int | None) -> None:
        """An operation's leader ended: read the rest, unless storage is known to lack it."""
        shared = self.engine.align(follower.prefix.shared_tokens(leader.prefix))
        if known_end_tokens is None or known_end_tokens >= shared:
            self._start(follower)
            return
        resident_tokens = self.engine.match(follower.prefix).resident_tokens
        follower.operation.found_tokens = max(0, known_end_tokens - follower.operation.resident_tokens)
        known_empty = known_end_tokens <= follower.operation.resident_tokens
        reason = Reason.NOT_IN_STORAGE if known_empty else Reason.STORAGE_SHORTFALL
        self._end_by(follower, resident_tokens, reason)

    def _still_missing(self, handles: Iterable[Any], work: Work, known_end_tokens: int) -> list[Any]:
        """Of the requests that waited, those for which storage may hold more than the read brought."""
        prefixes = self.engine.waiting_prefixes(set(handles))
        return [
            handle
            for handle, prefix in prefixes.items()
            if self.engine.align(work.prefix.shared_tokens(prefix)) <= known_end_tokens
        ]

    # ---- stopping ----

    def cancel(self, operation_id: str) -> OperationStatus:
        """Stop an operation for a client. Idempotent."""
        operation = self._known(operation_id)
        if operation.ended_at is None:
            self._stop(self.work[operation_id], CANCELLED)
        return operation.status(self.clock())

    def _stop(self, work: Work, stop: Stop, *, at_once: bool = False) -> None:
        """Stop an operation's pending work: at the next batch boundary, or at once."""
        self.log.request_stop(work.operation, stop)
        if work.read is None:
            assert work.operation.stop is not None
            self._end(work, *work.operation.stop)
            return
        if at_once:
            self.engine.give_up(work.read)
        else:
            self.engine.stop(work.read)
        if not self.engine.in_flight(work.read):
            if self.calls.running(work.read.operation):
                patience_s = 0.0 if at_once else self.settings.stall_timeout_s
                self.left.append(LeftCall(work.read.operation, self.clock() + patience_s))
            self._conclude(work)

    def _stop_all(self, stop: Stop) -> None:
        # Followers first: one that is left would start to read when its leader stops.
        for work in sorted(self.work.values(), key=lambda work: work.read is not None):
            if work.operation.ended_at is None and work.operation.stop is None:
                self._stop(work, stop)

    def _apply(self, decision: Decide) -> None:
        for operation_ids, stop, at_once in (
            (decision.expire, EXPIRED, False),
            (decision.stall, STALLED, True),
            (decision.abandon, EXPIRED, True),
        ):
            for operation_id in operation_ids:
                work = self.work.get(operation_id)
                if work is not None and not (stop is EXPIRED and not at_once and work.joined):
                    self._stop(work, stop, at_once=at_once)
        for rid, attempt in decision.release:
            for handle in [
                handle for handle in self.joins if (handle.rid, handle.attempt_id) == (rid, attempt)
            ]:
                work = self.work[self.joins[handle].operation_id]
                work.declined.add(handle)
                self._leave(handle)

    def decide(self) -> HicachePrefetchReqInput | None:
        """What time asks for, on the one rank that decides; said again until it was applied."""
        now = self.clock()
        if not self.engine.paused:
            self.watch_s += min(now - self._last_decision_s, _LONGEST_STEP_S)
        self._last_decision_s = now
        due = self.log.due(self.limits)
        release = [
            (handle.rid, handle.attempt_id)
            for handle, join in self.joins.items()
            if now - join.since_s >= join.budget_s
        ]
        if not due and not release:
            return None
        order = Decide(expire=due.expire, stall=due.stall, abandon=due.abandon, release=release)
        return HicachePrefetchReqInput(order=encode_order(order))

    def quiesce(self, reason: Reason) -> None:
        """End every operation, waiting shortly for the batch in flight, before the engine is changed.

        An operation whose storage call hangs stays: SGLang then sees that it is not idle, and refuses
        the change as it would for an ordinary request's read.
        """
        self._stop_all(Stop(State.CANCELLED, reason))
        if not self.engine.may_drain:
            return
        for _ in range(_DRAIN_PASSES):
            if self.quiet:
                return
            self.engine.drain()
            time.sleep(_DRAIN_PAUSE_S)
        logger.warning("toolgap: a storage call does not return")

    def _quiesce_for_release(self) -> None:
        self.quiesce(Reason.MEMORY_RELEASED)
        if not self.quiet:
            raise Refused(
                Code.STORAGE_STALLED,
                "a storage call of a restore has not returned, and memory cannot be released under it",
                retry_after_s=5.0,
            )

    def _calls_left(self) -> list[LeftCall]:
        """Storage calls that have not returned though their operations ended."""
        if self.left:
            self.left = [call for call in self.left if self.calls.running(call.operation)]
        return self.left

    def _stalled_calls(self) -> int:
        """How many of them are taken for hanging."""
        now = self.clock()
        return sum(now >= call.stalled_from_s for call in self._calls_left())

    @property
    def quiet(self) -> bool:
        """Whether SGLang can stop its storage threads: no operation is active, and no call is running."""
        return not self.work and not self.calls

    def drop_all(self) -> None:
        """After a fault of ours: forget every operation, so that SGLang goes on as if there were none."""
        for work in list(self.work.values()):
            try:
                if work.read is not None:
                    if self.engine.in_flight(work.read):
                        self.engine.give_up(work.read)
                    self.engine.conclude(work.read)
            except Exception:
                logger.exception("toolgap: could not end the read of %s", work.operation.operation_id)
            if work.operation.ended_at is None:
                self.log.end(work.operation, State.FAILED, Reason.INTERNAL_ERROR)
                self._tell(work)
        self.work.clear()
        self.joins.clear()
        self.engine.own_tokens = 0

    # ---- changes of the engine ----

    def was_reset(self) -> None:
        """The whole cache was dropped, and SGLang's bookkeeping with it."""
        self.engine.own_tokens = 0
        self.stale_cache = False
        works = list(self.work.values())
        for work in works:
            work.read = work.leader = work.leading_request = None
        for work in works:
            self._end(work, State.CANCELLED, Reason.FLUSHED)

    def namespace_changed(self) -> None:
        """Something that the namespace is made of changed."""
        self._namespace = None

    def weights_changed(self) -> None:
        """KV in the cache and in storage may be of other weights from now on."""
        self.weights_epoch += 1
        self.namespace_changed()
        self.stale_cache = self.stale_storage = True

    def storage_changed(self, *, cleared: bool) -> None:
        """The storage backend was attached, detached or cleared."""
        self.namespace_changed()
        self.storage_was_replaced = True
        if cleared and not self.stale_cache:
            self.stale_storage = False

    # ---- reports ----

    def overview(self) -> Overview:
        """All active operations, recent outcomes and the engine.

        Raises:
            Refused: 501 where there is nothing to report on.
        """
        engine = self.engine
        if obstacle := engine.obstacle():
            raise Refused(Code.NOT_SUPPORTED, obstacle)
        now = self.clock()
        return Overview(
            active=[operation.status(now) for operation in self.log],
            recent=[operation.status(now) for operation in reversed(self.log.outcomes.values())],
            engine=EngineStatus(
                namespace=self.namespace,
                storage_backend=engine.storage_backend,
                prefetch_policy=engine.prefetch_policy,
                prefetch_threshold_tokens=engine.prefetch_threshold_tokens,
                page_tokens=engine.page_tokens,
                host_total_tokens=engine.host_total_tokens,
                host_free_tokens=engine.host_free_tokens,
                prefetch_capacity_tokens=engine.prefetch_capacity_tokens,
                prefetch_occupied_tokens=engine.prefetch_occupied_tokens,
                prefetch_retries_pending=engine.prefetch_retries_pending,
                reads_in_flight=engine.reads_in_flight,
                max_operations=self.settings.max_operations,
                max_operation_tokens=self.max_operation_tokens,
                waiting_joins=len(self.joins),
                stalled_reads=self._stalled_calls(),
                paused=engine.paused,
                dp_rank=engine.dp_rank,
            ),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless records, reads and joins agree with each other and with SGLang."""
        self.log.check_integrity()
        assert self.work.keys() == self.log.active.keys()
        for work in self.work.values():
            work.check_integrity()
            assert work.read is None or self.engine.in_flight(work.read)
        for handle, join in self.joins.items():
            assert handle in self.work[join.operation_id].joined
        assert self.engine.own_tokens == sum(
            w.read.span_tokens for w in self.work.values() if w.read is not None
        )


def new_operation_id() -> str:
    """An id for a submit that named none."""
    return uuid.uuid4().hex


def _fingerprint(prefix: Prefix) -> bytes:
    digest = hashlib.blake2b(prefix.token_ids.tobytes(), digest_size=16)
    digest.update(repr((prefix.extra_key, prefix.cache_salt)).encode())
    return digest.digest()
