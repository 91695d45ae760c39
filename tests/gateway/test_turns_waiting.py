"""What is restored for a conversation, and when it is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from toolgap.gateway.policy import Settings, When
from toolgap.gateway.turns import AmbiguousCallError, Cancel, Owner, Step, Submit, Turns, UnknownCallError
from toolgap.hooks.restores import Call
from toolgap.hooks.tool_calls import Answer

OWNER = Owner("somewhere")
QUESTION = {"role": "user", "content": "q"}


def answer(*calls: str, request_id: str | None = "r") -> Answer:
    message = {"role": "assistant", "tool_calls": [{"id": call} for call in calls]}
    return Answer(request_id=request_id, request={"messages": [QUESTION]}, messages=[message], calls=calls)


def pause(turns: Turns, conversation: str, *calls: str, now_s: float = 0.0) -> list[Step]:
    return turns.paused(conversation, OWNER, answer(*calls), [Call(call, "tool") for call in calls], now_s)


def on_hint() -> Turns:
    return Turns("t", Settings(when=When.ON_HINT))


def test_an_answer_with_a_call_is_restored_by_its_request_and_else_by_its_messages() -> None:
    [step] = pause(Turns("t"), "c", "call")
    assert isinstance(step, Submit)
    assert step.operation_id == "t.1"
    by_request, by_messages = step.names
    assert by_request == {"request_id": "r"}
    assert len(by_messages["messages"] or ()) == 2


def test_what_cannot_be_named_is_not_restored_and_ends_what_was() -> None:
    turns = Turns("t")
    pause(turns, "c", "call")
    [step] = turns.paused("c", OWNER, Answer(calls=["x"]), [Call("x", "tool")], 1.0)
    assert step == Cancel("c", 1, "t.1")
    assert "c" not in turns
    turns.check_integrity()


def test_the_last_tools_end_restores_and_its_result_makes_the_prefix_longer() -> None:
    turns = on_hint()
    assert pause(turns, "c", "a", "b") == []
    result_a = {"role": "tool", "tool_call_id": "a", "content": "1"}
    result_b = {"role": "tool", "tool_call_id": "b", "content": "2"}
    assert turns.tool_ended("a", 1.0, result_a) == ("c", False, [])
    conversation, last, [step] = turns.tool_ended("b", 2.0, result_b)
    assert (conversation, last) == ("c", True)
    assert isinstance(step, Submit)
    assert list(step.names[0]["messages"] or ())[-2:] == [result_a, result_b]


def test_an_end_that_tells_nothing_new_leaves_a_restore_alone() -> None:
    turns = Turns("t")
    pause(turns, "c", "a")
    assert turns.tool_ended("a", 1.0) == ("c", True, [])


def test_an_end_submits_again_what_had_ended() -> None:
    turns = Turns("t")
    pause(turns, "c", "a")
    turns.ended("c", 1, took_s=0.5)
    _, _, [step] = turns.tool_ended("a", 1.0)
    assert isinstance(step, Submit)


def test_a_result_replaces_a_restore_without_it() -> None:
    turns = Turns("t")
    pause(turns, "c", "a")
    _, _, steps = turns.tool_ended("a", 1.0, {"role": "tool", "tool_call_id": "a", "content": "1"})
    assert [type(step) for step in steps] == [Cancel, Submit]


def test_progress_restores_in_time_and_only_of_the_last_call() -> None:
    turns = on_hint()
    pause(turns, "c", "a", "b")
    assert turns.progressed("a", 5.0, 0.0) == ("c", [])
    assert turns.next_s is not None
    turns.tool_ended("a", 1.0)
    assert turns.progressed("b", 10.0, 1.0) == ("c", [])
    assert turns.next_s == pytest.approx(10.0)
    [step] = turns.due(10.0)
    assert isinstance(step, Submit)
    assert step.expected_gap_s == pytest.approx(1.0)


def test_a_told_duration_is_a_hint() -> None:
    turns = Turns("t", Settings(when=When.ON_HINT), {"tool": 20.0})
    assert pause(turns, "c", "a") == []
    assert turns.next_s == pytest.approx(19.0)


def test_the_continuation_ends_the_gap_once() -> None:
    turns = Turns("t")
    pause(turns, "c", "a")
    assert turns.returned("c", 3.0) == 3.0
    assert turns.returned("c", 4.0) is None
    assert turns.returned("unknown", 4.0) is None
    with pytest.raises(UnknownCallError):
        turns.tool_ended("a", 5.0)


def test_a_call_that_two_conversations_wait_for_is_ambiguous() -> None:
    turns = Turns("t")
    pause(turns, "c", "a")
    pause(turns, "d", "a")
    with pytest.raises(AmbiguousCallError):
        turns.tool_ended("a", 1.0)
    turns.closed("d")
    assert turns.tool_ended("a", 1.0)[0] == "c"


def test_a_worker_that_is_gone_takes_its_conversations_along() -> None:
    turns = Turns("t")
    pause(turns, "c", "a")
    turns.paused("d", Owner("elsewhere"), answer("x"), [Call("x", "tool")], 0.0)
    assert turns.open_affinities() == {"somewhere", "elsewhere"}
    steps = turns.moved(["somewhere"], 1.0)
    assert [(type(step), step.conversation) for step in steps] == [(Cancel, "c"), (Submit, "c")]
    turns.returned("d", 2.0)
    assert turns.moved(["elsewhere"], 2.0) == []


def test_a_sessions_conversations_are_found_by_its_name() -> None:
    turns = Turns("t")
    owner = Owner("somewhere", session="s")
    turns.paused("c", owner, answer("x"), [Call("x", "tool")], 0.0)
    pause(turns, "d", "a")
    assert turns.of_session("s") == ("c",)


def test_a_key_is_in_no_text_of_an_owner() -> None:
    assert "secret" not in repr(Owner("a", "Bearer secret"))


class Machine(RuleBasedStateMachine):
    """Any order of events: nothing is kept without need, and every operation is one of a live turn."""

    conversations = Bundle("conversations")

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns("t", Settings(max_conversations=3, when=When.BEFORE_END), {"told": 5.0})
        self.now_s = 0.0
        self.live: dict[str, set[int]] = {}

    def take(self, steps: list[Step]) -> None:
        for step in steps:
            operations = self.live.setdefault(step.conversation, set())
            match step:
                case Submit():
                    assert step.operation not in operations
                    assert step.names
                    operations.add(step.operation)
                case Cancel():
                    assert step.operation in operations
                    operations.remove(step.operation)

    @rule(
        target=conversations,
        name=st.sampled_from("abcdef"),
        calls=st.sets(st.sampled_from("wxyz"), min_size=1),
    )
    def pauses(self, name: str, calls: set[str]) -> str:
        tools = [Call(call, "told" if call == "w" else "tool") for call in sorted(calls)]
        self.take(self.turns.paused(name, OWNER, answer(*sorted(calls)), tools, self.now_s))
        return name

    @rule(name=conversations)
    def returns(self, name: str) -> None:
        self.turns.returned(name, self.now_s)

    @rule(call=st.sampled_from("wxyz"), left_s=st.floats(0, 100))
    def progresses(self, call: str, left_s: float) -> None:
        try:
            self.take(self.turns.progressed(call, left_s, self.now_s)[1])
        except LookupError:
            return

    @rule(call=st.sampled_from("wxyz"), known=st.booleans())
    def a_tool_ends(self, call: str, known: bool) -> None:
        result = {"role": "tool", "tool_call_id": call} if known else None
        try:
            self.take(self.turns.tool_ended(call, self.now_s, result)[2])
        except LookupError:
            return

    @rule(name=consumes(conversations))
    def closes(self, name: str) -> None:
        self.take(self.turns.closed(name))

    @rule()
    def moves(self) -> None:
        self.take(self.turns.moved([OWNER.affinity], self.now_s))

    @rule(data=st.data())
    def an_operation_ends(self, data: st.DataObject) -> None:
        running = [(name, one) for name, ones in self.live.items() for one in ones]
        if running:
            name, one = data.draw(st.sampled_from(running))
            self.live[name].discard(one)
            self.turns.ended(name, one, data.draw(st.none() | st.floats(0, 10)))

    @rule(passed_s=st.floats(0.01, 5000))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.take(self.turns.due(self.now_s))

    @invariant()
    def nothing_is_kept_without_need(self) -> None:
        self.turns.check_integrity()
        assert len(self.turns) <= 3

    def teardown(self) -> None:
        self.take(self.turns.shut_down())
        assert len(self.turns) == 0
        self.turns.check_integrity()


TestMachine = Machine.TestCase


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_no_number_that_progress_may_say_is_a_fault(left_s: float) -> None:
    turns = on_hint()
    pause(turns, "c", "a")
    turns.progressed("a", left_s, 0.0)
    turns.due(1e9)
    turns.check_integrity()
