"""Bad input, refusals and authorisation: the status, the reason and the field that is wrong."""

import json
from typing import Any

import httpx
import pytest
from harness import PAGE, Prompt, Server

from toolgap.protocol import PATH, Code

pytestmark = pytest.mark.engine

IDS = [1, 2, 3]


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (b"", Code.MALFORMED_JSON, None),
        (b"{", Code.MALFORMED_JSON, None),
        (b"\xff\xfe", Code.MALFORMED_JSON, None),
        ([], Code.MALFORMED_JSON, None),
        ({}, Code.INVALID_FIELD, "action"),
        ({"action": "explode"}, Code.INVALID_FIELD, "action"),
        ({"action": "submit"}, Code.INVALID_FIELD, "input_ids"),
        ({"action": "submit", "input_ids": []}, Code.INVALID_FIELD, "input_ids"),
        ({"action": "submit", "input_ids": "1 2"}, Code.INVALID_FIELD, "input_ids"),
        ({"action": "submit", "input_ids": [1, "2"]}, Code.INVALID_FIELD, "input_ids[1]"),
        ({"action": "submit", "input_ids": IDS, "request_id": "a"}, Code.INVALID_FIELD, "input_ids"),
        ({"action": "resolve"}, Code.INVALID_FIELD, "input_ids"),
        ({"action": "submit", "input_ids": [1, 2.5]}, Code.INVALID_FIELD, "input_ids[1]"),
        ({"action": "submit", "input_ids": [True]}, Code.INVALID_FIELD, "input_ids[0]"),
        ({"action": "submit", "input_ids": [-1]}, Code.INVALID_FIELD, "input_ids[0]"),
        ({"action": "submit", "input_ids": [10**6]}, Code.INVALID_FIELD, "input_ids"),
        ({"action": "submit", "input_ids": [2**70]}, Code.INVALID_FIELD, "input_ids[0]"),
        ({"action": "submit", "input_ids": [1] * 20_000}, Code.INVALID_FIELD, "input_ids"),
        ({"action": "submit", "text": ""}, Code.INVALID_FIELD, "text"),
        ({"action": "submit", "text": "word " * 20_000}, Code.INVALID_FIELD, "text"),
        ({"action": "submit", "text": "x", "input_ids": IDS}, Code.INVALID_FIELD, "input_ids"),
        ({"action": "submit", "input_ids": IDS, "ttl_s": 0}, Code.INVALID_FIELD, "ttl_s"),
        ({"action": "submit", "input_ids": IDS, "ttl_s": -1}, Code.INVALID_FIELD, "ttl_s"),
        ({"action": "submit", "input_ids": IDS, "ttl_s": float("nan")}, Code.INVALID_FIELD, "ttl_s"),
        ({"action": "submit", "input_ids": IDS, "ttl_s": "soon"}, Code.INVALID_FIELD, "ttl_s"),
        ({"action": "submit", "input_ids": IDS, "operation_id": ""}, Code.INVALID_FIELD, "operation_id"),
        ({"action": "submit", "input_ids": IDS, "surprise": 1}, Code.INVALID_FIELD, "surprise"),
        ({"action": "status", "wait_s": 1}, Code.INVALID_FIELD, "wait_s"),
        ({"action": "status", "operation_id": "x", "wait_s": -1}, Code.INVALID_FIELD, "wait_s"),
        ({"action": "cancel"}, Code.INVALID_FIELD, "operation_id"),
        (b'{"action": "status", "pad": "' + b"x" * 300_000 + b'"}', Code.BODY_TOO_LARGE, None),
    ],
)
def test_malformed_calls_are_refused_and_the_field_is_named(
    server: Server, body: Any, code: Code, field: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = server.http.post(PATH, content=content)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error.get("field")) == (400, code, field)
    assert error["message"]


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("image_data", "multimodal"),
        ("audio_data", "multimodal"),
    ],
)
def test_what_is_not_built_is_refused_by_name(server: Server, field: str, names: str) -> None:
    reply = server.call(action="submit", input_ids=IDS, **{field: "something"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["field"]) == (501, Code.NOT_SUPPORTED, field)
    assert names in error["message"]


@pytest.mark.parametrize("action", ["status", "cancel"])
def test_an_unknown_operation(server: Server, action: str) -> None:
    reply = server.call(action=action, operation_id="never-submitted")
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, Code.UNKNOWN_OPERATION)


def test_the_same_id_is_idempotent_for_one_prefix_and_a_conflict_for_another(
    server: Server, prompt: Prompt
) -> None:
    prefix = prompt(20 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("exists"):
        first = server.call(action="submit", operation_id="same", input_ids=prefix)
        again = server.call(action="submit", operation_id="same", input_ids=prefix)
        other = server.call(action="submit", operation_id="same", input_ids=prefix[:-1])
        salted = server.call(action="submit", operation_id="same", input_ids=prefix, cache_salt="s")
    assert first.status_code == again.status_code == 200
    assert again.json()["operation_id"] == "same"
    assert other.status_code == salted.status_code == 409
    assert other.json()["error"]["code"] == Code.OPERATION_CONFLICT
    outcome = server.ended("same")
    assert server.toolgap.submit(operation_id="same", input_ids=prefix) == outcome
    assert len(server.probe.reads) == 20


def test_over_the_limit_of_operations(server: Server, prompt: Prompt) -> None:
    with server.probe.hold("exists"):
        submitted = [server.toolgap.submit(input_ids=prompt(20 * PAGE)) for _ in range(4)]
        reply = server.call(action="submit", input_ids=prompt(20 * PAGE))
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, Code.TOO_MANY_OPERATIONS)
        assert int(reply.headers["Retry-After"]) >= 1
        assert reply.json()["error"]["retry_after_s"] > 0
    for operation in submitted:
        assert server.ended(operation.operation_id).state.terminal


def test_over_the_share_of_host_memory(server: Server, prompt: Prompt) -> None:
    engine = server.toolgap.overview().engine
    assert engine.max_operation_tokens < engine.host_total_tokens
    tokens = engine.max_operation_tokens // 3 * 2 // PAGE * PAGE
    with server.probe.hold("exists"):
        first = server.toolgap.submit(input_ids=prompt(tokens))
        reply = server.call(action="submit", input_ids=prompt(tokens))
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, Code.HOST_BUDGET)
        assert "Retry-After" in reply.headers
        assert server.toolgap.overview().engine.budget_used_tokens == tokens
    server.ended(first.operation_id)


def test_a_lease_longer_than_all_leases_may_be(server: Server, prompt: Prompt) -> None:
    tokens = server.toolgap.overview().engine.max_leased_tokens + PAGE
    reply = server.call(action="submit", input_ids=prompt(tokens), lease_s=10)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["field"]) == (429, Code.PREFIX_TOO_LARGE, "lease_s")
    assert "Retry-After" not in reply.headers


def test_authorisation_is_that_of_sglangs_own_hicache_routes(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        with httpx.Client(base_url=server.url, headers=headers) as client:
            ours = client.post(PATH, json={"action": "status"})
            stock = client.post("/hicache/storage-backend/clear")
        assert ours.status_code == stock.status_code == 401
    assert server.call(action="status").status_code == 200


def test_only_post(server: Server) -> None:
    assert server.http.get(PATH).status_code == 405
