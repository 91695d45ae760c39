"""Joins: ordinary requests that wait for an operation's read instead of starting their own."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from toolgap.settings import Settings
from toolgap.sglang.internals.engine import Engine
from toolgap.sglang.internals.requests import Prefix
from toolgap.sglang.leaders import Leaders
from toolgap.sglang.metrics import Metrics
from toolgap.sglang.work import Work


class Join(NamedTuple):
    """A request that waits for an operation."""

    work: Work
    end_tokens: int
    """Once so much of the prefix is resident, it waits no longer."""
    since_s: float
    """By the clock of this rank; only the deciding rank's is looked at."""
    budget_s: float


class Joins:
    """The requests that wait in one scheduler, by SGLang's handle of each.

    Args:
        engine: It knows how long SGLang would let a request wait for a read of its own.
        settings: Whether requests join at all, and how long they wait.
        leaders: Tells which operation is worth waiting for.
        metrics: Joins are counted.
        work: Active operations by id.
        clock: Monotonic, in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        leaders: Leaders,
        metrics: Metrics,
        work: Mapping[str, Work],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._leaders = leaders
        self._metrics = metrics
        self._work = work
        self._clock = clock
        self._joins: dict[Any, Join] = {}

    def __len__(self) -> int:
        return len(self._joins)

    def __iter__(self) -> Iterator[Any]:
        """Handles of the requests that wait."""
        return iter(self._joins)

    def holds(self, handle: Any) -> bool:
        """Whether a request still waits for an operation."""
        return handle in self._joins

    def begin(self, handle: Any, prefix: Prefix, matched_tokens: int) -> bool:
        """Let a request wait for the first operation that reads its pages, or go on waiting.

        Args:
            handle: The request.
            prefix: What it asks the cache for.
            matched_tokens: What of it is resident.

        Returns:
            Whether the request is to leave out its own read: it waits, or has waited and goes on without.
        """
        if not self._settings.join:
            return False
        before = self._joins.get(handle)
        for work in self._work.values():
            end_tokens = self._leaders.brought_by(work, prefix, matched_tokens)
            if end_tokens is None:
                continue
            if handle in work.declined or (before is not None and before.work is work):
                return True
            self._leave(handle)
            budget_s = self._settings.join_timeout_s or self._engine.wait_budget_s(
                end_tokens - matched_tokens
            )
            self._joins[handle] = Join(work, end_tokens, self._clock(), budget_s)
            work.joined.add(handle)
            work.operation.joined_requests += 1
            work.operation.waiting_requests = len(work.joined)
            self._metrics.joined()
            return True
        self._leave(handle)
        return False

    def due(self, now: float) -> list[tuple[str, int]]:
        """Requests (rid, attempt) whose wait is over."""
        return [
            (handle.rid, handle.attempt_id)
            for handle, join in self._joins.items()
            if now - join.since_s >= join.budget_s
        ]

    def give_up(self, rid: str, attempt: int) -> None:
        """Let a request go on without the operation that it waits for; it does not join that one again."""
        for handle in [handle for handle in self._joins if (handle.rid, handle.attempt_id) == (rid, attempt)]:
            self._joins[handle].work.declined.add(handle)
            self._leave(handle)

    def forget(self, handle: Any) -> None:
        """A request was aborted or retried."""
        self._leave(handle)
        for work in self._work.values():
            work.declined.discard(handle)

    def let_go(self, work: Work) -> set[Any]:
        """End the joins that wait for no more than has landed; returns their handles."""
        satisfied = {handle for handle in work.joined if self._joins[handle].end_tokens <= work.landed_tokens}
        for handle in satisfied:
            self._leave(handle)
        return satisfied

    def end_all(self, work: Work) -> set[Any]:
        """An operation has ended: end its joins; returns their handles."""
        waited = set(work.joined)
        for handle in waited:
            self._joins.pop(handle, None)
        work.joined.clear()
        return waited

    def still_missing(self, handles: Iterable[Any], work: Work, known_end_tokens: int) -> set[Any]:
        """Of the requests that waited, those for which storage may hold more than the read brought.

        Args:
            handles: Those that waited.
            work: The operation that they waited for.
            known_end_tokens: Storage holds nothing of its prefix behind this.
        """
        prefixes = self._engine.waiting_prefixes(set(handles))
        return {
            handle
            for handle, prefix in prefixes.items()
            if self._engine.align(work.prefix.shared_tokens(prefix)) <= known_end_tokens
        }

    def forget_all(self) -> None:
        """No operation is active any more."""
        self._joins.clear()

    def _leave(self, handle: Any) -> None:
        join = self._joins.pop(handle, None)
        if join is not None:
            join.work.joined.discard(handle)
            join.work.operation.waiting_requests = len(join.work.joined)

    def check_integrity(self) -> None:
        """Raise AssertionError unless each join is one of an active operation that knows of it."""
        for handle, join in self._joins.items():
            assert self._work[join.work.operation.operation_id] is join.work
            assert handle in join.work.joined
