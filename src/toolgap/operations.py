"""The life of operations: states, deadlines, and the log of active ones and recent outcomes.

Pure: no I/O, no SGLang, and the clock is passed in. On several ranks every rank keeps the same log,
since its transitions follow from broadcast messages and rank-agreed engine state alone; only
:meth:`OperationLog.due` looks at the clock, and only the deciding rank calls it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from toolgap.protocol import Divergence, Estimate, OperationStatus, Reason, State, Target

_STEPS: dict[State, frozenset[State]] = {
    # A read that another one leads may fall back to asking storage itself.
    State.QUERYING: frozenset({State.RESTORING}),
    State.RESTORING: frozenset({State.QUERYING}),
}


class Stop(NamedTuple):
    """Why pending work is being stopped: the state and reason that the operation will end with."""

    state: State
    reason: Reason


CANCELLED = Stop(State.CANCELLED, Reason.REQUESTED)
EXPIRED = Stop(State.EXPIRED, Reason.TTL)
STALLED = Stop(State.FAILED, Reason.STORAGE_STALLED)


@dataclass(kw_only=True, eq=False)
class Operation:
    """One submitted restore. Times are of the log's clocks, in seconds; counts are of tokens."""

    operation_id: str
    fingerprint: bytes
    """Digest of token ids and namespace: equal for equal prefixes."""
    namespace: str
    requested_tokens: int
    aligned_tokens: int
    ttl_s: float
    submitted_ts: float = 0.0
    """Unix time, for people and for comparing with an engine's own times."""
    deadline_ts: float = 0.0
    """Unix time at which its continuation is expected: equal on all ranks, since it came with the submit."""
    target: Target = Target.HOST
    lease_s: float | None = None
    dp_rank: int | None = None
    stable_tokens: int | None = None
    accepted_at: float = 0.0
    ended_at: float | None = None
    state: State = State.QUERYING
    reason: Reason | None = None
    resident_tokens: int = 0
    found_tokens: int | None = None
    read_tokens: int = 0
    inserted_tokens: int = 0
    dropped_tokens: int = 0
    promoted_tokens: int = 0
    leased_tokens: int = 0
    used_tokens: int = 0
    matched_tokens: int | None = None
    divergence: Divergence | None = None
    joined_requests: int = 0
    waiting_requests: int = 0
    following: bool = False
    queued: bool = False
    stop: Stop | None = None
    stopped_at: float = 0.0
    progressed_at: float = 0.0
    progress: tuple[State, int] = (State.QUERYING, 0)
    queried_at: float | None = None
    first_read_at: float | None = None
    read_at: float | None = None
    used_at: float | None = None
    """When a request first used what it had inserted."""
    estimate: Estimate | None = None
    """What was expected at submission."""

    def status(self, now: float) -> OperationStatus:
        """What a client is told."""
        return OperationStatus(
            operation_id=self.operation_id,
            state=self.state,
            reason=self.reason,
            requested_tokens=self.requested_tokens,
            aligned_tokens=self.aligned_tokens,
            resident_tokens=self.resident_tokens,
            found_tokens=self.found_tokens,
            read_tokens=self.read_tokens,
            inserted_tokens=self.inserted_tokens,
            dropped_tokens=self.dropped_tokens,
            joined_requests=self.joined_requests,
            following=self.following,
            queued=self.queued,
            stopping=self.stop is not None and self.ended_at is None,
            ttl_s=self.ttl_s,
            elapsed_s=round((now if self.ended_at is None else self.ended_at) - self.accepted_at, 6),
            submitted_ts=self.submitted_ts,
            queried_s=self._since_acceptance(self.queried_at),
            first_read_s=self._since_acceptance(self.first_read_at),
            read_s=self._since_acceptance(self.read_at),
            namespace=self.namespace,
            dp_rank=self.dp_rank,
            target=self.target,
            promoted_tokens=self.promoted_tokens,
            lease_s=self.lease_s,
            leased_tokens=self.leased_tokens,
            used_tokens=self.used_tokens,
            used_after_s=self._since_acceptance(self.used_at),
            estimate=self.estimate,
            stable_tokens=self.stable_tokens,
            expected_tokens=None
            if self.stable_tokens is None
            else self.requested_tokens - self.stable_tokens,
            matched_tokens=self.matched_tokens,
            first_divergent_token=None if self.divergence is None else self.matched_tokens,
            divergence=self.divergence,
        )

    @property
    def is_awaited(self) -> bool:
        """Whether what it has restored is kept by nothing, and its continuation is still to come."""
        return not (self.leased_tokens or self.used_tokens or self.state is State.CANCELLED)

    def _since_acceptance(self, at: float | None) -> float | None:
        return None if at is None else round(at - self.accepted_at, 6)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the record is one that an operation can have."""
        assert self.state.terminal == (self.ended_at is not None) == (self.reason is not None)
        assert 0 <= self.aligned_tokens <= self.requested_tokens
        assert 0 <= self.resident_tokens <= self.aligned_tokens
        assert self.read_tokens == self.inserted_tokens + self.dropped_tokens or not self.state.terminal
        assert min(self.read_tokens, self.inserted_tokens, self.dropped_tokens) >= 0
        assert 0 <= self.waiting_requests <= self.joined_requests
        assert not (self.following and self.queued)
        assert 0 <= self.used_tokens <= self.inserted_tokens
        assert max(self.promoted_tokens, self.leased_tokens) <= self.aligned_tokens
        assert not self.leased_tokens or self.ended_at is not None
        assert 0 <= (self.stable_tokens or 0) <= self.requested_tokens
        assert 0 <= (self.matched_tokens or 0) <= self.requested_tokens
        assert (self.divergence is None) == (self.matched_tokens in (None, self.requested_tokens))


class Due(NamedTuple):
    """What the passing of time asks for, decided by one rank for all."""

    expire: list[str]
    """Their TTL passed: stop pending work."""
    stall: list[str]
    """Storage made no progress: give up the call in flight."""
    abandon: list[str]
    """Stopped, but the call in flight did not return in the grace period: give it up."""

    def __bool__(self) -> bool:
        return bool(self.expire or self.stall or self.abandon)


class Limits(NamedTuple):
    """Time limits of an operation, in seconds."""

    stall_timeout_s: float
    stop_grace_s: float


@dataclass(kw_only=True)
class OperationLog:
    """Active operations and the most recent outcomes, by id."""

    max_outcomes: int
    clock: Callable[[], float]
    watch: Callable[[], float]
    """A clock that runs only while progress can be seen; stalls and grace periods are measured on it."""
    active: dict[str, Operation] = field(default_factory=dict)
    outcomes: OrderedDict[str, Operation] = field(default_factory=OrderedDict)

    def __iter__(self) -> Iterator[Operation]:
        """Active operations in order of arrival; the log may change meanwhile."""
        return iter(list(self.active.values()))

    def find(self, operation_id: str) -> Operation | None:
        """An active or recent operation."""
        return self.active.get(operation_id) or self.outcomes.get(operation_id)

    def accept(self, operation: Operation) -> None:
        """Add a new operation; its id must be in use by no active one."""
        assert operation.operation_id not in self.active
        self.outcomes.pop(operation.operation_id, None)
        operation.accepted_at = self.clock()
        operation.progressed_at = self.watch()
        self.active[operation.operation_id] = operation

    def advance(self, operation: Operation, state: State, read_tokens: int = 0) -> None:
        """Note how far an active operation has come; any change counts as progress."""
        assert operation.ended_at is None
        assert state is operation.state or state in _STEPS[operation.state]
        operation.state = state
        if operation.progress != (state, read_tokens):
            operation.progress = (state, read_tokens)
            operation.progressed_at = self.watch()
            if state is State.RESTORING and operation.queried_at is None:
                operation.queried_at = self.clock()
            if read_tokens and operation.first_read_at is None:
                operation.first_read_at = self.clock()

    def wait(self, operation: Operation, *, queued: bool = False, following: bool = False) -> None:
        """Note what an active operation waits for: its turn, another's read, or (neither) its own read."""
        assert operation.ended_at is None
        operation.queued, operation.following = queued, following
        operation.progressed_at = self.watch()

    def request_stop(self, operation: Operation, stop: Stop) -> bool:
        """Ask an active operation to stop; the first request wins. False if one was made before."""
        assert operation.ended_at is None
        if operation.stop is not None:
            return False
        operation.stop = stop
        operation.stopped_at = self.watch()
        return True

    def end(self, operation: Operation, state: State, reason: Reason) -> list[Operation]:
        """Give an active operation its outcome: terminal, once, remembered among the recent ones.

        Returns:
            Outcomes that are not remembered any more.
        """
        assert state.terminal
        active = self.active.pop(operation.operation_id)
        assert active is operation
        operation.state, operation.reason = state, reason
        operation.ended_at = self.clock()
        operation.following = operation.queued = False
        operation.waiting_requests = 0
        self.outcomes[operation.operation_id] = operation
        return self.forget_oldest()

    def forget_oldest(self) -> list[Operation]:
        """Drop outcomes beyond the limit, oldest first and none that still holds a lease; returns them."""
        excess = len(self.outcomes) - self.max_outcomes
        dropped = [operation for operation in self.outcomes.values() if not operation.leased_tokens]
        dropped = dropped[: max(excess, 0)]
        for operation in dropped:
            del self.outcomes[operation.operation_id]
        return dropped

    def due(self, limits: Limits) -> Due:
        """What time asks for now. Idempotent: says the same again until it was acted on.

        A TTL does not cut a read that requests wait for; a stall does.
        """
        now, watched = self.clock(), self.watch()
        due = Due([], [], [])
        for operation in self.active.values():
            if operation.stop is not None:
                if watched - operation.stopped_at >= limits.stop_grace_s:
                    due.abandon.append(operation.operation_id)
            elif (
                not (operation.following or operation.queued)
                and watched - operation.progressed_at >= limits.stall_timeout_s
            ):
                due.stall.append(operation.operation_id)
            elif not operation.waiting_requests and now - operation.accepted_at >= operation.ttl_s:
                due.expire.append(operation.operation_id)
        return due

    def check_integrity(self) -> None:
        """Raise AssertionError unless every operation is in its place and sound."""
        leased = sum(operation.leased_tokens > 0 for operation in self.outcomes.values())
        assert len(self.outcomes) <= max(self.max_outcomes, leased)
        assert not self.active.keys() & self.outcomes.keys()
        for operation_id, operation in (self.active | self.outcomes).items():
            assert operation.operation_id == operation_id
            assert (operation.ended_at is None) == (operation_id in self.active)
            operation.check_integrity()


def outcome_state(aligned_tokens: int, resident_tokens: int, reason: Reason) -> State:
    """The terminal state of an operation that was not stopped.

    Args:
        aligned_tokens: What could be resident.
        resident_tokens: What of it is resident at the end, on the device or in host memory.
        reason: Why it ended.
    """
    if resident_tokens >= aligned_tokens:
        return State.RESTORED
    if resident_tokens > 0:
        return State.PARTIAL
    if reason in (Reason.NOT_IN_STORAGE, Reason.BELOW_THRESHOLD):
        return State.MISS
    return State.FAILED
