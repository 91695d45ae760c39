"""In the scheduler's process: drives operations through SGLang's own prefetch, from acceptance to outcome.

All of it runs in the scheduler's thread. On several ranks each rank runs the same code on the same
broadcast messages and rank-agreed engine state, and no clock decides here: what time asks for is in
``decisions``, and comes back as a broadcast message.
"""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable

import msgspec

from toolgap.admission import Rates, piece_tokens
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
    OperationStatus,
    Reason,
    Refused,
    State,
    Target,
)
from toolgap.rates import Meter
from toolgap.settings import Settings
from toolgap.sglang.continuations import Continuations
from toolgap.sglang.declined import Declined
from toolgap.sglang.hostmemory import HostMemory
from toolgap.sglang.internals.engine import Engine, Match, cause
from toolgap.sglang.internals.requests import Prefix
from toolgap.sglang.joins import Joins
from toolgap.sglang.leaders import Leaders
from toolgap.sglang.leases import Lease, Leases
from toolgap.sglang.messages import (
    Decide,
    HicachePrefetchReqInput,
    HicachePrefetchReqOutput,
)
from toolgap.sglang.metrics import Metrics
from toolgap.sglang.pace import Pace
from toolgap.sglang.promotions import Promotions
from toolgap.sglang.record import Record
from toolgap.sglang.stalls import Stalls
from toolgap.sglang.storage_calls import StorageCalls
from toolgap.sglang.usage import Usage
from toolgap.sglang.validity import Validity
from toolgap.sglang.watch import Watch
from toolgap.sglang.work import Work

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 4
"""Reads that an operation may issue or follow, one after another, that bring nothing."""

_to_json = msgspec.json.Encoder().encode


class Restorer:
    """The operations of one scheduler."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        calls: StorageCalls,
        metrics: Metrics,
        meter: Meter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.calls = calls
        self.clock = clock
        self.metrics = metrics
        self.meter = meter
        meter.has_several_ranks = engine.has_several_ranks
        self.rates = Rates()
        """What the rank whose clock decides has measured, as all ranks know it."""
        self.watch = Watch(clock())
        self.log = OperationLog(
            max_outcomes=settings.max_outcomes, clock=clock, watch=lambda: self.watch.elapsed_s
        )
        self.limits = Limits(settings.stall_timeout_s, settings.stop_grace_s)
        self.work: dict[str, Work] = {}
        """Active operations by id. Empty means that every hook returns at once."""
        self.leaders = Leaders(engine, settings.piece_tokens, self.work)
        self.joins = Joins(engine, settings, self.leaders, metrics, self.work, clock)
        self.host = HostMemory(engine, settings)
        self.promotions = Promotions(engine, metrics)
        self.stalls = Stalls(engine, calls, metrics, clock)
        self.leases = Leases(engine)
        self.usage = Usage()
        self.continuations = Continuations(engine.page_tokens)
        self.record = Record(settings.recorded_tokens)
        self.declined = Declined()
        self._arrivals = itertools.count()
        self._pace = Pace(settings.switch_interval_s)
        self.validity = Validity(engine)

    @property
    def idle(self) -> bool:
        """Whether no hook has anything to do."""
        return not (self.work or self.stalls or self.leases)

    @property
    def budget_used_tokens(self) -> int:
        """What active operations may still read."""
        return sum(work.budget_tokens for work in self.work.values())

    # ---- turns ----

    def accept(
        self, operation: Operation, prefix: Prefix, request: HicachePrefetchReqInput, match: Match
    ) -> None:
        """Take a new operation in, and start it.

        Args:
            operation: Its id is in use by no active one.
            prefix: What it restores.
            request: Who is told its outcome.
            match: What of the prefix is resident.
        """
        work = Work(operation, prefix, request, next(self._arrivals))
        self.log.accept(operation)
        self.work[operation.operation_id] = work
        self.continuations.watch(operation, prefix)
        self.declined.settle(prefix)
        self.metrics.accepted(operation)
        self._pace.quicken(active=bool(self.work))
        self._place(work, match)
        self._dispatch()
        self._sample()

    def _place(self, work: Work, match: Match | None = None) -> None:
        """Look at what is missing now: end, follow a read of it, or queue for a turn to read it.

        Args:
            work: The operation.
            match: What is resident, if that was just found out.
        """
        operation, engine = work.operation, self.engine
        work.read = work.leader = work.leading_request = None
        work.shared_tokens = 0
        self.log.wait(operation)
        landed_before = work.landed_tokens
        match = self._look(work, match)
        work.attempts = 0 if work.landed_tokens > landed_before else work.attempts + 1
        missing_tokens = operation.aligned_tokens - work.landed_tokens
        if operation.aligned_tokens == 0:
            self._end(work, State.MISS, Reason.BELOW_THRESHOLD)
        elif missing_tokens == 0:
            nothing_read = operation.resident_tokens >= operation.aligned_tokens
            self._arrive(work, Reason.ALREADY_RESIDENT if nothing_read else Reason.COMPLETE)
        elif missing_tokens < engine.shortest_read_tokens(match):
            self._arrive(work, Reason.BELOW_THRESHOLD)
        elif work.attempts > _MAX_ATTEMPTS or not engine.can_anchor(match):
            self._arrive(work, Reason.NOT_INSERTED)
        elif leader := self.leaders.find(work.prefix, operation.aligned_tokens, work.landed_tokens, but=work):
            work.leader, work.leading_request, work.shared_tokens = leader
            self.log.wait(operation, following=True)
        else:
            self.log.wait(operation, queued=True)

    def _look(self, work: Work, match: Match | None = None) -> Match:
        """Note what of the prefix has landed, and hold that in place of what was held before."""
        if match is None:
            match = self.engine.match(work.prefix)
        work.landed_tokens = min(match.resident_tokens, work.operation.aligned_tokens)
        before, work.hold = work.hold, self.engine.hold(match)
        if before is not None:
            self.engine.release(before)
        return match

    def _dispatch(self) -> None:
        """Give turns to read: to operations that requests wait for, then by deadline, then by arrival."""
        engine = self.engine
        while True:
            if sum(work.read is not None for work in self.work.values()) >= self.settings.reads_at_once:
                return
            ready = [work for work in self.work.values() if work.is_ready]
            if not ready or engine.declines_reads or self.stalls.hanging or engine.paused:
                return
            self._issue(min(ready, key=self._turn))

    def _turn(self, work: Work) -> tuple[bool, float, int]:
        """Sort key: an operation has the turn of the most urgent of those that wait for it."""
        followers = self.leaders.followers(work)
        return (
            not (work.joined or any(follower.joined for follower in followers)),
            min(other.operation.deadline_ts for other in (work, *followers)),
            work.arrival,
        )

    def _issue(self, work: Work) -> None:
        """Read an operation's next piece."""
        operation, engine = work.operation, self.engine
        match = engine.match(work.prefix)
        if match.resident_tokens != work.landed_tokens or not engine.can_anchor(match):
            self._place(work)  # what it had seen has changed while it waited
            return
        missing_tokens = operation.aligned_tokens - work.landed_tokens
        span_tokens = (
            piece_tokens(
                missing_tokens,
                self.settings.piece_tokens,
                engine.page_tokens,
                engine.prefetch_threshold_tokens,
            )
            if engine.piecewise
            else missing_tokens
        )
        work.reads += 1
        self.log.wait(operation)
        work.read = engine.issue(operation.operation_id, work.reads, work.prefix, match, span_tokens)
        if work.read is None:
            self._arrive(work, Reason.HOST_CAPACITY)
        else:
            self.log.advance(operation, State.QUERYING, operation.read_tokens)

    # ---- progress and end ----

    def poll(self) -> None:
        """Follow the engine: called once a scheduler step, after SGLang drained its events."""
        if self.engine.flush_pending:
            self.stop_all(Stop(State.CANCELLED, Reason.FLUSHED))
        for work in list(self.work.values()):
            if work.operation.ended_at is None:
                self._follow(work)
        self._dispatch()
        self.stalls.settle()
        self._sample()

    def _sample(self) -> None:
        self.metrics.sample(
            active=len(self.work),
            queued=sum(work.is_ready for work in self.work.values()),
            waiting_joins=len(self.joins),
            reading_tokens=self.budget_used_tokens,
            budget_tokens=self.host.budget_tokens,
            leased_tokens=self.leases.tokens,
            lease_budget_tokens=self.host.max_leased_tokens,
            stalled_calls=self.stalls.given_up,
        )

    def _follow(self, work: Work) -> None:
        """See what became of what one operation waits for."""
        engine, operation = self.engine, work.operation
        if work.read is not None:
            if engine.in_flight(work.read):
                state, read_tokens = engine.progress(work.read)
                self.log.advance(operation, state, operation.read_tokens + read_tokens)
            else:
                self._conclude(work)
        elif work.promotion is not None:
            self._promote(work)
        elif work.leader is not None:
            if work.leader.landed_tokens >= work.shared_tokens:
                self._place(work)
            else:
                self.log.advance(operation, work.leader.operation.state, operation.read_tokens)
        elif work.leading_request is not None and not engine.is_reading(work.leading_request):
            self._place(work)

    def _conclude(self, work: Work) -> None:
        """A piece is over: take its result, and go on or end."""
        assert work.read is not None
        read, operation, engine = work.read, work.operation, self.engine
        result = engine.conclude(read)
        operation.read_tokens += result.read_tokens
        operation.inserted_tokens += result.inserted_tokens
        operation.dropped_tokens += result.read_tokens - result.inserted_tokens
        if result.read_tokens:
            operation.read_at = result.returned_at
            operation.first_read_at = operation.first_read_at or result.returned_at
        known_end_tokens = None
        if result.found_tokens is not None:
            end_tokens = read.start_tokens + result.found_tokens
            operation.found_tokens = max(
                operation.found_tokens or 0,
                min(end_tokens, operation.aligned_tokens) - operation.resident_tokens,
            )
            if engine.piecewise and result.read_tokens == result.found_tokens < read.span_tokens:
                # Storage holds nothing behind this: whoever shares more need not ask again.
                known_end_tokens = end_tokens
        if operation.stop is not None:
            self._end(work, *operation.stop, known_end_tokens=known_end_tokens)
            return
        reason = cause(result, read.span_tokens, engine.prefetch_threshold_tokens)
        if reason is Reason.NOT_IN_STORAGE and operation.read_tokens:
            reason = Reason.STORAGE_SHORTFALL
        if reason is Reason.COMPLETE:
            self._place(work)
            self._let_go(work)
            return
        self._look(work)
        self._arrive(work, reason, known_end_tokens=known_end_tokens)

    def _let_go(self, work: Work) -> None:
        """Requests that wait for no more than has landed go on."""
        if work.operation.ended_at is not None:
            return
        self.engine.refetch(self.joins.let_go(work))

    def _arrive(self, work: Work, reason: Reason, *, known_end_tokens: int | None = None) -> None:
        """Reading is over: promote what is resident if that was asked for, then end."""
        work.read = work.leader = work.leading_request = None
        if work.operation.target is Target.DEVICE and work.landed_tokens:
            work.reason, work.known_end_tokens = reason, known_end_tokens
            self.log.wait(work.operation)
            self._promote(work)
        else:
            self._end_by(work, reason, known_end_tokens=known_end_tokens)

    def _promote(self, work: Work) -> None:
        if self.promotions.advance(work):
            self._end_by(work, work.reason, known_end_tokens=work.known_end_tokens)

    def _end_by(self, work: Work, reason: Reason, *, known_end_tokens: int | None = None) -> None:
        """End an operation that was not stopped, in the state that follows from what has landed."""
        state = outcome_state(work.operation.aligned_tokens, work.landed_tokens, reason)
        if state is State.RESTORED and reason not in (Reason.ALREADY_RESIDENT, Reason.DEVICE_CAPACITY):
            reason = Reason.COMPLETE
        self._end(work, state, reason, known_end_tokens=known_end_tokens)

    def _end(self, work: Work, state: State, reason: Reason, *, known_end_tokens: int | None = None) -> None:
        """Give the outcome, tell the HTTP process, and let everyone go on who waited for it."""
        operation = work.operation
        del self.work[operation.operation_id]
        work.read = work.leader = work.leading_request = work.promotion = None
        forgotten = self.log.end(operation, state, reason)
        self._settle_memory(work)
        self._pace.quicken(active=bool(self.work))
        self.metrics.ended(operation, self.engine.token_bytes)
        if unused_tokens := sum(self.usage.forget(outcome) for outcome in forgotten):
            self.metrics.wasted(unused_tokens)
        for outcome in forgotten:
            self.continuations.forget(outcome)
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
        waited = self.joins.end_all(work)
        stalled = reason is Reason.STORAGE_STALLED
        for other in self.leaders.followers(work):
            if other.operation.ended_at is None and stalled:
                self._end(other, State.FAILED, Reason.STORAGE_STALLED)
            elif other.operation.ended_at is None:
                self._resume(other, work, known_end_tokens)
        if stalled:
            return  # whoever asked storage now would wait for the same thread
        if known_end_tokens is not None:
            waited = self.joins.still_missing(waited, work, known_end_tokens)
        self.engine.refetch(waited)

    def _settle_memory(self, work: Work) -> None:
        """What landed becomes ordinary host memory, or the lease's, and is watched for its use."""
        operation, hold = work.operation, work.hold
        work.hold = None
        self.usage.watch(operation, work.prefix)
        if hold is None:
            return
        natural = operation.state in (State.RESTORED, State.PARTIAL)
        if natural and operation.lease_s is not None and not self.validity.stale_cache:
            until_s = self.clock() + operation.lease_s
            self.leases.grant(Lease(operation, work.prefix, hold, until_s), work.landed_tokens)
        else:
            self.engine.release(hold)

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
            self._place(follower)
            return
        self._look(follower)
        follower.operation.found_tokens = max(0, known_end_tokens - follower.operation.resident_tokens)
        known_empty = known_end_tokens <= follower.operation.resident_tokens
        reason = Reason.NOT_IN_STORAGE if known_empty else Reason.STORAGE_SHORTFALL
        self._arrive(follower, reason)

    # ---- stopping ----

    def find(self, operation_id: str) -> Operation:
        """An active or recent operation.

        Raises:
            Refused: 404 if there is none.
        """
        operation = self.log.find(operation_id)
        if operation is None:
            raise Refused(
                Code.UNKNOWN_OPERATION,
                f"no operation {operation_id!r} is active or among the {self.settings.max_outcomes} most recent",
                field="operation_id",
            )
        return operation

    def cancel(self, operation_id: str) -> OperationStatus:
        """Stop an operation for a client, or end its lease. Idempotent."""
        operation = self.find(operation_id)
        if operation.ended_at is None:
            self._stop(self.work[operation_id], CANCELLED)
        else:
            self.leases.end(operation_id)
            operation.deadline_ts = 0.0  # no continuation is expected any more
        return operation.status(self.clock())

    def _stop(self, work: Work, stop: Stop, *, at_once: bool = False, for_all: bool = False) -> None:
        """Stop an operation's pending work: at the next batch boundary, or at once.

        A piece that others wait for as well is read to its end, unless everything stops.
        """
        self.log.request_stop(work.operation, stop)
        assert work.operation.stop is not None
        read = work.read
        if work.promotion is not None and stop is not CANCELLED and not for_all:
            self._end_by(work, Reason.DEVICE_CAPACITY)  # time is up, but it is in host memory
            return
        if read is None:
            self._end(work, *work.operation.stop)
            return
        if at_once:
            self.engine.give_up(read)
        elif for_all or not (work.joined or self.leaders.followers(work)):
            self.engine.stop(read)
        if not self.engine.in_flight(read):
            key = f"{read.handle.rid}.{read.handle.attempt_id}"
            self.stalls.leave(key, read.operation, self.engine.quarantined_tokens(read), hangs=at_once)
            self._conclude(work)

    def stop_all(self, stop: Stop) -> None:
        """Stop every operation that is not being stopped yet, whoever waits for it."""
        # Followers first: one that is left would start to read when its leader stops.
        for work in sorted(self.work.values(), key=lambda work: work.read is not None):
            if work.operation.ended_at is None and work.operation.stop is None:
                self._stop(work, stop, for_all=True)

    def apply(self, decision: Decide) -> None:
        """Do what one rank's clock decided, on every rank. Idempotent."""
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
            self.joins.give_up(rid, attempt)
        for operation_id in decision.unlease:
            self.leases.end(operation_id)
        if decision.rates is not None:
            self.rates = decision.rates
        self.stalls.hang(decision.hang)
        self.stalls.replace(decision.replace)

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
            with contextlib.suppress(Exception):
                if work.hold is not None:
                    self.engine.release(work.hold)
            if work.operation.ended_at is None:
                self.log.end(work.operation, State.FAILED, Reason.INTERNAL_ERROR)
                self._tell(work)
        self.work.clear()
        self._pace.quicken(active=bool(self.work))
        self.joins.forget_all()
        self.engine.own_tokens = 0
        self.promotions.forget()

    def checkpointed(self, prefix: Prefix, cached_tokens: int) -> None:
        """A request's KV went into the cache: see whether it used what operations had restored."""
        for use in self.usage.used_by(prefix, cached_tokens):
            self.metrics.used(use.tokens, use.saved_s)
            use.operation.used_at = use.operation.used_at or self.clock()
        if self.leases:
            self.leases.used_by(prefix)

    # ---- changes of the engine ----

    def was_reset(self) -> None:
        """The whole cache was dropped, and SGLang's bookkeeping with it."""
        self.engine.own_tokens = 0
        self.promotions.forget()
        self.validity.cache_dropped()
        self.leases.forget_all()
        works = list(self.work.values())
        for work in works:
            work.read = work.leader = work.leading_request = work.promotion = work.hold = None
        for work in works:
            self._end(work, State.CANCELLED, Reason.FLUSHED)
        if unused_tokens := self.usage.forget_all():
            self.metrics.wasted(unused_tokens)

    def storage_changed(self, *, cleared: bool) -> None:
        """The storage backend was attached, detached or cleared."""
        self.validity.storage_changed(cleared=cleared)
        if not cleared:
            self.meter.forget_storage()
            self.rates = Rates(prefill=self.rates.prefill)
            if self.validity.weights_were_updated:
                self.engine.tell_storage_of_other_weights()
        self.declined.forget_all()

    def weights_changed(self) -> None:
        """KV in the cache may be of other weights from now on."""
        self.validity.weights_changed()
        self.engine.tell_storage_of_other_weights()
        self.leases.end_all()

    def check_integrity(self) -> None:
        """Raise AssertionError unless records, reads and joins agree with each other and with SGLang."""
        self.log.check_integrity()
        assert self.work.keys() == self.log.active.keys()
        for work in self.work.values():
            work.check_integrity()
            assert work.read is None or self.engine.in_flight(work.read)
        self.joins.check_integrity()
        assert self.engine.own_tokens == sum(
            w.read.span_tokens for w in self.work.values() if w.read is not None
        )
