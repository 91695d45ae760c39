"""What the gateway tells a server, or a router before servers, about where a request belongs."""

import json
import threading
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import gateway, read_body, respond, serving

from toolgap.gateway.observer import named_replica, replica_of
from toolgap.protocol import PATH

pytestmark = pytest.mark.slow

MESSAGES = [{"role": "user", "content": "q"}]
REPLIES: dict[str, Any] = {
    "/v1/chat/completions": {
        "id": "r1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "finish_reason": "tool_calls",
                "message": {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "call_1", "type": "function", "function": {"name": "tool", "arguments": "{}"}}
                    ],
                },
            }
        ],
    },
    "/v1/messages": {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "stop_reason": "tool_use",
        "content": [{"type": "tool_use", "id": "toolu_1", "name": "tool", "input": {}}],
    },
}


class Server:
    """Answers with a tool call; remembers what it was asked and told."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        self.submits: list[dict[str, Any]] = []
        self.submitted = threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = await read_body(receive)
        if (reply := REPLIES.get(scope["path"])) is not None:
            self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
            kind = [(b"content-type", b"application/json")]
            await respond(send, json.dumps(reply).encode(), headers=kind)
        elif scope["path"] == PATH:
            self.submits.append(json.loads(body))
            self.submitted.set()
            await respond(send, b'{"error": {"code": "not_supported", "message": "no"}}', 501)
        else:
            await respond(send)


def ask(server: Server, url: str, path: str, *, headers: dict[str, str] | None = None, **beside: Any) -> None:
    server.submitted.clear()
    body = {"model": "m", "messages": MESSAGES, **beside}
    assert httpx.post(url + path, json=body, headers=headers, trust_env=False).status_code == 200
    assert server.submitted.wait(60)


@pytest.mark.parametrize("path", list(REPLIES))
def test_a_conversation_is_served_and_restored_at_one_replica(path: str) -> None:
    server = Server()
    with (
        serving(server, lifespan="off") as (direct, _),
        gateway(direct, replicas=1000, session_timeout_s=60) as url,
    ):
        for _ in range(2):
            ask(server, url, path)
        ask(server, url, path, headers={"x-session-id": "another"})
    replicas = [int(headers["x-data-parallel-rank"]) for headers in server.headers]
    assert replicas[0] == replicas[1] != replicas[2]
    assert {submit["routed_dp_rank"] for submit in server.submits} == set(replicas)


@pytest.mark.parametrize("path", list(REPLIES))
def test_the_client_may_name_the_replica_itself(path: str) -> None:
    server = Server()
    with (
        serving(server, lifespan="off") as (direct, _),
        gateway(direct, replicas=1000, session_timeout_s=60) as url,
    ):
        ask(server, url, path, headers={"X-Data-Parallel-Rank": "1003"})
        ask(server, url, path, routed_dp_rank=1004)
    assert [headers["x-data-parallel-rank"] for headers in server.headers] == ["1003", "1004"]
    assert {submit["routed_dp_rank"] for submit in server.submits} == {1003, 1004}


def test_nothing_is_added_for_a_server_without_replicas() -> None:
    server = Server()
    with serving(server, lifespan="off") as (direct, _), gateway(direct) as url:
        ask(server, url, "/v1/chat/completions")
    assert not {"x-data-parallel-rank", "x-smg-routing-key"} & server.headers[0].keys()
    assert "routed_dp_rank" not in server.submits[0]


def test_a_router_is_told_what_belongs_together() -> None:
    server = Server()
    with (
        serving(server, lifespan="off") as (direct, _),
        gateway(direct, workers=(direct,), session_timeout_s=60) as url,
    ):
        for session in ("one", "one", "another"):
            ask(server, url, "/v1/chat/completions", headers={"x-session-id": session})
        ask(server, url, "/v1/chat/completions", headers={"X-SMG-Routing-Key": "the client's"})
    keys = [headers["x-smg-routing-key"] for headers in server.headers]
    assert keys[0] == keys[1] != keys[2]
    assert "one" not in keys[0]
    assert keys[3] == "the client's"


@given(st.text(), st.integers(1, 64))
def test_a_conversation_has_a_replica_that_there_is(affinity: str, replicas: int) -> None:
    assert 0 <= replica_of(affinity, replicas) < replicas
    assert replica_of(affinity, replicas) == replica_of(affinity, replicas)


def test_conversations_are_spread_over_replicas() -> None:
    assert {replica_of(str(number), 8) for number in range(200)} == set(range(8))


@pytest.mark.parametrize("value", ["", "-1", "one", "1.0", "²"])
def test_a_header_that_names_no_replica(value: str) -> None:
    assert named_replica({"x-data-parallel-rank": value}, {}) is None


@pytest.mark.parametrize("value", [None, -1, "1", 1.0, True, []])
def test_a_field_that_names_no_replica(value: Any) -> None:
    assert named_replica({}, {"routed_dp_rank": value}) is None
    assert named_replica({}, {"routed_dp_rank": value, "data_parallel_rank": 3}) == 3
