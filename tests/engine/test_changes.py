"""Storage replaced, caches flushed, generation paused, weights updated, memory released."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from harness import PAGE, Prompt, Server, until

from toolgap.client import ToolgapError
from toolgap.protocol import Code, Reason, State

pytestmark = pytest.mark.engine


def refusal(server: Server, prefix: list[int], **fields: Any) -> tuple[int, Code]:
    with pytest.raises(ToolgapError) as refused:
        server.toolgap.submit(input_ids=prefix, **fields)
    return refused.value.status_code, refused.value.error.code


ATTACH = ("PUT", "/hicache/storage-backend", {"hicache_storage_backend": "file"})
DETACH = ("DELETE", "/hicache/storage-backend", None)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        pytest.param(DETACH, Reason.STORAGE_REPLACED, id="detach"),
        pytest.param(ATTACH, Reason.STORAGE_REPLACED, id="attach"),
        pytest.param(("POST", "/hicache/storage-backend/clear", None), Reason.STORAGE_REPLACED, id="clear"),
        pytest.param(("POST", "/flush_cache", None), Reason.FLUSHED, id="flush"),
        pytest.param(("POST", "/flush_cache?timeout=60", None), Reason.FLUSHED, id="deferred-flush"),
        pytest.param(("POST", "/release_memory_occupation", {}), Reason.MEMORY_RELEASED, id="release-memory"),
    ],
)
def test_changes_end_operations_and_are_not_refused(
    server: Server, prompt: Prompt, call: tuple[str, str, Any], reason: Reason
) -> None:
    prefix = prompt(300 * PAGE)
    recomputed = server.store(prefix + [5])
    with ThreadPoolExecutor() as pool, server.probe.hold("get") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        method, path, body = call
        reply = pool.submit(server.http.request, method, path, json=body)
        if "timeout" in path:  # a deferred flush lets the scheduler go on
            until("the change takes effect", lambda: server.toolgap.status(operation_id).stopping)
        else:  # the scheduler waits for the batch in flight, and must not be asked meanwhile
            until("the change takes effect", server.is_busy)
    assert reply.result().status_code == 200, reply.result().text
    outcome = server.ended(operation_id)
    assert (outcome.state, outcome.reason) == (State.CANCELLED, reason)
    if call == DETACH:
        assert refusal(server, prompt(40 * PAGE)) == (409, Code.STORAGE_REPLACED)
        assert server.generate(prompt(40 * PAGE)).sources == (0, 0, 0)
        method, path, body = ATTACH
        assert server.http.request(method, path, json=body).status_code == 200
    if "release" in path:
        assert server.http.post("/resume_memory_occupation", json={}).status_code == 200
    assert server.generate(prefix + [5]).output_ids == recomputed.output_ids
    server.flush()
    if "clear" not in path:
        assert server.ended(server.toolgap.submit(input_ids=prefix).operation_id).state is State.RESTORED


def test_a_flush_ends_followers_too(server: Server, prompt: Prompt) -> None:
    prefix = prompt(300 * PAGE)
    server.store(prefix + [5])
    with ThreadPoolExecutor() as pool, server.probe.hold("exists") as wait_until_held:
        leader = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        follower = server.toolgap.submit(input_ids=prefix)
        assert follower.following
        reply = pool.submit(server.http.post, "/flush_cache")
        until("the flush takes effect", server.is_busy)
    assert reply.result().status_code == 200
    for operation_id in (leader, follower.operation_id):
        outcome = server.ended(operation_id)
        assert (outcome.state, outcome.reason) == (State.CANCELLED, Reason.FLUSHED)
    assert server.probe.calls["exists"] == 1


def test_while_paused_submits_are_refused_and_operations_can_be_ended(server: Server, prompt: Prompt) -> None:
    prefix = prompt(160 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("exists") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        assert server.http.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
        try:
            until("paused", lambda: server.toolgap.overview().engine.paused)
            assert refusal(server, prompt(40 * PAGE)) == (503, Code.PAUSED)
            assert server.toolgap.cancel(operation_id).state is State.CANCELLED
        finally:
            assert server.http.post("/continue_generation", json={}).status_code == 200
    until("it goes on", lambda: not server.toolgap.overview().engine.paused)
    assert server.ended(server.toolgap.submit(input_ids=prefix).operation_id).state is State.RESTORED


def test_a_read_outlives_a_pause(server: Server, prompt: Prompt) -> None:
    prefix = prompt(160 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("exists") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        server.http.post("/pause_generation", json={"mode": "in_place"})
        until("paused", lambda: server.toolgap.overview().engine.paused)
    server.http.post("/continue_generation", json={})
    assert server.ended(operation_id).state is State.RESTORED


def test_weights_updated(server: Server, prompt: Prompt) -> None:
    """KV of the old weights is never called restored for the new ones."""
    prefix = prompt(300 * PAGE)
    server.store(prefix + [5])
    leased = prompt(40 * PAGE)
    server.store(leased + [5])
    assert server.ended(server.toolgap.submit(input_ids=leased, lease_s=600).operation_id).leased_tokens
    old = server.toolgap.overview().engine.namespace
    update = {"model_path": str(server.model)}
    with ThreadPoolExecutor() as pool, server.probe.hold("get") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix, namespace=old).operation_id
        wait_until_held()
        reply = pool.submit(server.http.post, "/update_weights_from_disk", json=update)
        until("the update takes effect", server.is_busy)
    assert reply.result().status_code == 200, reply.result().text
    outcome = server.ended(operation_id)
    assert (outcome.state, outcome.reason) == (State.CANCELLED, Reason.WEIGHTS_UPDATED)
    assert server.toolgap.overview().engine.namespace != old
    assert server.toolgap.overview().engine.leased_tokens == 0
    assert refusal(server, prefix, namespace=old) == (409, Code.NAMESPACE_MISMATCH)
    assert refusal(server, prefix) == (409, Code.STORAGE_STALE)
    # SGLang answers 200 to a clear that had nothing attached to clear.
    method, path, body = DETACH
    assert server.http.request(method, path, json=body).status_code == 200
    assert server.http.post("/hicache/storage-backend/clear").status_code == 200
    method, path, body = ATTACH
    assert server.http.request(method, path, json=body).status_code == 200
    assert refusal(server, prefix) == (409, Code.STORAGE_STALE)
    assert server.http.post("/hicache/storage-backend/clear").status_code == 200
    assert server.ended(server.toolgap.submit(input_ids=prefix).operation_id).state is State.MISS
    server.store(prefix + [5])
    assert server.ended(server.toolgap.submit(input_ids=prefix).operation_id).state is State.RESTORED
