"""Where an answer begins in messages, and how they may go on."""

from typing import Any

import pytest

from toolgap.sglang.prompts import Turn, anthropic_turn, openai_turn

SYSTEM: dict[str, Any] = {"role": "system", "content": "s"}
USER: dict[str, Any] = {"role": "user", "content": "u"}
TEXT: dict[str, Any] = {"role": "assistant", "content": "a"}
CALLS: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}, {"id": "2"}]}


def result(call: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": "r"}


def added(turn: Turn, messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    assert all(way[: len(messages)] == messages for way in turn.nexts)
    return [way[len(messages) :] for way in turn.nexts]


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [SYSTEM],
        [SYSTEM, USER, TEXT, USER],
        [USER, CALLS, result("1"), result("2")],
        [USER, CALLS, result("2"), result("1")],
        [USER, CALLS, result("1"), result("2"), USER],
        [result("1")],
    ],
)
def test_messages_that_are_a_whole_prompt(messages: list[dict[str, Any]]) -> None:
    assert openai_turn(messages) == Turn(messages, [])


@pytest.mark.parametrize("asked", [[USER], [SYSTEM, USER], [], [USER, CALLS, result("1"), result("2")]])
def test_an_answer_goes_on_with_the_results_it_waits_for(asked: list[dict[str, Any]]) -> None:
    if asked and asked[-1]["role"] == "tool":
        asked = [*asked, USER]
    for there, missing in (([], ["1", "2"]), (["1"], ["2"]), (["2"], ["1"])):
        messages = [*asked, CALLS, *map(result, there)]
        turn = openai_turn(messages)
        assert turn.asked == asked
        ways = added(turn, messages)
        assert len({way[0]["content"][0] for way in ways}) == len(ways) > 1
        for way in ways:
            assert [message["tool_call_id"] for message in way] == missing


def test_an_answer_in_a_tool_loop_begins_after_the_results_before_it() -> None:
    messages = [USER, CALLS, result("1"), result("2"), CALLS]
    assert openai_turn(messages).asked == messages[:4]


def test_an_answer_of_text_goes_on_with_the_user() -> None:
    messages = [SYSTEM, USER, TEXT]
    turn = openai_turn(messages)
    assert turn.asked == [SYSTEM, USER]
    assert [[message["role"] for message in way] for way in added(turn, messages)] == [["user"]] * 3


@pytest.mark.parametrize("calls", ["1", 7, {}, [None], [[]]])
def test_calls_that_are_none_are_left_to_sglang(calls: Any) -> None:
    assert openai_turn([USER, {"role": "assistant", "content": "a", "tool_calls": calls}]).asked == [USER]


def use(identifier: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": identifier, "name": "n", "input": {}}


def tool_result(identifier: str) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": identifier, "content": "r"}


USES: dict[str, Any] = {"role": "assistant", "content": [{"type": "text", "text": "t"}, use("1"), use("2")]}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [USER, TEXT, USER],
        [USER, USES, user(tool_result("1"), tool_result("2"))],
        [USER, USES, user(tool_result("1"), tool_result("2"), {"type": "text", "text": "t"})],
    ],
)
def test_anthropic_messages_that_are_a_whole_prompt(messages: list[dict[str, Any]]) -> None:
    assert anthropic_turn(messages) == Turn(messages, [])


def test_anthropic_results_stand_in_one_message() -> None:
    none = anthropic_turn([USER, USES])
    assert none.asked == [USER]
    assert [[block["tool_use_id"] for block in way[-1]["content"]] for way in none.nexts] == [["1", "2"]] * 3
    one = anthropic_turn([USER, USES, user(tool_result("2"))])
    assert one.asked == [USER]
    for way in one.nexts:
        assert way[:-1] == [USER, USES]
        assert way[-1]["content"][0] == tool_result("2")
        assert [block["tool_use_id"] for block in way[-1]["content"]] == ["2", "1"]


@pytest.mark.parametrize("answer", [TEXT, {"role": "assistant", "content": [{"type": "text", "text": "t"}]}])
def test_an_anthropic_answer_of_text_goes_on_with_the_user(answer: dict[str, Any]) -> None:
    turn = anthropic_turn([USER, answer])
    assert turn.asked == [USER]
    assert [way[-1]["role"] for way in turn.nexts] == ["user"] * 3
