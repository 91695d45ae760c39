import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from toolgap.gateway.sessions import BLOCK_CHARACTERS, Conversation, Sessions, session_name

CHAT, MESSAGES, RESPONSES, COMPLETIONS = (
    *("/v1/chat/completions", "/v1/messages"),
    *("/v1/responses", "/v1/completions"),
)
CLAUDE = {"x-claude-code-session-id": "s1"}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def ask(
    sessions: Sessions, *messages: Any, headers: dict[str, str] | None = None, **body: Any
) -> Conversation:
    found = sessions.of(CHAT, headers or {}, {"model": "m", "messages": list(messages), **body})
    sessions.check_integrity()
    return found


def test_without_a_name_a_request_goes_on_with_what_it_begins_with() -> None:
    sessions = Sessions()
    system = {"role": "system", "content": "You are an agent."}
    first = ask(sessions, system, user("a"))
    other = ask(sessions, system, user("b"))
    second = ask(sessions, system, user("a"), said("x"), user("c"))
    third = ask(sessions, system, user("a"), said("x"), user("c"), said("y"), user("d"))
    assert first.key == second.key == third.key != other.key
    assert first.affinity == second.affinity == third.affinity != other.affinity
    assert (first.continues, second.continues, third.continues) == (False, True, True)


def test_two_that_begin_alike_part_as_soon_as_they_differ() -> None:
    sessions = Sessions()
    first = ask(sessions, user("hi"))
    second = ask(sessions, user("hi"))
    assert first.key != second.key
    mine = ask(sessions, user("hi"), said("x"), user("1"))
    yours = ask(sessions, user("hi"), said("y"), user("2"))
    assert mine.key != yours.key


def test_who_is_asked_the_same_in_another_frame_is_another() -> None:
    sessions = Sessions()
    frames = [{"role": "system", "content": text} for text in ("one", "two", "three")]
    keys = [ask(sessions, frame, user("q")).key for frame in frames]
    assert len(set(keys)) == len(frames)
    for frame, key in zip(frames, keys, strict=True):
        assert ask(sessions, frame, user("q"), said("a"), user("r")).key == key


def openai_call(call: str) -> list[dict[str, Any]]:
    return [
        {**said(""), "tool_calls": [{"id": call}]},
        {"role": "tool", "tool_call_id": call, "content": "r"},
    ]


def anthropic_call(call: str) -> list[dict[str, Any]]:
    return [
        {"role": "assistant", "content": [{"type": "tool_use", "id": call}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call}]},
    ]


def item_call(call: str) -> list[dict[str, Any]]:
    return [{"type": "function_call", "call_id": call}, {"type": "function_call_output", "call_id": call}]


@pytest.mark.parametrize(
    ("path", "field", "continued"),
    [
        (CHAT, "messages", openai_call),
        (MESSAGES, "messages", anthropic_call),
        (RESPONSES, "input", item_call),
    ],
)
def test_of_several_that_were_asked_the_same_the_calls_tell_which_goes_on(
    path: str, field: str, continued: Any
) -> None:
    sessions = Sessions()
    question = user("solve it")
    keys = [sessions.of(path, {}, {field: [question]}).key for _ in range(3)]
    assert len(set(keys)) == 3
    for number, key in enumerate(keys):
        sessions.answered(key, calls=[f"call_{number}"])
    for number, key in enumerate(keys):
        assert sessions.of(path, {}, {field: [question, *continued(f"call_{number}")]}).key == key
        sessions.check_integrity()


def test_a_call_of_a_conversation_that_does_not_begin_alike_tells_nothing() -> None:
    sessions = Sessions()
    first = ask(sessions, user("a"))
    sessions.answered(first.key, calls=["call_0"])
    assert ask(sessions, user("b"), *openai_call("call_0")).key != first.key


@pytest.mark.parametrize(
    "message",
    [
        *(None, 1, "x", [], {}, {"tool_calls": 1}, {"tool_calls": [1, {}]}, {"tool_calls": [{"id": 1}]}),
        *({"content": [1]}, {"content": [{"type": "tool_use"}]}, {"type": 1}, {"type": "function_call"}),
    ],
)
def test_calls_of_any_shape_are_no_fault(message: Any) -> None:
    ask(Sessions(), user("a"), message)


def test_the_last_message_may_be_another_and_the_conversation_stays_itself() -> None:
    sessions = Sessions()
    first = ask(sessions, user("a"), said("x"), user("b"))
    assert ask(sessions, user("a"), said("x"), user("c")).key == first.key
    assert ask(sessions, user("a"), said("x"), user("c")).key == first.key


def test_marks_of_what_to_cache_and_lists_of_one_text_change_nothing() -> None:
    sessions = Sessions()
    marked = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    first = ask(sessions, {"role": "user", "content": [marked]})
    assert ask(sessions, user("a"), said("x"), user("b")).key == first.key


def test_a_named_session_is_found_after_a_compaction() -> None:
    sessions = Sessions()
    first = ask(sessions, user("a"), said("x"), user("b"), headers=CLAUDE, system="s")
    compacted = ask(sessions, user("summary"), headers=CLAUDE, system="s")
    assert (compacted.key, compacted.continues, compacted.is_named) == (first.key, True, True)


def test_what_a_session_asks_beside_is_not_its_next_step() -> None:
    sessions = Sessions()
    first = ask(sessions, user("a"), headers=CLAUDE, system="s", tools=[{"name": "Bash"}])
    beside = ask(sessions, user("a title for: a"), headers=CLAUDE, system="t")
    assert beside.key != first.key
    assert beside.affinity == first.affinity
    going_on = ask(
        sessions, user("a"), said("x"), user("b"), headers=CLAUDE, system="s", tools=[{"name": "Bash"}]
    )
    assert going_on.key == first.key


def test_a_system_prompt_that_changes_with_every_request_does_not_hide_a_conversation() -> None:
    sessions = Sessions()
    first = ask(sessions, user("a"), headers=CLAUDE, system="nonce 1")
    assert ask(sessions, user("a"), said("x"), user("b"), headers=CLAUDE, system="nonce 2").key == first.key


@pytest.mark.parametrize(
    ("headers", "body", "other_headers", "other_body"),
    [
        (CLAUDE, {}, {**CLAUDE, "x-claude-code-agent-id": "a"}, {}),
        ({"session-id": "a"}, {}, {"session-id": "b"}, {}),
        ({"x-session-id": "a"}, {}, {"x-session-id": "b", "x-parent-session-id": "a"}, {}),
        ({}, {"session_id": "a"}, {}, {"session_id": "b"}),
        ({}, {"prompt_cache_key": "a"}, {}, {"prompt_cache_key": "b"}),
        ({}, {"session_params": {"id": "a"}}, {}, {"session_params": {"id": "b"}}),
    ],
)
def test_different_names_are_different_conversations(
    headers: dict[str, str], body: dict[str, Any], other_headers: dict[str, str], other_body: dict[str, Any]
) -> None:
    sessions = Sessions()
    first = ask(sessions, user("a"), said("x"), user("b"), headers=headers, **body)
    other = ask(sessions, user("a"), said("x"), user("b"), headers=other_headers, **other_body)
    assert first.is_named
    assert other.is_named
    assert first.key != other.key


def test_a_user_or_a_key_is_not_a_session_but_keeps_conversations_apart() -> None:
    sessions = Sessions()
    keys = {
        ask(sessions, user("a"), said("x"), user("b"), headers=headers, **body).key
        for headers, body in (({}, {"user": "u"}), ({}, {"user": "v"}), ({"authorization": "k"}, {}))
    }
    assert len(keys) == 3
    assert session_name({}, {"user": "u"}) == ()


def test_a_response_is_followed_by_what_names_it() -> None:
    sessions = Sessions()
    first = sessions.of(RESPONSES, {}, {"input": "a"})
    sessions.answered(first.key, "resp_1")
    output = [{"type": "function_call_output", "call_id": "c", "output": "x"}]
    second = sessions.of(RESPONSES, {}, {"input": output, "previous_response_id": "resp_1"})
    assert second.key == first.key
    elsewhere = sessions.of(
        RESPONSES, {"authorization": "k"}, {"input": output, "previous_response_id": "resp_1"}
    )
    assert elsewhere.key != first.key


@pytest.mark.parametrize("prompt", ["x" * (3 * BLOCK_CHARACTERS), [1, 2, 3] * 300])
def test_prompts_without_messages_are_compared_in_blocks(prompt: Any) -> None:
    sessions = Sessions()
    first = sessions.of(COMPLETIONS, {}, {"prompt": prompt})
    longer = sessions.of(COMPLETIONS, {}, {"prompt": prompt + prompt})
    assert first.key == longer.key


def test_a_key_shows_no_name_and_is_no_other_gateways_matter() -> None:
    one, two = Sessions(), Sessions()
    ask(two, user("earlier"))
    found = ask(one, user("a"), headers={"session-id": "secret-name"})
    assert "secret" not in found.key + found.affinity
    assert ask(two, user("a"), headers={"session-id": "secret-name"}).affinity == found.affinity


def test_the_quietest_conversation_is_forgotten_first() -> None:
    sessions = Sessions(2)
    first, second = ask(sessions, user("a")), ask(sessions, user("b"))
    ask(sessions, user("a"), said("x"), user("c"))
    assert ask(sessions, user("d")).forgotten == (second.key,)
    assert len(sessions) == 2
    sessions.forget(first.key)
    assert not ask(sessions, user("a"), said("x"), user("c"), said("y"), user("e")).continues


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["messages", "input", "prompt", "system", "tools", "session_id", "session_params", "previous_response_id"]
)


@given(st.lists(st.dictionaries(FIELDS, VALUES), max_size=5))
def test_no_shape_of_a_request_raises(requests: list[dict[str, Any]]) -> None:
    sessions = Sessions(2)
    for request in requests:
        sessions.of(CHAT, {}, json.loads(json.dumps(request)))
        sessions.check_integrity()


def test_neither_depth_nor_size_of_a_value_raises() -> None:
    deep = json.loads('{"content":' * 300 + "1" + "}" * 300)
    for value in (deep, 10**40, float("1e300")):
        ask(Sessions(), user("a"), value, user=value)


class Talking(RuleBasedStateMachine):
    """Conversations with different first messages, interleaved, that each go on."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions = Sessions(100)
        self.talks: dict[int, list[Any]] = {}
        self.keys: dict[int, str] = {}

    @rule(talk=st.integers(0, 5), text=st.text(max_size=3))
    def goes_on(self, talk: int, text: str) -> None:
        # One conversation is always named or never.
        named = talk % 2 == 0
        messages = self.talks.setdefault(talk, [])
        messages += [said(text), user(text)] if messages else [user(f"talk {talk}")]
        found = ask(self.sessions, *messages, headers={"session-id": str(talk)} if named else None)
        assert self.keys.setdefault(talk, found.key) == found.key
        assert len(set(self.keys.values())) == len(self.keys)

    @invariant()
    def holds_together(self) -> None:
        self.sessions.check_integrity()


TestTalking = Talking.TestCase
