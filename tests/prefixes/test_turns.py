"""Reading turns from what people have."""

import json
from typing import Any

import msgspec
import pytest

from toolgap.prefixes.turns import Turn, TurnsError, read_turns, sessions
from toolgap.protocol import Api

USER = {"role": "user", "content": "hello"}
BODY: dict[str, Any] = {"model": "m", "messages": [USER]}


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_a_list_of_bodies() -> None:
    turns = read_turns(encoded([BODY, BODY]))
    assert [turn.request for turn in turns] == [BODY, BODY]
    assert {(turn.session, turn.api, turn.response) for turn in turns} == {(None, Api.OPENAI, None)}


def test_a_list_of_turns_with_responses() -> None:
    [turn] = read_turns(encoded([{"request": BODY, "response": {"choices": []}}]))
    assert turn.response == {"choices": []}


def test_lines_of_a_recording_and_keys_that_are_left_alone() -> None:
    lines = [
        {"session": session, "request": BODY, "started_ts": 1.5, "status": 200} for session in ("a", "b", "a")
    ]
    data = b"\n".join(map(encoded, lines)) + b"\n\n"
    assert {session: len(turns) for session, turns in sessions(read_turns(data)).items()} == {"a": 2, "b": 1}


def test_lines_may_hold_what_unicode_calls_a_lines_end() -> None:
    lines = [{"request": BODY | {"user": f"{number}\u2028\u0085"}} for number in range(2)]
    data = "\n".join(json.dumps(one, ensure_ascii=False) for one in lines).encode()
    assert len(read_turns(data)) == 2


def test_a_recorder_writes_what_is_read() -> None:
    written = [
        Turn(request=BODY, response={"choices": []}, session="a", api=Api.OPENAI),
        Turn(request={**BODY, "system": "x"}, session="b", api=Api.ANTHROPIC),
    ]
    assert read_turns(b"\n".join(map(msgspec.json.encode, written))) == written


def test_one_object_is_one_turn() -> None:
    assert len(read_turns(encoded({"request": BODY}))) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"system": "be brief"},
        {"tools": [{"name": "a", "input_schema": {}}]},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "tool_use", "name": "a", "input": {}}]},
            ]
        },
    ],
)
def test_the_anthropic_form_is_seen(fields: dict[str, Any]) -> None:
    turns = read_turns(encoded([BODY, {**BODY, **fields}]))
    assert [turn.api for turn in turns] == [Api.ANTHROPIC] * 2, "turns of one session have one form"


def test_the_form_may_be_said() -> None:
    assert read_turns(encoded([BODY]), Api.ANTHROPIC)[0].api is Api.ANTHROPIC
    assert read_turns(encoded([{"request": BODY, "api": "anthropic"}]))[0].api is Api.ANTHROPIC


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "no JSON"),
        (b"nonsense", "no JSON"),
        (b"\xff\xfe", "not UTF-8"),
        (b"3", "element 1 is no JSON object"),
        (encoded([BODY, {"request": 3}]), "element 2"),
        (encoded([{"prompt": "x"}]), "no request with messages"),
        (encoded([{"messages": []}]), "no request with messages"),
        (encoded([{"messages": ["x"]}]), "every message must be an object with a role"),
        (encoded([{**BODY, "tools": ["x"]}]), "every tool must be an object"),
        (encoded([{"request": BODY, "api": "cohere"}]), "element 1"),
        (encoded(BODY) + b"\n{broken\n", "line 2 is no JSON"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, complaint: str) -> None:
    with pytest.raises(TurnsError, match=complaint):
        read_turns(data)


def test_the_answer_is_what_a_client_would_send_back() -> None:
    message = {"role": "assistant", "content": "hi", "reasoning_content": None, "tool_calls": None}
    response = {"choices": [{"message": message, "response_token_ids": [1, 2]}]}
    [turn] = read_turns(encoded([{"request": BODY, "response": response}]))
    assert turn.answer() == {"role": "assistant", "content": "hi"}
    assert turn.answer_ids() == [1, 2]


def test_the_answer_of_the_anthropic_form() -> None:
    blocks = [{"type": "text", "text": "hi"}]
    [turn] = read_turns(encoded([{"request": BODY, "response": {"type": "message", "content": blocks}}]))
    assert turn.answer() == {"role": "assistant", "content": blocks}
    assert turn.answer_ids() is None


@pytest.mark.parametrize(
    "response",
    [
        {"choices": [{"message": {}, "token_ids": [7]}]},
        {"choices": [{"message": {}}], "sglext": {"output_ids": [[7]]}},
    ],
)
def test_answer_ids_of_other_places(response: dict[str, Any]) -> None:
    assert read_turns(encoded([{"request": BODY, "response": response}]))[0].answer_ids() == [7]


@pytest.mark.parametrize(
    "response",
    [{}, {"choices": []}, {"choices": [3]}, {"error": {"message": "no"}}, {"sglext": 3, "choices": None}],
)
def test_a_response_without_an_answer(response: dict[str, Any]) -> None:
    [turn] = read_turns(encoded([{"request": BODY, "response": response}]))
    assert turn.answer() is None
    assert turn.answer_ids() is None
