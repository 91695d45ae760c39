"""What a hint is, and what is none."""

import pytest

from toolgap.gateway.hints import Hint, HintError, read

RESULT = {"role": "tool", "tool_call_id": "c", "content": "3"}


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        (b'{"tool_call_id": "c", "left_s": 2}', Hint(tool_call_id="c", left_s=2.0)),
        (b'{"tool_call_id": "c", "ended": true}', Hint(tool_call_id="c", ended=True)),
        (
            b'{"tool_call_id": "c", "ended": true, "result": '
            b'{"role": "tool", "tool_call_id": "c", "content": "3"}}',
            Hint(tool_call_id="c", ended=True, result=RESULT),
        ),
        (b'{"session_ended": "s"}', Hint(session_ended="s")),
    ],
)
def test_a_hint_in_its_own_form(body: bytes, hint: Hint) -> None:
    assert read(body) == ([hint], False)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"tool_call_id": "c"}',
        b'{"left_s": 1}',
        b'{"ended": true}',
        b'{"tool_call_id": "c", "left_s": 1, "ended": true}',
        b'{"tool_call_id": "c", "left_s": -1}',
        b'{"tool_call_id": "c", "left_s": 1e999}',
        b'{"tool_call_id": "c", "left_s": 1, "result": {}}',
        b'{"tool_call_id": "c", "session_ended": "s"}',
        b'{"tool_call_id": "c", "ended": true, "strange": 1}',
        b'{"hook_event_name": 1}',
    ],
)
def test_what_is_no_hint_is_refused(body: bytes) -> None:
    with pytest.raises(HintError):
        read(body)


@pytest.mark.parametrize(
    ("body", "hints"),
    [
        (
            b'{"hook_event_name": "PostToolUse", "tool_use_id": "t", "tool_name": "Bash"}',
            [Hint(tool_call_id="t", ended=True)],
        ),
        (
            b'{"hook_event_name": "PostToolBatch", "tool_calls": [{"tool_use_id": "a"}, {"tool_use_id": "b"}, {}]}',
            [Hint(tool_call_id="a", ended=True), Hint(tool_call_id="b", ended=True)],
        ),
        (b'{"hook_event_name": "SessionEnd", "session_id": "s"}', [Hint(session_ended="s")]),
        (b'{"hook_event_name": "PreToolUse", "tool_use_id": "t"}', []),
        (b'{"hook_event_name": "SomethingNew"}', []),
    ],
)
def test_an_event_of_claude_codes_hooks_is_a_hint(body: bytes, hints: list[Hint]) -> None:
    assert read(body) == (hints, True)
