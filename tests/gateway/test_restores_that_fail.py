"""A worker that cannot or will not restore: the stream passes as ever, and the metrics say what could not be done."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import gateway, read_body, respond, serving, unused_url

from toolgap.gateway.recording import Recording
from toolgap.protocol import PATH, OperationStatus, State

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
REQUEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
GOES_ON = {
    **REQUEST,
    "messages": [
        *REQUEST["messages"],
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
    ],
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "tool", "arguments": "{}"}}
ANSWER = json.dumps(
    {
        "id": "r1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": None, "tool_calls": [CALL]},
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3},
    }
).encode()
JSON = [(b"content-type", b"application/json"), (b"content-length", str(len(ANSWER)).encode())]


def refusal(code: str, **beside: Any) -> bytes:
    return json.dumps({"error": {"code": code, "message": "said the server", **beside}}).encode()


class Worker:
    """Answers every chat with a tool call, and every submit as it is told."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body
        self.submits: list[dict[str, Any]] = []
        self.headers: list[tuple[bytes, bytes]] = []
        self.hangs = False
        self.hold: threading.Event | None = None
        """Submits wait for it."""
        self.plain = False
        """A chat is answered with something that is no answer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == CHAT:
            await read_body(receive)
            await respond(send, b"{}" if self.plain else ANSWER, headers=None if self.plain else JSON)
        elif scope["path"] == PATH:
            self.submits.append(json.loads(await read_body(receive)))
            self.headers = scope["headers"]
            if self.hangs:
                await anyio.sleep_forever()
            if self.hold is not None:
                await anyio.to_thread.run_sync(self.hold.wait)
            await respond(send, self.body, self.status)
        else:
            await respond(send)


@contextmanager
def behind(worker: Worker, **settings: Any) -> Iterator[str]:
    with serving(worker, lifespan="off") as (direct, _), gateway(direct, **settings) as url:
        yield url


def ask(url: str, **headers: str) -> None:
    reply = httpx.post(url + CHAT, json=REQUEST, trust_env=False, headers=headers)
    assert (reply.status_code, reply.content) == (200, ANSWER)


def refused(url: str) -> dict[str, float]:
    text = httpx.get(url + "/metrics", trust_env=False).text
    return {
        sample.labels["code"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "toolgap_gateway_restores_refused_total"
    }


def until(condition: Callable[[], object]) -> None:
    """Wait for what another process or thread tells by no event."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def until_refused(url: str, code: str, times: float = 1) -> None:
    until(lambda: refused(url).get(code, 0) >= times)


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (404, b'{"detail":"Not Found"}', "no_toolgap"),
        (401, b"", "unauthorized"),
        (200, b"<html>", "bad_answer"),
        (500, b"\xff", "bad_answer"),
        (501, refusal("not_supported"), "not_supported"),
        (409, refusal("not_worthwhile"), "not_worthwhile"),
        (409, refusal("storage_replaced"), "storage_replaced"),
        (404, refusal("unknown_request"), "unknown_request"),
    ],
)
def test_a_refusal_is_counted(status: int, body: bytes, code: str) -> None:
    with behind(Worker(status, body)) as url:
        ask(url)
        until_refused(url, code)
        ask(url)


def test_a_name_that_the_server_does_not_know_is_followed_by_the_next() -> None:
    worker = Worker(404, refusal("unknown_request"))
    with behind(worker) as url:
        ask(url)
        until_refused(url, "unknown_request")
    first, second = worker.submits
    assert first["request_id"] == "r1"
    assert [message["role"] for message in second["messages"]] == ["user", "assistant"]
    assert first["operation_id"] == second["operation_id"]


def test_a_server_without_room_is_asked_again_while_the_gap_lasts() -> None:
    worker = Worker(429, refusal("host_budget", retry_after_s=0.01))
    with behind(worker) as url:
        ask(url)
        until(lambda: len(worker.submits) >= 3)
        assert refused(url) == {}


def test_a_submit_is_not_tried_again_once_the_continuation_has_come() -> None:
    worker = Worker(429, refusal("host_budget", retry_after_s=0.01))
    with behind(worker) as url:
        ask(url)
        until(lambda: worker.submits)
        first = worker.submits[0]["operation_id"]
        assert httpx.post(url + CHAT, json=GOES_ON, trust_env=False).content == ANSWER
        until(lambda: worker.submits[-1]["operation_id"] != first)
        later = len(worker.submits)
        until(lambda: len(worker.submits) >= later + 3)
    assert first not in {submit["operation_id"] for submit in worker.submits[later:]}


def test_a_submit_that_is_under_way_as_the_continuation_comes_goes_on() -> None:
    """It may have been accepted: taken back, its cancel could reach the server before it."""
    worker = Worker(501, refusal("not_supported"))
    worker.hold = threading.Event()
    with behind(worker) as url:
        ask(url)
        until(lambda: worker.submits)
        assert httpx.post(url + "/v1/other", json={}, trust_env=False).status_code == 200
        worker.plain = True
        assert httpx.post(url + CHAT, json=GOES_ON, trust_env=False).status_code == 200
        until_returned(url)
        worker.hold.set()
        until_refused(url, "not_supported")
    assert {submit["action"] for submit in worker.submits} == {"submit"}


def test_a_submit_that_nobody_wants_by_now_is_taken_back_once_it_is_answered() -> None:
    """A cancel that went out at once could reach the server before the submit, and find nothing."""
    worker = Worker(501, refusal("not_supported"))
    worker.hold = threading.Event()

    def sent(action: str) -> list[str]:
        return [call["operation_id"] for call in worker.submits if call["action"] == action]

    with behind(worker) as url:
        ask(url, **{"x-session-id": "s"})
        until(lambda: worker.submits)
        hint = {"session_ended": "s"}
        assert httpx.post(url + "/toolgap/hints", json=hint, trust_env=False).status_code == 200
        # What the first was to send by now has been sent once another's submit is there.
        ask(url, **{"x-session-id": "another"})
        until(lambda: worker.submits[1:])
        assert sent("cancel") == []
        submit, _ = worker.submits
        ended = OperationStatus(
            operation_id=submit["operation_id"],
            state=State.CANCELLED,
            requested_tokens=10,
            aligned_tokens=0,
            resident_tokens=0,
            ttl_s=60.0,
            elapsed_s=0.1,
            namespace="n",
        )
        worker.status, worker.body = 200, msgspec.json.encode(ended)
        worker.hold.set()
        until(lambda: sent("cancel"))
    assert submit["operation_id"] in sent("cancel")


def until_returned(url: str) -> None:
    told = "toolgap_gateway_gap_seconds_count 1.0"
    until(lambda: told in httpx.get(url + "/metrics", trust_env=False).text)


def test_a_server_without_toolgap_is_left_alone_for_a_while() -> None:
    worker = Worker(404, b"")
    with behind(worker) as url:
        for number in range(3):
            ask(url, **{"x-session-id": str(number)})
            until_refused(url, "no_toolgap", number + 1)
    assert len(worker.submits) == 1


def test_a_server_that_does_not_answer_a_submit_is_given_up() -> None:
    worker = Worker(200, b"")
    worker.hangs = True
    with behind(worker, restore_timeout_s=0.2) as url:
        ask(url)
        until_refused(url, "unreachable")
        ask(url)


def test_a_worker_that_cannot_be_connected_to() -> None:
    with behind(Worker(200, b""), workers=(unused_url(),)) as url:
        ask(url)
        until_refused(url, "unreachable")


def test_a_gateway_that_ends_while_a_submit_hangs_does_not_wait_for_it() -> None:
    worker = Worker(200, b"")
    worker.hangs = True
    with behind(worker, restore_timeout_s=600.0) as url:
        ask(url)
        until(lambda: worker.submits)
    # It may have been accepted; a busy machine has no time to say that it is not wanted.
    assert [call["action"] for call in worker.submits] in (["submit"], ["submit", "cancel"])


def test_the_requests_key_is_used_unless_the_gateway_has_its_own() -> None:
    for settings, key in (({}, b"Bearer mine"), ({"api_key": "own"}, b"Bearer own")):
        worker = Worker(501, refusal("not_supported"))
        with behind(worker, **settings) as url:
            ask(url, Authorization="Bearer mine")
            until_refused(url, "not_supported")
        assert dict(worker.headers)[b"authorization"] == key


def test_nothing_is_restored_if_the_gateway_is_told_not_to() -> None:
    worker = Worker(501, b"")
    with behind(worker, restore=False) as url:
        ask(url)
        ask(url)
        assert (
            httpx.post(url + "/toolgap/hints", json={}, trust_env=False).status_code == 200
        )  # the upstream's
    assert worker.submits == []


@pytest.mark.parametrize("restore", [False, True])
def test_what_passes_is_recorded_whether_or_not_it_is_restored(tmp_path: Path, restore: bool) -> None:
    path = tmp_path / "turns.jsonl"
    with (
        Recording(path, content=False) as recording,
        behind(Worker(501, refusal("not_supported")), restore=restore, recording=recording) as url,
    ):
        ask(url, Authorization="Bearer secret-key")
        until(lambda: path.read_bytes())
        metrics = httpx.get(url + "/metrics", trust_env=False).text
    (line,) = path.read_bytes().splitlines()
    recorded = json.loads(line)
    assert (recorded["prompt_tokens"], recorded["num_calls"]) == (7, 1)
    assert b"secret" not in line
    assert "toolgap_gateway_recorded_turns 1.0" in metrics
    assert "toolgap_gateway_lost_turns 0.0" in metrics


def test_a_hint_about_nobody_says_so() -> None:
    with behind(Worker(501, refusal("not_supported"))) as url:
        reply = httpx.post(url + "/toolgap/hints", json={"tool_call_id": "x", "ended": True}, trust_env=False)
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "unknown_tool_call"
        reply = httpx.post(url + "/toolgap/hints", content=b"x", trust_env=False)
        assert reply.status_code == 400
        event = {"hook_event_name": "PostToolUse", "tool_use_id": "x"}
        reply = httpx.post(url + "/toolgap/hints", json=event, trust_env=False)
        assert (reply.status_code, reply.json()) == (200, {"taken": 0})


def test_a_call_that_two_conversations_wait_for_is_told_as_such() -> None:
    with behind(Worker(501, refusal("not_supported"))) as url:
        for name in ("a", "b"):
            ask(url, **{"x-session-id": name})
        until_refused(url, "not_supported", 2)
        reply = httpx.post(
            url + "/toolgap/hints", json={"tool_call_id": "call_1", "ended": True}, trust_env=False
        )
        assert reply.status_code == 409


def test_the_log_tells_what_was_refused_and_has_no_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with behind(Worker(501, refusal("not_supported"))) as url:
        ask(url, Authorization="Bearer secret-key")
        until_refused(url, "not_supported")
    told = [record.__dict__["fields"] for record in caplog.records if record.message == "restore"]
    assert told[0]["code"] == "not_supported"
    assert "secret-key" not in caplog.text + repr([record.__dict__ for record in caplog.records])
