from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from toolgap.client import PrefixFields
from toolgap.hooks.tool_calls import IMMINENT_S, Answer, Cancel, Message, Step, Submit, ToolCalls
from toolgap.protocol import Api

ASKED: list[Message] = [{"role": "user", "content": "Run the tests."}]
REQUEST: PrefixFields = {"messages": ASKED}
BY_ID: PrefixFields = {"request_id": "r"}


def answer(*calls: str, api: Api | None = None) -> Answer:
    request: PrefixFields = {"messages": ASKED} if api is None else {"messages": ASKED, "api": api}
    return Answer(request_id="r", request=request, messages=[said(*calls)], calls=calls)


def said(*calls: str) -> Message:
    return {"role": "assistant", "tool_calls": [{"id": call} for call in calls]}


def result(call: str) -> Message:
    return {"role": "tool", "tool_call_id": call, "content": "done"}


def submits(steps: Sequence[Step]) -> list[Submit]:
    return [step for step in steps if isinstance(step, Submit)]


def test_an_answer_with_calls_submits_at_once_by_its_id_else_by_messages() -> None:
    calls = ToolCalls("s")
    by_messages: PrefixFields = {"messages": [*ASKED, said("a")]}
    assert calls.answered(answer("a"), 3.0) == [Submit("s.1", (BY_ID, by_messages), 3.0)]
    assert calls.started("a") == []


def test_calls_of_one_turn_share_an_operation() -> None:
    calls = ToolCalls("s")
    assert len(calls.answered(answer("a", "b"))) == 1
    assert calls.started("a") + calls.started("b") == []


def test_a_start_submits_if_the_answer_did_not_say_that_it_calls() -> None:
    calls = ToolCalls("s")
    assert calls.answered(Answer(request_id="r")) == []
    assert calls.started("a", 2.0) == [Submit("s.1", (BY_ID,), 2.0)]
    assert calls.started("b") == []


def test_an_end_names_more_of_the_next_prompt() -> None:
    calls = ToolCalls("s")
    calls.answered(answer("a", "b"))
    with_result: PrefixFields = {"messages": [*ASKED, said("a", "b"), result("a")]}
    assert calls.ended("a", result("a")) == [Submit("s.2", (with_result, BY_ID))]


def test_the_last_end_says_that_the_continuation_is_imminent() -> None:
    calls = ToolCalls("s")
    calls.answered(answer("a"))
    (submit,) = submits(calls.ended("a", result("a")))
    assert submit.expected_gap_s == IMMINENT_S


def test_a_result_behind_a_missing_one_is_not_certain_yet() -> None:
    calls = ToolCalls("s")
    (first,) = submits(calls.answered(answer("a", "b")))
    assert calls.ended("b", result("b")) == [Submit("s.2", first.names, None, unless_active=("s.1",))]
    (last,) = submits(calls.ended("a", result("a")))
    assert (last.names[0].get("messages") or [])[-2:] == [result("a"), result("b")]


def test_results_of_anthropics_form_are_blocks_of_one_message() -> None:
    calls = ToolCalls("s")
    calls.answered(answer("a", "b", api=Api.ANTHROPIC))
    calls.ended("a", {"type": "tool_result", "tool_use_id": "a"})
    (submit,) = submits(calls.ended("b", {"type": "tool_result", "tool_use_id": "b"}))
    (message,) = (submit.names[0].get("messages") or [])[2:]
    assert message["role"] == "user"
    assert [block["tool_use_id"] for block in message["content"]] == ["a", "b"]


def test_an_end_without_its_result_refreshes_the_same_prefix() -> None:
    calls = ToolCalls("s")
    (first,) = submits(calls.answered(answer("a")))
    assert calls.ended("a") == [Submit("s.2", first.names, IMMINENT_S, unless_active=("s.1",))]


def test_a_call_that_starts_after_all_others_have_ended_refreshes() -> None:
    calls = ToolCalls("s")
    calls.answered(Answer(request_id="r"))
    calls.started("a")
    calls.ended("a")
    assert calls.started("b") == [Submit("s.3", (BY_ID,), None, unless_active=("s.1", "s.2"))]


def test_a_newer_answer_cancels_what_is_older() -> None:
    calls = ToolCalls("s")
    calls.answered(answer("a"))
    calls.ended("a")
    assert calls.answered(Answer(request_id="q")) == [Cancel("s.1"), Cancel("s.2")]


def test_the_sessions_end_cancels() -> None:
    calls = ToolCalls("s")
    calls.answered(answer("a"))
    assert calls.closed() == [Cancel("s.1")]
    assert calls.ended("a") == calls.started("b") == calls.closed() == []


def test_nothing_is_sent_for_a_prefix_without_a_name() -> None:
    calls = ToolCalls("s")
    assert calls.answered(Answer(calls=["a"])) == calls.started("a") == calls.ended("a") == []


def test_ends_that_were_not_started_and_second_ends_are_ignored() -> None:
    calls = ToolCalls("s")
    calls.answered(answer("a"))
    assert calls.ended("z") == []
    calls.ended("a")
    assert calls.ended("a") == calls.started("a") == []


@given(st.permutations(["a", "b", "c", "d"]), st.integers(0, 4))
def test_results_join_in_the_order_of_the_calls_whatever_ends_first(order: list[str], known: int) -> None:
    calls = ToolCalls("s")
    calls.answered(answer("a", "b", "c", "d"))
    longest = 0
    for number, call in enumerate(order):
        for submit in submits(calls.ended(call, result(call) if number < known else None)):
            for name in submit.names:
                messages = list(name.get("messages") or [])
                names = [message["tool_call_id"] for message in messages[2:]]
                assert names == ["a", "b", "c", "d"][: len(names)]
                assert not messages or len(names) >= longest
                longest = max(longest, len(names))


class Session(RuleBasedStateMachine):
    """Any order of events: what was submitted is cancelled once, and nothing else is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = ToolCalls("s")
        self.live: list[str] = []
        self.ids: set[str] = set()

    def take(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Cancel):
                self.live.remove(step.operation_id)
            else:
                assert step.operation_id not in self.ids
                assert step.names
                assert set(step.unless_active) <= set(self.live)
                self.ids.add(step.operation_id)
                self.live.append(step.operation_id)

    @rule(calls=st.lists(st.sampled_from("abc"), unique=True), known=st.booleans())
    def answer(self, calls: list[str], known: bool) -> None:
        steps = self.calls.answered(answer(*calls) if known else Answer(calls=calls))
        self.take(steps)
        assert len(self.live) == bool(known and calls)

    @rule(call=st.sampled_from("abc"))
    def start(self, call: str) -> None:
        self.take(self.calls.started(call))

    @rule(call=st.sampled_from("abc"), known=st.booleans())
    def end(self, call: str, known: bool) -> None:
        was_open = call in self.calls.open_calls
        steps = self.calls.ended(call, result(call) if known else None)
        self.take(steps)
        assert len(steps) <= was_open

    @rule(left_s=st.floats(0.1, 100))
    def progress(self, left_s: float) -> None:
        self.take(self.calls.again(left_s))

    @rule()
    def close(self) -> None:
        self.take(self.calls.closed())
        assert not self.live

    @invariant()
    def an_open_call_is_known_by_one_state(self) -> None:
        assert self.calls.open_calls <= set("abc")


TestSession = Session.TestCase
