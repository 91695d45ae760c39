"""The receiver, over ASGI; transcripts in the form that Claude Code writes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from recorder import Recorder
from starlette.applications import Starlette

from toolgap.hooks.claude_code import Receiver, application, settings
from toolgap.hooks.restores import Restores
from toolgap.hooks.transcript import answer_that_calls, read_tail
from toolgap.protocol import State

REQUEST = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be brief."}],
    "tools": [{"name": "Bash", "input_schema": {"type": "object"}}],
    "messages": [{"role": "user", "content": "Look."}],
}
HEADERS = {"x-claude-code-session-id": "s"}


def use(call: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": "Bash", "input": {}}


def line(*blocks: dict[str, Any], message: str = "msg_1") -> str:
    """A line of a transcript."""
    said = {"id": message, "role": "assistant", "content": list(blocks)}
    return json.dumps({"type": "assistant", "sessionId": "s", "message": said})


def event(name: str, call: str = "a", **fields: Any) -> dict[str, Any]:
    return {"hook_event_name": name, "session_id": "s", "tool_name": "Bash", "tool_use_id": call, **fields}


def receive(recorder: Recorder, *events: dict[str, Any], asked: bool = True) -> Restores:
    restores = Restores(recorder.client, strict=True)
    receiver = Receiver(restores)

    async def main() -> None:
        if asked:
            receiver.asked(HEADERS, json.dumps(REQUEST).encode())
        for received in events:
            await receiver.happened(received)
            await asyncio.to_thread(restores.settle)

    asyncio.run(main())
    return restores


def test_a_tool_submits_the_sessions_last_request_and_its_answer(recorder: Recorder, tmp_path: Path) -> None:
    transcript = tmp_path / "t.jsonl"
    transcript.write_text(line({"type": "text", "text": "I look."}) + "\n" + line(use("a")) + "\n")
    receive(recorder, event("PreToolUse", transcript_path=str(transcript)))
    (submit,) = recorder.submits
    assert submit["api"] == "anthropic"
    assert submit["system"] == REQUEST["system"]
    assert submit["tools"] == REQUEST["tools"]
    assert "max_tokens" not in submit
    assert [block["type"] for block in submit["messages"][1]["content"]] == ["text", "tool_use"]


def test_a_transcript_may_hold_what_unicode_calls_a_lines_end(tmp_path: Path) -> None:
    transcript = tmp_path / "t.jsonl"
    said = {"type": "text", "text": "one\u2028two\u0085three"}
    written = json.loads(line(said, use("a")))
    transcript.write_text(json.dumps(written, ensure_ascii=False) + "\n", encoding="utf-8")
    answer = answer_that_calls(read_tail(transcript), "a")
    assert answer is not None
    assert answer["content"] == [said, use("a")]


def test_without_the_answer_the_request_alone_is_named(recorder: Recorder, tmp_path: Path) -> None:
    receive(recorder, event("PreToolUse", transcript_path=str(tmp_path / "none.jsonl")))
    assert recorder.submits[0]["messages"] == REQUEST["messages"]


def test_parallel_calls_share_an_operation_and_their_end_refreshes(recorder: Recorder) -> None:
    before = [event("PreToolUse", "a"), event("PreToolUse", "b")]
    receive(recorder, *before)
    assert len(recorder.submits) == 1
    batch = event("PostToolBatch", tool_calls=[{"tool_use_id": "a"}, {"tool_use_id": "b"}])
    other = Recorder()
    receive(other, *before, batch)
    assert len(other.submits) == 3


@pytest.mark.parametrize("end", ["PostToolUse", "PostToolUseFailure"])
def test_an_end_refreshes(recorder: Recorder, end: str) -> None:
    receive(recorder, event("PreToolUse"), event(end))
    assert len(recorder.submits) == 2


def test_the_sessions_end_cancels(recorder: Recorder) -> None:
    recorder.default = State.RESTORING
    receive(recorder, event("PreToolUse"), event("SessionEnd"))
    assert recorder.cancelled == [recorder.submits[0]["operation_id"]]


def test_a_subagent_has_a_conversation_of_its_own(recorder: Recorder) -> None:
    receive(recorder, event("PreToolUse", agent_id="sub"))
    assert recorder.commands == []


def test_a_session_whose_requests_do_not_come_by_is_said_once(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    receive(recorder, event("PreToolUse"), event("PreToolUse", "b"), asked=False)
    assert recorder.commands == []
    assert caplog.text.count("ANTHROPIC_BASE_URL") == 1


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"messages": 1}', b"\xff"])
def test_what_is_no_request_is_passed_on_and_forgotten(recorder: Recorder, body: bytes) -> None:
    receiver = Receiver(Restores(recorder.client))
    receiver.asked(HEADERS, body)
    asyncio.run(receiver.happened(event("PreToolUse")))
    assert recorder.commands == []


# Transcripts


def test_blocks_of_one_message_are_gathered_and_a_half_written_line_is_left() -> None:
    lines = [line(use("a")), line(use("a"), use("b")), line({"type": "text", "text": "x"}, message="2"), "{"]
    answer = answer_that_calls(lines, "b")
    assert answer == {"role": "assistant", "content": [use("a"), use("b")]}


@pytest.mark.parametrize("text", ["", "null", "[]", '{"message": 3}', '{"message": {"role": "user"}}', "x"])
def test_lines_of_other_kinds_are_left(text: str) -> None:
    assert answer_that_calls([text], "a") is None


def test_only_the_end_of_a_transcript_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolgap.hooks.transcript.TAIL_BYTES", 10)
    path = tmp_path / "t.jsonl"
    path.write_text("a long line\nshort\n")
    assert read_tail(path) == ["short"]
    assert read_tail(tmp_path / "none.jsonl") == []
    assert read_tail(tmp_path / "passwords.txt") == []


# The application


async def call(app: Starlette, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://receiver") as client:
        return await client.request(method, path, **kwargs)


def test_a_hook_is_answered_with_nothing_to_do(recorder: Recorder) -> None:
    app = application(Restores(recorder.client), "http://127.0.0.1:9")
    response = asyncio.run(call(app, "POST", "/hooks", json=event("PreToolUse")))
    assert (response.status_code, response.json()) == (200, {})
    response = asyncio.run(call(app, "POST", "/hooks", content=b"x"))
    assert response.status_code == 400


def test_a_server_that_is_not_there_is_said_in_the_apis_form(recorder: Recorder) -> None:
    app = application(Restores(recorder.client), "http://127.0.0.1:9")
    response = asyncio.run(call(app, "POST", "/v1/messages", json=REQUEST, headers=HEADERS))
    assert response.status_code == 502
    assert "http://127.0.0.1:9" in response.json()["error"]["message"]


def test_settings_name_every_event_that_is_looked_at() -> None:
    made = settings("http://127.0.0.1:30900")
    assert made["env"]["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:30900"
    assert {"PreToolUse", "PostToolBatch", "SessionEnd"} <= set(made["hooks"])
