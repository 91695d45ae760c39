"""When to restore. Pure: every event comes with the time, and what is to be done is returned.

Whoever uses it carries the actions out in order, reports every operation that has ended (:meth:`Policy.ended`),
and asks :meth:`Policy.due` again at :attr:`Policy.next_s`.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from toolgap.gateway.durations import Durations, Sketch, kind_of
from toolgap.hooks.tool_calls import IMMINENT_S


class When(StrEnum):
    """The ways to choose the time."""

    AT_PAUSE = "at-pause"
    """At once, which costs nothing where the prefix is resident, and otherwise only on a hint."""
    BEFORE_END = "before-end"
    """Before the gap is likely to end, where the gaps of the same tools before tell when that is; again, ever more
    rarely, while it lasts."""
    ON_HINT = "on-hint"
    """Only when somebody says that the tool has ended, or when it will."""
    KEEP_WARM = "keep-warm"
    """At once with a lease, and again before it is over."""


class Settings(NamedTuple):
    """Of a policy. A hint is followed in every way."""

    when: When = When.AT_PAUSE
    share: float = 0.1
    """Of the gaps that may end before the restore has been made."""
    spread: float = 4.0
    """Times the time until the first gaps end, or ``lead_s``: by then all but ``share`` must have ended, or the
    end is not predictable and nothing is restored without a hint."""
    lead_s: float = 1.0
    """How long a restore takes, until some have been seen."""
    renew_s: float = 5.0
    """The least time between two submits for one turn, unless a hint comes."""
    growth: float = 1.5
    """The time between two submits is at least the gap so far times this, less the gap: 1.5 is half as long
    again, so that a long gap has few of them."""
    most: int = 2
    """Submits of one turn before its end is known: a gap that has lasted long is likely to last long."""
    lease_s: float = 60.0
    """Of a restore that keeps warm."""
    longest_s: float = 3600.0
    """A gap that lasts longer is taken for the end of the conversation."""
    max_conversations: int = 4096
    """Those in a gap; the one that was quiet longest is given up."""


class Restore(NamedTuple):
    """Submit the turn's prefix, as it is known now."""

    conversation: str
    operation: int
    expected_gap_s: float | None
    """For the submit; None if nothing says."""
    lease_s: float | None = None


class Stop(NamedTuple):
    """Cancel an operation."""

    conversation: str
    operation: int


Action = Restore | Stop


class _Turn:
    def __init__(self, kind: str, paused_s: float) -> None:
        self.kind, self.paused_s = kind, paused_s
        self.live: int | None = None
        self.due_s: float | None = None
        self.end_s: float | None = None
        """When a hint says that the gap ends."""
        self.returned = False
        self.submits = 0
        self.restores_when_due = False


class Policy:
    """The conversations that are in a gap.

    Args:
        settings: How the time is chosen.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.gaps = Durations()
        self._restores = Sketch()
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._heap: list[tuple[float, str]] = []
        self._operation = 0

    # ---- what happens ----

    def paused(self, conversation: str, tools: Iterable[str], now_s: float) -> list[Action]:
        """An answer with calls of these tools has left. What was before in this conversation is over."""
        actions = self.closed(conversation)
        turn = self._turns[conversation] = _Turn(kind_of(tools), now_s)
        if self.settings.when in (When.AT_PAUSE, When.KEEP_WARM):
            actions += self._restore(conversation, turn, now_s)
        self._plan(conversation, turn, now_s, least_s=0.0)
        while len(self._turns) > self.settings.max_conversations:
            actions += self.closed(next(iter(self._turns)))
        return actions

    def hinted(self, conversation: str, left_s: float, now_s: float) -> list[Action]:
        """Somebody says when the gap ends: progress, or a plan."""
        turn = self._open(conversation)
        if turn is None or not math.isfinite(left_s):
            return []
        turn.end_s, turn.restores_when_due = now_s + max(left_s, 0.0), True
        self._at(conversation, turn, max(now_s, turn.end_s - self._lead_s()))
        return self.due(now_s)

    def tool_ended(self, conversation: str, now_s: float, *, grown: bool) -> list[Action]:
        """The last tool of the turn has ended: the continuation is imminent.

        Args:
            conversation: Whose.
            now_s: The time.
            grown: Whether more of the next prompt is certain now, such as the tool's result.
        """
        turn = self._open(conversation)
        if turn is None:
            return []
        turn.end_s, turn.due_s = now_s, None
        if turn.live is not None and not grown:
            return []
        return [*self._stop(conversation, turn), *self._restore(conversation, turn, now_s)]

    def returned(self, conversation: str, now_s: float) -> list[Action]:
        """The continuation has come. A restore that still reads goes on, as the continuation joins it."""
        turn = self._open(conversation)
        if turn is not None:
            self.gaps.add(turn.kind, now_s - turn.paused_s)
            turn.due_s, turn.returned = None, True
        return []

    def moved(self, conversation: str, now_s: float) -> list[Action]:
        """The conversation goes on at another worker, where its prefix has never been."""
        turn = self._open(conversation)
        if turn is None:
            return []
        return [*self._stop(conversation, turn), *self._restore(conversation, turn, now_s)]

    def ended(self, conversation: str, operation: int, took_s: float | None = None) -> list[Action]:
        """An operation has ended, or was refused.

        Args:
            conversation: Whose.
            operation: Its number.
            took_s: From submit to outcome, if it has read something.
        """
        if took_s is not None:
            self._restores.add(took_s)
        turn = self._turns.get(conversation)
        if turn is not None and turn.live == operation:
            turn.live = None
        return []

    def closed(self, conversation: str) -> list[Action]:
        """The conversation has ended, moved on, or answers without calling a tool."""
        turn = self._turns.pop(conversation, None)
        return [] if turn is None else self._stop(conversation, turn)

    def shut_down(self) -> list[Action]:
        """Everything ends."""
        return [action for conversation in list(self._turns) for action in self.closed(conversation)]

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, conversation: str) -> bool:
        """Whether it is in a gap, or its continuation is under way."""
        return conversation in self._turns

    # ---- time ----

    @property
    def next_s(self) -> float | None:
        """When to ask :meth:`due` again; None if nothing is planned."""
        while self._heap and not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> list[Action]:
        """What is to be done by now."""
        actions: list[Action] = []
        while (next_s := self.next_s) is not None and next_s <= now_s:
            _, conversation = heapq.heappop(self._heap)
            turn = self._turns[conversation]
            turn.due_s = None
            if now_s - turn.paused_s >= self.settings.longest_s:
                actions += self.closed(conversation)
                continue
            # While one reads there is nothing to repeat.
            if turn.live is None and turn.restores_when_due:
                actions += self._restore(conversation, turn, now_s)
            elapsed_s = now_s - turn.paused_s
            least_s = max(self.settings.renew_s, elapsed_s * (self.settings.growth - 1))
            self._plan(conversation, turn, now_s, least_s)
        return actions

    def left_s(self, conversation: str, now_s: float) -> float | None:
        """How long a gap is likely to last still, in seconds; None if nothing tells, or if it is over."""
        turn = self._open(conversation)
        return None if turn is None else self._left_s(turn, now_s)

    def _open(self, conversation: str) -> _Turn | None:
        turn = self._turns.get(conversation)
        return None if turn is None or turn.returned else turn

    def _restore(self, conversation: str, turn: _Turn, now_s: float) -> list[Action]:
        self._operation += 1
        turn.live = self._operation
        turn.submits += 1
        lease_s = self.settings.lease_s if self.settings.when is When.KEEP_WARM else None
        return [Restore(conversation, turn.live, self._left_s(turn, now_s), lease_s)]

    def _stop(self, conversation: str, turn: _Turn) -> list[Action]:
        live, turn.live = turn.live, None
        return [] if live is None else [Stop(conversation, live)]

    def _left_s(self, turn: _Turn, now_s: float) -> float | None:
        if turn.end_s is not None:
            return max(turn.end_s - now_s, IMMINENT_S)
        elapsed_s = now_s - turn.paused_s
        whole_s = self.gaps.quantile(turn.kind, 0.5, elapsed_s)
        return None if whole_s is None else max(whole_s - elapsed_s, IMMINENT_S)

    def _lead_s(self) -> float:
        seen_s = self._restores.quantile(0.9)
        return self.settings.lead_s if seen_s is None else seen_s

    def _plan(self, conversation: str, turn: _Turn, now_s: float, least_s: float) -> None:
        """Set when the turn is looked at again, in ``least_s`` at the earliest."""
        settings, is_hinted = self.settings, turn.end_s is not None
        turn.restores_when_due = True
        if turn.end_s is not None and turn.end_s > now_s:
            # What is early may have left host memory again by then.
            due_s = now_s + max((turn.end_s - now_s) / 2, IMMINENT_S)
        elif settings.when is When.KEEP_WARM and turn.submits < settings.most and not is_hinted:
            # A lease begins when its restore ends, so that this is before it is over.
            due_s = now_s + settings.lease_s
        elif settings.when is When.BEFORE_END and turn.submits < settings.most and not is_hinted:
            left_s = self._predicted_s(turn, now_s)
            turn.restores_when_due = left_s is not None
            due_s = now_s + max(settings.renew_s if left_s is None else left_s - self._lead_s(), least_s)
        else:
            # Only to see that it has become too long.
            turn.restores_when_due = False
            due_s = max(turn.paused_s + settings.longest_s, now_s + least_s)
        self._at(conversation, turn, due_s)

    def _predicted_s(self, turn: _Turn, now_s: float) -> float | None:
        """The time left until the first gaps like this end, in seconds; None if that is not predictable."""
        share, elapsed_s = self.settings.share, now_s - turn.paused_s
        first_s = self.gaps.quantile(turn.kind, share, elapsed_s)
        last_s = self.gaps.quantile(turn.kind, 1 - share, elapsed_s)
        if first_s is None or last_s is None:
            return None
        least_s = max(first_s - elapsed_s, self.settings.lead_s)
        return first_s - elapsed_s if last_s - elapsed_s <= self.settings.spread * least_s else None

    def _at(self, conversation: str, turn: _Turn, due_s: float) -> None:
        turn.due_s = due_s
        heapq.heappush(self._heap, (due_s, conversation))
        if len(self._heap) > 2 * len(self._turns) + 16:
            self._heap = list({entry for entry in self._heap if self._is_valid(entry)})
            heapq.heapify(self._heap)

    def _is_valid(self, entry: tuple[float, str]) -> bool:
        turn = self._turns.get(entry[1])
        return turn is not None and turn.due_s == entry[0]

    def check_integrity(self) -> None:
        """Raises AssertionError if something is kept without need, or planned for nobody."""
        assert len(self._turns) <= self.settings.max_conversations
        assert len(self._heap) <= 2 * self.settings.max_conversations + 18
        for conversation, turn in self._turns.items():
            assert turn.due_s is None or (turn.due_s, conversation) in self._heap
