"""The join: a read that is in flight is waited for, in either order, and no page is read twice."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from harness import PAGE, Prompt, Server, joined, until

from toolgap.protocol import Reason, State

pytestmark = pytest.mark.engine


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


@pytest.mark.parametrize("call", ["exists", "get"])
def test_an_early_continuation_waits_for_the_read(
    server: Server, prompt: Prompt, pool: ThreadPoolExecutor, call: str
) -> None:
    prefix = prompt(40 * PAGE)
    recomputed = server.store(prefix + [5])
    with server.probe.hold(call) as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        continuation = pool.submit(server.generate, prefix + [5])
        until("the continuation joined", joined(server, operation_id))
        assert server.toolgap.overview().engine.waiting_joins == 1
    answer = continuation.result()
    assert answer.sources == (0, 40 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids
    outcome = server.ended(operation_id)
    assert (outcome.state, outcome.joined_requests) == (State.RESTORED, 1)
    assert set(server.probe.reads.values()) == {1}
    assert len(server.probe.reads) == 40
    assert server.probe.calls["exists"] == 1


def test_a_longer_continuation_reads_only_the_rest(
    server: Server, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    prefix, rest = prompt(40 * PAGE), prompt(30 * PAGE)
    recomputed = server.store(prefix + rest + [5])
    with server.probe.hold("get") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        continuation = pool.submit(server.generate, prefix + rest + [5])
        until("the continuation joined", joined(server, operation_id))
    answer = continuation.result()
    assert answer.sources == (0, 40 * PAGE, 30 * PAGE)
    assert answer.output_ids == recomputed.output_ids
    assert set(server.probe.reads.values()) == {1}
    assert len(server.probe.reads) == 70


def test_a_submit_joins_an_ordinary_requests_read(
    server: Server, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    prefix = prompt(40 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        request = pool.submit(server.generate, prefix + [5])
        wait_until_held()
        submitted = server.toolgap.submit(input_ids=prefix)
        assert submitted.following
    assert request.result().sources == (0, 0, 40 * PAGE)
    outcome = server.ended(submitted.operation_id)
    assert (outcome.state, outcome.reason, outcome.read_tokens) == (State.RESTORED, Reason.COMPLETE, 0)
    assert set(server.probe.reads.values()) == {1}


def test_a_submit_reads_what_the_request_it_followed_did_not(
    server: Server, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    prefix, rest = prompt(40 * PAGE), prompt(30 * PAGE)
    server.store(prefix + rest + [5])
    with server.probe.hold("get") as wait_until_held:
        request = pool.submit(server.generate, prefix + [5])
        wait_until_held()
        submitted = server.toolgap.submit(input_ids=prefix + rest)
        assert submitted.following
    request.result()
    outcome = server.ended(submitted.operation_id)
    assert (outcome.state, outcome.read_tokens) == (State.RESTORED, 30 * PAGE)
    assert set(server.probe.reads.values()) == {1}


def test_submits_of_one_prefix_share_a_read_and_cancelling_one_leaves_the_other(
    server: Server, prompt: Prompt
) -> None:
    prefix = prompt(40 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        first = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        second = server.toolgap.submit(input_ids=prefix[: 30 * PAGE])
        third = server.toolgap.submit(input_ids=prefix)
        assert second.following
        assert third.following
        assert server.toolgap.cancel(third.operation_id).state is State.CANCELLED
    assert server.ended(first).state is State.RESTORED
    outcome = server.ended(second.operation_id)
    assert (outcome.state, outcome.read_tokens) == (State.RESTORED, 0)
    assert set(server.probe.reads.values()) == {1}


def test_a_follower_goes_on_when_its_leader_is_cancelled(server: Server, prompt: Prompt) -> None:
    prefix = prompt(160 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        leader = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        follower = server.toolgap.submit(input_ids=prefix)
        assert follower.following
        assert server.toolgap.cancel(leader).stopping
    assert server.ended(leader).state is State.CANCELLED
    assert server.ended(follower.operation_id).state is State.RESTORED


def test_a_joined_request_reads_the_rest_when_the_operation_is_cancelled(
    server: Server, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    prefix = prompt(160 * PAGE)
    recomputed = server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        continuation = pool.submit(server.generate, prefix + [5])
        until("the continuation joined", joined(server, operation_id))
        server.toolgap.cancel(operation_id)
    answer = continuation.result()
    assert sum(answer.sources) == 160 * PAGE
    assert answer.output_ids == recomputed.output_ids
    assert server.ended(operation_id).state is State.CANCELLED


def test_after_a_miss_the_joined_request_does_not_ask_storage_again(
    server: Server, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    prefix = prompt(20 * PAGE)
    with server.probe.hold("exists") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        continuation = pool.submit(server.generate, prefix + [5])
        until("the continuation joined", joined(server, operation_id))
    assert continuation.result().sources == (0, 0, 0)
    assert server.ended(operation_id).reason is Reason.NOT_IN_STORAGE
    assert server.probe.calls["exists"] == 1


def test_a_request_that_shares_little_does_not_wait(server: Server, prompt: Prompt) -> None:
    shared, rest = prompt(20 * PAGE), prompt(100 * PAGE)
    server.store(shared + rest + [5])
    with server.probe.hold("exists") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=shared + rest).operation_id
        wait_until_held()
        # Its own query would be held as well, so it has to be let go to show that it does not wait.
        other = threading.Thread(target=server.generate, args=(shared + prompt(PAGE),))
        other.start()
        until(
            "the request asks storage itself", lambda: server.toolgap.overview().engine.reads_in_flight == 2
        )
        assert server.toolgap.status(operation_id).joined_requests == 0
    other.join()
    assert server.ended(operation_id).state is State.RESTORED


def test_a_joined_request_whose_client_leaves_is_forgotten(server: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        with httpx.Client(base_url=server.url) as client:
            body = {"input_ids": [*prefix, 5], "stream": True, "sampling_params": {"max_new_tokens": 1}}
            pending = threading.Thread(target=_ignore_reply, args=(client, body))
            pending.start()
            until("the continuation joined", joined(server, operation_id))
            reply = server.http.post("/abort_request", json={"abort_all": True})
            assert reply.status_code == 200
            until("nobody waits", lambda: server.toolgap.overview().engine.waiting_joins == 0)
            pending.join()
    assert server.ended(operation_id).state is State.RESTORED


def _ignore_reply(client: httpx.Client, body: dict[str, object]) -> None:
    client.post("/generate", json=body)
