"""A week of conversations in simulated time: what is kept does not grow, and what is done holds together."""

import gc
import heapq
import random
from collections.abc import Iterator
from itertools import count
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import pytest

from toolgap.gateway.durations import MAX_KINDS
from toolgap.gateway.policy import Action, Policy, Restore, Settings, Stop, When
from toolgap.gateway.sessions import Sessions
from toolgap.hooks.tool_calls import Answer, ToolCalls

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
HOUR_S, DAY_S, DAYS = 3600.0, 86_400.0, 7
CONVERSATIONS = 2500
MOST = 32
"""Conversations that are remembered: fewer than there are at times, so that some have to make room."""

TOOLS = [f"tool-{number}" for number in range(2 * MAX_KINDS)]
Message = dict[str, Any]


def reachable(*roots: object) -> int:
    """How many objects are kept by some, their code and types left out."""
    seen: dict[int, object] = {}
    waiting: list[object] = list(roots)
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type | ModuleType | FunctionType | BuiltinFunctionType):
            continue
        seen[id(item)] = item
        waiting += gc.get_referents(item)
    return len(seen)


class Talk:
    """One conversation's client."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.headers = {"session-id": f"talk {number}"} if number % 2 else {}
        self.messages: list[Message] = [{"role": "user", "content": f"talk {number}"}]
        self.turns = rng.choice((0, 1, 2, 4, 8))
        self.key = ""

    def go_on(self, call: str) -> None:
        said = {"role": "assistant", "content": None, "tool_calls": [{"id": call}]}
        self.messages += [said, {"role": "tool", "tool_call_id": call, "content": "x"}]


class Week:
    """The conversations of a week, and a gateway's pure parts."""

    def __init__(self, when: When) -> None:
        self.rng = random.Random(f"week/{when}")
        self.sessions = Sessions(MOST)
        self.policy = Policy(Settings(when, max_conversations=MOST))
        self.calls: dict[str, ToolCalls] = {}
        self.live: dict[str, int] = {}
        self.open: set[str] = set()
        self.operations = 0
        self.submits = self.stops = self.returns = self.forgotten = 0
        self.events: list[tuple[float, int, str, Any]] = []
        self.numbers = count()
        self.now_s = 0.0
        for number in range(CONVERSATIONS):
            self.at(self.rng.uniform(0.0, DAYS * DAY_S), "asks", Talk(number, self.rng))

    def at(self, due_s: float, what: str, about: Any) -> None:
        heapq.heappush(self.events, (due_s, next(self.numbers), what, about))

    def play(self) -> Iterator[int]:
        """Until the week is over; yields the number of each day that has ended."""
        day = 1
        while self.events:
            due_s, _, what, about = heapq.heappop(self.events)
            while (next_s := self.policy.next_s) is not None and next_s <= due_s:
                self.now_s = max(self.now_s, next_s)
                self.carry_out(self.policy.due(self.now_s))
            self.now_s = due_s
            getattr(self, what)(about)
            if self.now_s > day * DAY_S:
                self.check()
                yield day
                day += 1

    def asks(self, talk: Talk) -> None:
        found = self.sessions.of(CHAT, talk.headers, {"model": "m", "messages": talk.messages})
        if len(talk.messages) == 1 or not found.continues:
            talk.key = found.key
        assert found.key == talk.key
        for forgotten in found.forgotten:
            self.ends(forgotten)
            self.forgotten += 1
        self.carry_out(self.policy.returned(found.key, self.now_s))
        self.returns += found.key in self.open
        self.open.discard(found.key)
        if not talk.turns:
            self.ends(found.key)
            self.sessions.forget(found.key)
            return
        talk.turns -= 1
        tool, call = self.rng.choice(TOOLS), f"c{len(talk.messages)}"
        steps = self.calls.setdefault(found.key, ToolCalls("s")).answered(
            Answer(request_id="r", calls=[call])
        )
        assert sum(hasattr(step, "names") for step in steps) == 1
        self.open.add(found.key)
        self.carry_out(self.policy.paused(found.key, [tool], self.now_s))
        gap_s = min(self.rng.lognormvariate(2.0, 2.5), 2 * HOUR_S)
        if self.rng.random() < 0.3:
            self.at(self.now_s + gap_s / 2, "hinted", (found.key, gap_s / 2))
        if self.rng.random() < 0.3:
            self.at(self.now_s + gap_s, "tool_ended", (found.key, call))
        # Some clients never come back.
        if self.rng.random() < 0.95:
            talk.go_on(call)
            self.at(self.now_s + gap_s + 0.1, "asks", talk)

    def hinted(self, hint: tuple[str, float]) -> None:
        self.carry_out(self.policy.hinted(*hint, self.now_s))

    def tool_ended(self, ended: tuple[str, str]) -> None:
        key, call = ended
        if key in self.calls:
            self.calls[key].ended(call)
        self.carry_out(self.policy.tool_ended(key, self.now_s, grown=self.rng.random() < 0.5))

    def operation_ended(self, operation: tuple[str, int]) -> None:
        key, number = operation
        if self.live.get(key) == number:
            del self.live[key]
            self.carry_out(self.policy.ended(key, number, self.rng.choice((None, 0.2, 2.0))))

    def ends(self, key: str) -> None:
        self.carry_out(self.policy.closed(key))
        assert key not in self.live
        self.calls.pop(key, None)
        self.open.discard(key)

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Restore():
                    # One at a time, of a conversation in a gap, numbered once.
                    assert action.conversation not in self.live
                    assert action.conversation in self.open
                    assert action.operation > self.operations
                    assert action.expected_gap_s is None or action.expected_gap_s > 0
                    assert (action.lease_s is not None) == (self.policy.settings.when is When.KEEP_WARM)
                    self.operations = self.live[action.conversation] = action.operation
                    self.submits += 1
                    self.at(
                        self.now_s + self.rng.expovariate(1.0),
                        "operation_ended",
                        (action.conversation, action.operation),
                    )
                case Stop():
                    assert self.live.pop(action.conversation) == action.operation
                    self.stops += 1

    def check(self) -> None:
        self.sessions.check_integrity()
        self.policy.check_integrity()
        assert len(self.sessions) <= MOST
        assert len(self.calls) <= MOST
        assert self.live.keys() <= self.calls.keys()


@pytest.mark.parametrize("when", When)
def test_a_week_leaves_no_more_behind_than_a_day(when: When) -> None:
    week = Week(when)
    kept = [reachable(week.sessions, week.policy, week.calls) for _ in week.play()]
    assert len(kept) >= DAYS - 1
    # At every evening something else is under way; but it is not what the days before have left.
    assert max(kept[2:]) < 1.5 * max(kept[:2])
    assert week.returns > CONVERSATIONS
    assert week.forgotten > 0
    if when is not When.ON_HINT:
        assert week.submits > week.stops > 0
    week.carry_out(week.policy.shut_down())
    assert week.live == {}
    assert week.policy.next_s is None
