"""The life of operations: any sequence of events leaves a sound log, and time is judged on the right clock."""

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from toolgap.operations import (
    CANCELLED,
    EXPIRED,
    STALLED,
    Due,
    Limits,
    Operation,
    OperationLog,
    Stop,
    outcome_state,
)
from toolgap.protocol import OperationStatus, Reason, State

LIMITS = Limits(stall_timeout_s=30.0, stop_grace_s=2.0)
NOTHING = Due([], [], [])
ACTIVE = [State.QUERYING, State.RESTORING]
TERMINAL = [state for state in State if state.terminal]


class Clocks:
    """Both clocks of a log; ``watch`` stands still while ``pass_unseen`` lets time go by."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.watch_s = 0.0

    def pass_seen(self, seconds: float) -> None:
        self.now_s += seconds
        self.watch_s += seconds

    def pass_unseen(self, seconds: float) -> None:
        self.now_s += seconds

    def log(self, max_outcomes: int = 32) -> OperationLog:
        return OperationLog(max_outcomes=max_outcomes, clock=lambda: self.now_s, watch=lambda: self.watch_s)


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def log(clocks: Clocks) -> OperationLog:
    return clocks.log()


def make(operation_id: str = "x", **fields: Any) -> Operation:
    given: dict[str, Any] = {
        "operation_id": operation_id,
        "fingerprint": b"f",
        "namespace": "n",
        "requested_tokens": 100,
        "aligned_tokens": 96,
        "ttl_s": 60.0,
    }
    return Operation(**given | fields)


def accepted(log: OperationLog, operation_id: str = "x", **fields: Any) -> Operation:
    operation = make(operation_id, **fields)
    log.accept(operation)
    return operation


# ---- from acceptance to outcome ----


def test_an_operation_is_found_while_active_and_after_its_end(log: OperationLog) -> None:
    operation = accepted(log)
    assert log.find("x") is operation
    assert list(log) == [operation]
    log.end(operation, State.RESTORED, Reason.COMPLETE)
    assert log.find("x") is operation
    assert list(log) == []
    assert log.find("y") is None
    log.check_integrity()


def test_active_operations_keep_their_order_of_arrival(log: OperationLog) -> None:
    operations = [accepted(log, name) for name in "cab"]
    log.advance(operations[0], State.RESTORING, 16)
    assert list(log) == operations


def test_the_log_may_change_while_it_is_walked(log: OperationLog) -> None:
    for name in "abc":
        accepted(log, name)
    for operation in log:
        log.end(operation, State.MISS, Reason.NOT_IN_STORAGE)
    assert list(log.outcomes) == ["a", "b", "c"]


def test_an_id_in_use_is_not_accepted_again(log: OperationLog) -> None:
    accepted(log)
    with pytest.raises(AssertionError):
        accepted(log)


def test_an_id_whose_operation_ended_may_be_used_again(log: OperationLog) -> None:
    log.end(accepted(log), State.MISS, Reason.NOT_IN_STORAGE)
    again = accepted(log)
    assert log.find("x") is again
    assert not log.outcomes
    log.check_integrity()


@pytest.mark.parametrize("state", ACTIVE)
def test_an_outcome_is_a_terminal_state(log: OperationLog, state: State) -> None:
    operation = accepted(log)
    with pytest.raises(AssertionError):
        log.end(operation, state, Reason.COMPLETE)
    assert list(log) == [operation]


@pytest.mark.parametrize("state", TERMINAL)
def test_an_operation_ends_once(log: OperationLog, state: State) -> None:
    operation = accepted(log)
    log.end(operation, state, Reason.COMPLETE)
    with pytest.raises((AssertionError, KeyError)):
        log.end(operation, State.FAILED, Reason.INTERNAL_ERROR)
    with pytest.raises(AssertionError):
        log.advance(operation, State.QUERYING)
    with pytest.raises(AssertionError):
        log.request_stop(operation, CANCELLED)
    assert (operation.state, operation.reason) == (state, Reason.COMPLETE)
    log.check_integrity()


def test_a_read_that_another_one_led_may_go_back_to_asking_storage(log: OperationLog) -> None:
    operation = accepted(log)
    for state in (State.RESTORING, State.QUERYING, State.RESTORING, State.RESTORING):
        log.advance(operation, state)
        assert operation.state is state


@pytest.mark.parametrize("state", TERMINAL)
def test_an_operation_does_not_advance_into_an_outcome(log: OperationLog, state: State) -> None:
    operation = accepted(log)
    with pytest.raises(AssertionError):
        log.advance(operation, state)
    assert operation.state is State.QUERYING


def test_only_the_most_recent_outcomes_are_remembered(clocks: Clocks) -> None:
    log = clocks.log(max_outcomes=2)
    for name in "abc":
        log.end(accepted(log, name), State.MISS, Reason.NOT_IN_STORAGE)
    assert list(log.outcomes) == ["b", "c"]
    assert log.find("a") is None
    log.check_integrity()


def test_the_first_stop_wins(log: OperationLog, clocks: Clocks) -> None:
    operation = accepted(log)
    clocks.pass_seen(1.0)
    assert log.request_stop(operation, CANCELLED)
    clocks.pass_seen(1.0)
    assert not log.request_stop(operation, EXPIRED)
    assert not log.request_stop(operation, CANCELLED)
    assert (operation.stop, operation.stopped_at) == (CANCELLED, 1.0)


def test_stops_end_in_the_state_that_they_name() -> None:
    assert all(stop.state.terminal for stop in (CANCELLED, EXPIRED, STALLED))
    assert CANCELLED == (State.CANCELLED, Reason.REQUESTED)
    assert EXPIRED == (State.EXPIRED, Reason.TTL)
    assert STALLED == (State.FAILED, Reason.STORAGE_STALLED)


def test_an_end_lets_go_of_everyone(log: OperationLog) -> None:
    operation = accepted(log, following=True, joined_requests=3, waiting_requests=2)
    log.end(operation, State.RESTORED, Reason.COMPLETE)
    assert (operation.following, operation.waiting_requests, operation.joined_requests) == (False, 0, 3)


# ---- what a client is told ----


def test_status_of_an_active_operation(log: OperationLog, clocks: Clocks) -> None:
    operation = accepted(log, resident_tokens=32, following=True, ttl_s=5.0)
    clocks.pass_unseen(1.25)
    status = operation.status(clocks.now_s)
    assert status == OperationStatus(
        operation_id="x",
        state=State.QUERYING,
        requested_tokens=100,
        aligned_tokens=96,
        resident_tokens=32,
        following=True,
        ttl_s=5.0,
        elapsed_s=1.25,
        namespace="n",
    )


def test_status_of_an_outcome_does_not_change(log: OperationLog, clocks: Clocks) -> None:
    operation = accepted(log)
    log.advance(operation, State.RESTORING, 48)
    operation.found_tokens, operation.read_tokens = 96, 96
    operation.inserted_tokens, operation.dropped_tokens = 80, 16
    clocks.pass_seen(0.1)
    log.end(operation, State.PARTIAL, Reason.NOT_INSERTED)
    status = operation.status(clocks.now_s)
    clocks.pass_seen(100.0)
    assert operation.status(clocks.now_s) == status
    assert (status.state, status.reason, status.elapsed_s) == (State.PARTIAL, Reason.NOT_INSERTED, 0.1)
    assert (status.found_tokens, status.read_tokens) == (96, 96)
    assert (status.inserted_tokens, status.dropped_tokens) == (80, 16)


def test_stopping_is_told_until_the_stop_took_effect(log: OperationLog, clocks: Clocks) -> None:
    operation = accepted(log)
    assert not operation.status(clocks.now_s).stopping
    log.request_stop(operation, CANCELLED)
    assert operation.status(clocks.now_s).stopping
    log.end(operation, *CANCELLED)
    assert not operation.status(clocks.now_s).stopping


def test_every_count_of_the_record_is_told(clocks: Clocks) -> None:
    counts = [field.name for field in fields(Operation) if field.name.endswith("_tokens")]
    numbered: dict[str, Any] = {name: number for number, name in enumerate(counts)}
    operation = make(**numbered)
    status = operation.status(clocks.now_s)
    assert [getattr(status, name) for name in counts] == list(range(len(counts)))


# ---- what the passing of time asks for ----


def test_nothing_is_due_of_nothing(log: OperationLog) -> None:
    assert log.due(LIMITS) == NOTHING
    assert not log.due(LIMITS)


def test_an_operation_expires_on_the_clock(log: OperationLog, clocks: Clocks) -> None:
    accepted(log, ttl_s=10.0)
    clocks.pass_unseen(9.999)
    assert not log.due(LIMITS)
    clocks.pass_unseen(0.001)
    assert log.due(LIMITS) == Due(expire=["x"], stall=[], abandon=[])
    assert log.due(LIMITS)


def test_each_operation_has_its_own_ttl(log: OperationLog, clocks: Clocks) -> None:
    for name, ttl_s in (("a", 5.0), ("b", 20.0), ("c", 10.0)):
        accepted(log, name, ttl_s=ttl_s)
    clocks.pass_unseen(10.0)
    accepted(log, "d", ttl_s=5.0)
    assert log.due(LIMITS).expire == ["a", "c"]


def test_progress_does_not_prolong_a_ttl(log: OperationLog, clocks: Clocks) -> None:
    operation = accepted(log, ttl_s=10.0)
    clocks.pass_seen(10.0)
    log.advance(operation, State.RESTORING, 16)
    assert log.due(LIMITS).expire == ["x"]


def test_a_ttl_does_not_cut_a_read_that_requests_wait_for(log: OperationLog, clocks: Clocks) -> None:
    operation = accepted(log, ttl_s=10.0, joined_requests=1, waiting_requests=1)
    clocks.pass_unseen(1000.0)
    assert not log.due(LIMITS)
    operation.waiting_requests = 0
    assert log.due(LIMITS).expire == ["x"]


def test_a_stall_cuts_a_read_that_requests_wait_for(log: OperationLog, clocks: Clocks) -> None:
    accepted(log, ttl_s=10.0, joined_requests=1, waiting_requests=1)
    clocks.pass_seen(30.0)
    assert log.due(LIMITS) == Due(expire=[], stall=["x"], abandon=[])


def test_a_stall_is_measured_on_the_watch(log: OperationLog, clocks: Clocks) -> None:
    """A pause or a long prefill hides progress, so it is no stall of the storage."""
    accepted(log, ttl_s=10_000.0)
    clocks.pass_unseen(1000.0)
    clocks.pass_seen(29.999)
    assert not log.due(LIMITS)
    clocks.pass_seen(0.001)
    assert log.due(LIMITS).stall == ["x"]


def test_time_before_the_acceptance_does_not_count(log: OperationLog, clocks: Clocks) -> None:
    clocks.pass_seen(1000.0)
    accepted(log, ttl_s=10.0)
    assert not log.due(LIMITS)


@pytest.mark.parametrize(
    ("state", "read_tokens", "is_progress"),
    [
        (State.QUERYING, 0, False),
        (State.RESTORING, 0, True),
        (State.QUERYING, 16, True),
        (State.RESTORING, 16, True),
    ],
)
def test_any_change_is_progress(
    log: OperationLog, clocks: Clocks, state: State, read_tokens: int, is_progress: bool
) -> None:
    operation = accepted(log, ttl_s=10_000.0)
    clocks.pass_seen(29.0)
    log.advance(operation, state, read_tokens)
    clocks.pass_seen(1.0)
    assert bool(log.due(LIMITS)) is not is_progress
    log.advance(operation, state, read_tokens)
    clocks.pass_seen(29.0)
    assert log.due(LIMITS).stall == ["x"]


def test_an_operation_that_follows_another_does_not_stall_itself(log: OperationLog, clocks: Clocks) -> None:
    accepted(log, ttl_s=10_000.0, following=True)
    clocks.pass_seen(1000.0)
    assert not log.due(LIMITS)


def test_an_operation_that_waits_for_its_turn_does_not_stall_and_starts_anew_with_it(
    log: OperationLog, clocks: Clocks
) -> None:
    operation = accepted(log, ttl_s=600.0)
    log.wait(operation, queued=True)
    assert operation.status(clocks.now_s).queued
    clocks.pass_seen(100.0)
    assert log.due(LIMITS) == NOTHING
    log.wait(operation)  # its turn: what counts from here on is its own read
    clocks.pass_seen(29.9)
    assert log.due(LIMITS) == NOTHING
    clocks.pass_seen(0.1)
    assert log.due(LIMITS) == Due([], ["x"], [])


def test_an_outcome_with_a_lease_is_remembered_beyond_the_limit(clocks: Clocks) -> None:
    log = clocks.log(max_outcomes=2)
    leased = accepted(log, "leased")
    log.end(leased, State.RESTORED, Reason.COMPLETE)
    leased.leased_tokens = 96
    dropped = []
    for name in ("a", "b", "c"):
        dropped += log.end(accepted(log, name), State.MISS, Reason.NOT_IN_STORAGE)
        log.check_integrity()
    assert [operation.operation_id for operation in dropped] == ["a", "b"]
    assert list(log.outcomes) == ["leased", "c"]
    leased.leased_tokens = 0
    assert log.end(accepted(log, "d"), State.MISS, Reason.NOT_IN_STORAGE) == [leased]
    assert list(log.outcomes) == ["c", "d"]


def test_an_operation_that_follows_another_expires(log: OperationLog, clocks: Clocks) -> None:
    accepted(log, ttl_s=10.0, following=True)
    clocks.pass_seen(10.0)
    assert log.due(LIMITS) == Due(expire=["x"], stall=[], abandon=[])


def test_a_stall_says_more_than_an_expiry(log: OperationLog, clocks: Clocks) -> None:
    accepted(log, ttl_s=30.0)
    clocks.pass_seen(30.0)
    assert log.due(LIMITS) == Due(expire=[], stall=["x"], abandon=[])


@pytest.mark.parametrize("stop", [CANCELLED, EXPIRED, STALLED])
def test_a_stopped_operation_is_given_up_after_the_grace_period(
    log: OperationLog, clocks: Clocks, stop: Stop
) -> None:
    operation = accepted(log, ttl_s=1.0, waiting_requests=1, joined_requests=1)
    log.request_stop(operation, stop)
    clocks.pass_unseen(1000.0)
    clocks.pass_seen(1.999)
    assert not log.due(LIMITS)
    clocks.pass_seen(0.001)
    assert log.due(LIMITS) == Due(expire=[], stall=[], abandon=["x"])


def test_without_a_grace_period_a_stopped_operation_is_given_up_at_once(log: OperationLog) -> None:
    log.request_stop(accepted(log), CANCELLED)
    assert log.due(Limits(stall_timeout_s=30.0, stop_grace_s=0.0)).abandon == ["x"]


def test_an_outcome_is_never_due(log: OperationLog, clocks: Clocks) -> None:
    operation = accepted(log)
    log.request_stop(operation, CANCELLED)
    log.end(operation, *CANCELLED)
    clocks.pass_seen(1000.0)
    assert not log.due(LIMITS)


# ---- the outcome ----


@pytest.mark.parametrize("reason", list(Reason))
def test_the_state_follows_from_what_is_resident(reason: Reason) -> None:
    """The reason only tells a miss from a fault, and only when nothing is resident."""
    missed = reason in (Reason.NOT_IN_STORAGE, Reason.BELOW_THRESHOLD)
    for aligned, resident, expected in (
        (96, 96, State.RESTORED),
        (96, 112, State.RESTORED),
        (0, 0, State.RESTORED),
        (96, 95, State.PARTIAL),
        (96, 1, State.PARTIAL),
        (96, 0, State.MISS if missed else State.FAILED),
        (1, 0, State.MISS if missed else State.FAILED),
    ):
        assert outcome_state(aligned, resident, reason) is expected


# ---- the record's integrity ----


@pytest.mark.parametrize(
    "broken",
    [
        {"state": State.RESTORED},
        {"reason": Reason.COMPLETE},
        {"ended_at": 1.0},
        {"state": State.RESTORED, "ended_at": 1.0},
        {"state": State.RESTORED, "reason": Reason.COMPLETE},
        {"ended_at": 1.0, "reason": Reason.COMPLETE},
        {"aligned_tokens": 101},
        {"aligned_tokens": -1},
        {"resident_tokens": 97},
        {"resident_tokens": -1},
        {"read_tokens": -1},
        {"inserted_tokens": -1},
        {"dropped_tokens": -1},
        {"waiting_requests": 1},
        {"waiting_requests": -1},
        {"state": State.PARTIAL, "ended_at": 1.0, "reason": Reason.HOST_CAPACITY, "read_tokens": 16},
    ],
)
def test_a_record_that_cannot_be_is_told(broken: dict[str, Any]) -> None:
    make().check_integrity()
    with pytest.raises(AssertionError):
        make(**broken).check_integrity()


def test_a_log_whose_places_are_wrong_is_told(log: OperationLog, clocks: Clocks) -> None:
    operation = accepted(log)
    log.outcomes["x"] = operation
    with pytest.raises(AssertionError):
        log.check_integrity()
    log.active.clear()
    with pytest.raises(AssertionError):
        log.check_integrity()
    log.outcomes.clear()
    log.active["y"] = operation
    with pytest.raises(AssertionError):
        log.check_integrity()
    full = clocks.log(max_outcomes=0)
    ended = make(state=State.MISS, reason=Reason.NOT_IN_STORAGE, ended_at=1.0)
    full.outcomes["x"] = ended
    with pytest.raises(AssertionError):
        full.check_integrity()


# ---- any sequence of events ----


class Lives(RuleBasedStateMachine):
    """Operations of a log under any sequence of events, beside a plain account of what was done."""

    MAX_OUTCOMES = 3
    NAMES = st.sampled_from("abcdef")
    PICK = st.integers(0, 10**6)

    def __init__(self) -> None:
        super().__init__()
        self.clocks = Clocks()
        self.log = self.clocks.log(self.MAX_OUTCOMES)
        self.active: dict[str, Operation] = {}
        self.ended: list[Operation] = []
        self.outcomes: dict[int, tuple[State, Reason, float]] = {}
        self.stops: dict[int, Stop] = {}
        self.seen: list[Operation] = []

    def pick(self, number: int) -> Operation:
        return list(self.active.values())[number % len(self.active)]

    @rule(
        name=NAMES,
        ttl_s=st.sampled_from([0.5, 5.0, 60.0]),
        requested=st.integers(0, 200),
        resident=st.integers(0, 200),
        following=st.booleans(),
    )
    def accept(self, name: str, ttl_s: float, requested: int, resident: int, *, following: bool) -> None:
        aligned = requested - requested % 16
        operation = make(
            name,
            ttl_s=ttl_s,
            requested_tokens=requested,
            aligned_tokens=aligned,
            resident_tokens=min(resident, aligned),
            following=following,
        )
        if name in self.active:
            with pytest.raises(AssertionError):
                self.log.accept(operation)
            return
        self.log.accept(operation)
        self.active[name] = operation
        self.ended = [ended for ended in self.ended if ended.operation_id != name]
        self.seen.append(operation)

    @precondition(lambda self: self.active)
    @rule(number=PICK, state=st.sampled_from(ACTIVE), read_tokens=st.integers(0, 3))
    def advance(self, number: int, state: State, read_tokens: int) -> None:
        operation = self.pick(number)
        before = operation.progress
        progressed_at = operation.progressed_at
        self.log.advance(operation, state, read_tokens)
        moved = before != (state, read_tokens)
        assert operation.progressed_at == (self.clocks.watch_s if moved else progressed_at)

    @precondition(lambda self: self.active)
    @rule(number=PICK)
    def join(self, number: int) -> None:
        operation = self.pick(number)
        operation.joined_requests += 1
        operation.waiting_requests += 1

    @precondition(lambda self: self.active)
    @rule(number=PICK)
    def leave(self, number: int) -> None:
        operation = self.pick(number)
        operation.waiting_requests = max(0, operation.waiting_requests - 1)

    @precondition(lambda self: self.active)
    @rule(number=PICK, following=st.booleans())
    def follow(self, number: int, *, following: bool) -> None:
        self.log.wait(self.pick(number), following=following)

    @precondition(lambda self: self.active)
    @rule(number=PICK, queued=st.booleans())
    def queue(self, number: int, *, queued: bool) -> None:
        self.log.wait(self.pick(number), queued=queued)

    @precondition(lambda self: self.active)
    @rule(number=PICK, stop=st.sampled_from([CANCELLED, EXPIRED, STALLED]))
    def request_stop(self, number: int, stop: Stop) -> None:
        operation = self.pick(number)
        first = id(operation) not in self.stops
        assert self.log.request_stop(operation, stop) is first
        self.stops.setdefault(id(operation), stop)

    @precondition(lambda self: self.active)
    @rule(
        number=PICK,
        state=st.sampled_from(TERMINAL),
        reason=st.sampled_from(list(Reason)),
        inserted=st.integers(0, 64),
        dropped=st.integers(0, 64),
    )
    def end(self, number: int, state: State, reason: Reason, inserted: int, dropped: int) -> None:
        operation = self.pick(number)
        operation.read_tokens, operation.inserted_tokens = inserted + dropped, inserted
        operation.dropped_tokens = dropped
        self.log.end(operation, state, reason)
        assert id(operation) not in self.outcomes
        self.outcomes[id(operation)] = (state, reason, self.clocks.now_s)
        del self.active[operation.operation_id]
        self.ended = [*self.ended, operation][-self.MAX_OUTCOMES :]

    @precondition(lambda self: self.outcomes)
    @rule(number=PICK, state=st.sampled_from(TERMINAL))
    def nothing_moves_an_outcome(self, number: int, state: State) -> None:
        ended = [operation for operation in self.seen if id(operation) in self.outcomes]
        operation = ended[number % len(ended)]
        if operation.operation_id not in self.active:
            with pytest.raises((AssertionError, KeyError)):
                self.log.end(operation, state, Reason.COMPLETE)
        with pytest.raises(AssertionError):
            self.log.advance(operation, State.RESTORING)
        with pytest.raises(AssertionError):
            self.log.request_stop(operation, CANCELLED)

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 100.0]))
    def pass_seen(self, seconds: float) -> None:
        self.clocks.pass_seen(seconds)

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 100.0]))
    def pass_unseen(self, seconds: float) -> None:
        self.clocks.pass_unseen(seconds)

    @rule()
    def act_on_what_is_due(self) -> None:
        """As the restorer does, with a storage that returns at once when it is given up."""
        due = self.log.due(LIMITS)
        for name in due.expire:
            assert self.log.request_stop(self.active[name], EXPIRED)
            self.stops[id(self.active[name])] = EXPIRED
        for name in due.stall:
            assert self.log.request_stop(self.active[name], STALLED)
            self.stops[id(self.active[name])] = STALLED
        for name in [*due.stall, *due.abandon]:
            operation = self.active.pop(name)
            stop = self.stops[id(operation)]
            operation.read_tokens = operation.inserted_tokens = operation.dropped_tokens = 0
            self.log.end(operation, *stop)
            self.outcomes[id(operation)] = (*stop, self.clocks.now_s)
            self.ended = [*self.ended, operation][-self.MAX_OUTCOMES :]
        assert not self.log.due(LIMITS)

    @invariant()
    def the_log_is_sound(self) -> None:
        self.log.check_integrity()

    @invariant()
    def everyone_is_in_their_place(self) -> None:
        assert list(self.log) == list(self.active.values())
        assert list(self.log.outcomes.values()) == self.ended
        assert len(self.log.outcomes) <= self.MAX_OUTCOMES
        for operation in [*self.active.values(), *self.ended]:
            assert self.log.find(operation.operation_id) is operation

    @invariant()
    def each_has_one_outcome_and_keeps_it(self) -> None:
        for operation in self.seen:
            outcome = self.outcomes.get(id(operation))
            assert operation.state.terminal == (outcome is not None)
            if outcome is not None:
                assert (operation.state, operation.reason, operation.ended_at) == outcome
                assert not operation.status(self.clocks.now_s).stopping

    @invariant()
    def the_first_stop_stands(self) -> None:
        for operation in self.seen:
            assert operation.stop == self.stops.get(id(operation))

    @invariant()
    def due_is_what_it_says_and_changes_nothing(self) -> None:
        due = self.log.due(LIMITS)
        assert due == self.log.due(LIMITS)
        assert bool(due) == bool([*due.expire, *due.stall, *due.abandon])
        for name, operation in self.active.items():
            stopped = operation.stop is not None
            hangs = self.clocks.watch_s - operation.stopped_at >= LIMITS.stop_grace_s
            stalls = (
                not (operation.following or operation.queued)
                and self.clocks.watch_s - operation.progressed_at >= LIMITS.stall_timeout_s
            )
            is_late = self.clocks.now_s - operation.accepted_at >= operation.ttl_s
            assert (name in due.abandon) == (stopped and hangs)
            assert (name in due.stall) == (not stopped and stalls)
            assert (name in due.expire) == (
                not stopped and not stalls and is_late and not operation.waiting_requests
            )
        assert {*due.expire, *due.stall, *due.abandon} <= self.active.keys()


TestLives = Lives.TestCase
TestLives.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


@pytest.mark.parametrize(
    ("fields", "awaited"),
    [
        ({"state": State.RESTORED}, True),
        ({"state": State.PARTIAL}, True),
        ({"state": State.EXPIRED}, True),
        ({"state": State.CANCELLED}, False),
        ({"state": State.RESTORED, "used_tokens": 1}, False),
        ({"state": State.RESTORED, "leased_tokens": 16}, False),
    ],
)
def test_what_is_awaited_has_been_neither_used_nor_cancelled_nor_is_it_held(
    fields: dict[str, Any], *, awaited: bool
) -> None:
    assert make(**fields).is_awaited is awaited
