import json

import pytest

from toolgap.gateway.record import recorded, turn_of
from toolgap.gateway.watch import Asked, Seen, Watch
from toolgap.prefixes.turns import read_turns
from toolgap.protocol import Api

USER = {"role": "user", "content": "secret"}
CALL = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
CHAT = {
    "id": "r",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": None, "tool_calls": [CALL]},
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
}
MESSAGE = {
    "id": "msg",
    "type": "message",
    "content": [{"type": "tool_use", "id": "c", "name": "bash", "input": {}}],
    "stop_reason": "tool_use",
    "usage": {"input_tokens": 7, "output_tokens": 3},
}
CASES = [("/v1/chat/completions", CHAT, Api.OPENAI), ("/v1/messages", MESSAGE, Api.ANTHROPIC)]


def seen(asked: Asked, body: object) -> Seen:
    watching = Watch(asked, 200, {"content-type": "application/json"})
    watching.feed(json.dumps(body).encode(), 2.0)
    result = watching.ended(3.0)
    assert result is not None
    return result


@pytest.mark.parametrize(("path", "body", "api"), CASES)
def test_check_prefix_reads_what_was_recorded(path: str, body: object, api: Api) -> None:
    asked = Asked(path, {"messages": [USER]})
    answer = seen(asked, body)
    written = recorded("s", asked, answer, asked_s=1.0, content=True)
    (turn,) = read_turns(written.line())
    assert turn == turn_of(written)
    assert (turn.session, turn.api, turn.request) == ("s", api, {"messages": [USER]})
    (message,) = answer.answer.messages
    said = turn.answer()
    assert said == {key: value for key, value in message.items() if value is not None}
    fields = json.loads(written.line())
    assert (fields["asked_s"], fields["whole_s"], fields["prompt_tokens"], fields["tools"]) == (
        1.0,
        3.0,
        7,
        ["bash"],
    )


@pytest.mark.parametrize(("path", "body", "api"), CASES)
def test_without_content_nothing_that_was_said_is_kept(path: str, body: object, api: Api) -> None:
    asked = Asked(path, {"messages": [USER]})
    written = recorded("s", asked, seen(asked, body), asked_s=1.0, content=False)
    assert turn_of(written) is None
    assert b"secret" not in written.line()
    assert b"bash" not in written.line()
    assert written.num_calls == 1
