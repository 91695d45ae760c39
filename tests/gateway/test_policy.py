from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from toolgap.gateway.policy import Action, Policy, Restore, Settings, Stop, When
from toolgap.hooks.tool_calls import IMMINENT_S

BASH = ["Bash"]


def learned(settings: Settings, *gaps_s: float) -> Policy:
    policy = Policy(settings)
    for gap_s in gaps_s:
        policy.paused("earlier", BASH, 0.0)
        policy.returned("earlier", gap_s)
        policy.closed("earlier")
    return policy


def test_at_the_pause_once() -> None:
    policy = Policy(Settings(When.AT_PAUSE, longest_s=100.0))
    assert policy.paused("a", BASH, 1.0) == [Restore("a", 1, None)]
    policy.ended("a", 1)
    assert policy.due(100.0) == []
    assert policy.due(101.0) == []
    assert policy.next_s is None


def test_before_the_gap_is_likely_to_end_and_again_ever_more_rarely() -> None:
    policy = learned(
        Settings(When.BEFORE_END, lead_s=2.0, renew_s=5.0, growth=2.0, most=9, spread=100.0), *[60.0] * 10
    )
    assert policy.paused("a", BASH, 100.0) == []
    due_s = policy.next_s
    assert due_s is not None
    assert due_s == pytest.approx(100.0 + 60.0 - 2.0, rel=0.15)
    times: list[float] = []
    while (due_s := policy.next_s) is not None and len(times) < 5:
        for action in policy.due(due_s):
            assert isinstance(action, Restore)
            policy.ended("a", action.operation)
        times.append(due_s - 100.0)
    gaps = [later - earlier for earlier, later in pairwise(times[1:])]
    assert gaps == sorted(gaps)
    assert min(gaps) >= 5.0


@pytest.mark.parametrize("gaps_s", [[], [1.0, 3.0, 10.0, 100.0, 1000.0] * 5])
def test_a_gap_whose_end_is_not_predictable_is_left_alone(gaps_s: list[float]) -> None:
    policy = learned(Settings(When.BEFORE_END), *gaps_s)
    assert policy.paused("a", BASH, 0.0) == []
    looks = 0
    while (due_s := policy.next_s) is not None and due_s < 600.0:
        assert policy.due(due_s) == []
        looks += 1
    assert looks < 20


def test_a_hint_is_followed() -> None:
    policy = Policy(Settings(When.ON_HINT, lead_s=2.0))
    policy.paused("a", BASH, 0.0)
    assert policy.hinted("a", 30.0, 10.0) == []
    assert policy.next_s == 38.0
    assert policy.due(38.0) == [Restore("a", 1, 2.0)]
    policy.ended("a", 1)
    assert policy.due(39.0) == [Restore("a", 2, 1.0)]


def test_the_end_of_the_tool_restores_what_is_certain_now() -> None:
    policy = Policy(Settings(When.AT_PAUSE))
    policy.paused("a", BASH, 0.0)
    assert policy.tool_ended("a", 5.0, grown=False) == []
    assert policy.tool_ended("a", 5.0, grown=True) == [Stop("a", 1), Restore("a", 2, IMMINENT_S)]


def test_keeping_warm_leases_again_before_the_lease_is_over() -> None:
    policy = Policy(Settings(When.KEEP_WARM, lease_s=60.0, renew_s=1.0, growth=1.1))
    assert policy.paused("a", BASH, 0.0) == [Restore("a", 1, None, 60.0)]
    policy.ended("a", 1)
    assert policy.next_s == 60.0
    assert policy.due(60.0) == [Restore("a", 2, None, 60.0)]


def test_the_continuation_joins_and_the_next_turn_stops() -> None:
    policy = Policy(Settings(When.AT_PAUSE))
    policy.paused("a", BASH, 0.0)
    assert policy.returned("a", 5.0) == []
    assert policy.next_s is None
    assert policy.paused("a", BASH, 6.0) == [Stop("a", 1), Restore("a", 2, None)]
    assert policy.closed("a") == [Stop("a", 2)]


def test_a_gap_that_lasts_too_long_is_an_end() -> None:
    policy = Policy(Settings(When.BEFORE_END, longest_s=100.0))
    policy.paused("a", BASH, 0.0)
    while (due_s := policy.next_s) is not None:
        for action in policy.due(due_s):
            policy.ended("a", action.operation)
        assert due_s < 1000.0


def test_a_restore_starts_as_early_as_restores_take() -> None:
    policy = Policy(Settings(When.ON_HINT, lead_s=2.0))
    policy.paused("a", BASH, 0.0)
    for number in range(5):
        policy.ended("a", number, took_s=10.0)
    policy.hinted("a", 30.0, 0.0)
    assert policy.next_s == pytest.approx(20.0, rel=0.1)


CONVERSATIONS = st.sampled_from("abcde")
TOOLS = st.lists(st.sampled_from(["Bash", "Read"]), max_size=2)


class Timing(RuleBasedStateMachine):
    """Any events in any order, with time that goes on."""

    @initialize(
        when=st.sampled_from(When),
        renew_s=st.sampled_from([0.5, 5.0]),
        longest_s=st.sampled_from([3.0, 1000.0]),
    )
    def begin(self, when: When, renew_s: float, longest_s: float) -> None:
        self.now_s = 1000.0
        self.live: dict[str, int] = {}
        settings = Settings(when, renew_s=renew_s, lease_s=renew_s, longest_s=longest_s, max_conversations=3)
        self.policy = Policy(settings)
        self.paused: set[str] = set()

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Restore():
                    assert action.conversation not in self.live
                    assert action.expected_gap_s is None or action.expected_gap_s > 0
                    self.live[action.conversation] = action.operation
                case Stop():
                    assert self.live.pop(action.conversation) == action.operation

    @rule(conversation=CONVERSATIONS, tools=TOOLS)
    def pauses(self, conversation: str, tools: list[str]) -> None:
        self.carry_out(self.policy.paused(conversation, tools, self.now_s))

    @rule(conversation=CONVERSATIONS, left_s=st.floats(-5.0, 1000.0))
    def is_hinted(self, conversation: str, left_s: float) -> None:
        self.carry_out(self.policy.hinted(conversation, left_s, self.now_s))

    @rule(conversation=CONVERSATIONS, grown=st.booleans())
    def tool_ends(self, conversation: str, *, grown: bool) -> None:
        self.carry_out(self.policy.tool_ended(conversation, self.now_s, grown=grown))

    @rule(conversation=CONVERSATIONS)
    def returns(self, conversation: str) -> None:
        self.carry_out(self.policy.returned(conversation, self.now_s))

    @rule(conversation=CONVERSATIONS)
    def closes(self, conversation: str) -> None:
        self.carry_out(self.policy.closed(conversation))
        assert conversation not in self.live

    @rule(conversation=CONVERSATIONS, took_s=st.none() | st.floats(0.01, 100.0))
    def operation_ends(self, conversation: str, took_s: float | None) -> None:
        if conversation in self.live:
            self.carry_out(self.policy.ended(conversation, self.live.pop(conversation), took_s))

    @rule(seconds=st.floats(0.0, 500.0))
    def time_passes(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while (next_s := self.policy.next_s) is not None and next_s <= until_s:
            self.now_s = max(self.now_s, next_s)
            self.carry_out(self.policy.due(self.now_s))
            after_s = self.policy.next_s
            assert after_s is None or after_s > self.now_s
        self.now_s = until_s

    @invariant()
    def nothing_is_planned_in_the_past(self) -> None:
        if hasattr(self, "policy"):
            self.policy.check_integrity()
            next_s = self.policy.next_s
            assert next_s is None or next_s >= self.now_s

    def teardown(self) -> None:
        if hasattr(self, "policy"):
            self.carry_out(self.policy.shut_down())
            assert self.live == {}
            assert self.policy.next_s is None


TestTiming = Timing.TestCase
