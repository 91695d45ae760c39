"""Cancel and expiry in every state, and that nothing is left behind."""

import asyncio
import threading
from collections.abc import Callable

import httpx
import pytest
from harness import PAGE, Prompt, Server, until

from toolgap.client import ToolgapError
from toolgap.protocol import OperationStatus, Reason, State

pytestmark = pytest.mark.engine


def cancel(server: Server, operation_id: str) -> None:
    server.toolgap.cancel(operation_id)


def expire(server: Server, operation_id: str) -> None:
    def stopping() -> bool:
        status = server.toolgap.status(operation_id)
        return status.stopping or status.state.terminal

    until("its TTL passed", stopping)


Ending = Callable[[Server, str], None]
ENDINGS = pytest.mark.parametrize(
    ("ending", "ttl_s", "state", "reason"),
    [
        pytest.param(cancel, 600, State.CANCELLED, Reason.REQUESTED, id="cancel"),
        pytest.param(expire, 0.2, State.EXPIRED, Reason.TTL, id="expiry"),
    ],
)


@ENDINGS
def test_while_storage_is_asked(
    server: Server, prompt: Prompt, ending: Ending, ttl_s: float, state: State, reason: Reason
) -> None:
    prefix = prompt(40 * PAGE)
    recomputed = server.store(prefix + [5])
    with server.probe.hold("exists") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix, ttl_s=ttl_s, force=True).operation_id
        wait_until_held()
        ending(server, operation_id)
        outcome = server.ended(operation_id)  # though the query has not returned
    assert (outcome.state, outcome.reason, outcome.read_tokens) == (state, reason, 0)
    until("the query returned", lambda: server.toolgap.overview().engine.stalled_reads == 0)
    assert server.generate(prefix + [5]).output_ids == recomputed.output_ids


@ENDINGS
def test_while_pages_are_read(
    server: Server, prompt: Prompt, ending: Ending, ttl_s: float, state: State, reason: Reason
) -> None:
    prefix = prompt(300 * PAGE)
    recomputed = server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix, ttl_s=ttl_s, force=True).operation_id
        wait_until_held()
        ending(server, operation_id)
        assert server.toolgap.status(operation_id).stopping
    outcome = server.ended(operation_id)
    assert (outcome.state, outcome.reason) == (state, reason)
    assert outcome.inserted_tokens == outcome.read_tokens < 300 * PAGE
    answer = server.generate(prefix + [5])
    assert answer.host_tokens == outcome.inserted_tokens, "what landed stays ordinary host memory"
    assert answer.output_ids == recomputed.output_ids


def test_after_the_end_a_cancel_changes_nothing(server: Server, prompt: Prompt) -> None:
    prefix = prompt(20 * PAGE)
    server.store(prefix + [5])
    outcome = server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    assert server.toolgap.cancel(outcome.operation_id) == outcome
    assert server.toolgap.cancel(outcome.operation_id) == outcome
    assert server.generate(prefix + [5]).sources == (0, 20 * PAGE, 0)


def test_a_cancel_of_an_unknown_operation(server: Server) -> None:
    with pytest.raises(ToolgapError) as refused:
        server.toolgap.cancel("never-submitted")
    assert refused.value.status_code == 404


def test_expiry_does_not_cut_a_read_that_a_request_waits_for(server: Server, prompt: Prompt) -> None:
    prefix = prompt(160 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix, ttl_s=4, force=True).operation_id
        wait_until_held()
        continuation = threading.Thread(target=server.generate, args=(prefix + [5],))
        continuation.start()

        def past_ttl() -> OperationStatus | None:
            status = server.toolgap.status(operation_id)
            return status if status.elapsed_s > 4.5 else None

        status = until("its TTL is past", past_ttl)
        if not status.joined_requests:
            pytest.fail(f"the continuation did not join in time: {status}")
        assert not status.stopping
    continuation.join()
    assert server.ended(operation_id).state is State.RESTORED


def test_a_thousand_submits_and_cancels_leave_nothing(server: Server, prompt: Prompt) -> None:
    # Whatever part of one has landed, the rest is still long enough to be read.
    prefixes = [prompt(160 * PAGE) for _ in range(3)]
    for prefix in prefixes:
        server.store(prefix + [5])

    def cycle(number: int) -> None:
        operation_id = server.toolgap.submit(input_ids=prefixes[number % 3]).operation_id
        server.toolgap.cancel(operation_id)
        assert server.ended(operation_id).state in (State.CANCELLED, State.RESTORED)

    for number in range(100):
        cycle(number)
    server.flush()
    before, before_kib = server.baseline(), server.state()["resident_kib"]
    for number in range(1000):
        cycle(number)
        if number % 50 == 49:
            server.flush()
    server.check_back_at(before)
    assert server.state()["resident_kib"] < before_kib + 64 * 1024


def test_a_client_that_leaves_a_long_poll_leaves_nothing(server: Server, prompt: Prompt) -> None:
    prefix = prompt(20 * PAGE)
    server.store(prefix + [5])

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url, headers=dict(server.http.headers)) as client:
            body = {"action": "status", "operation_id": "polled", "wait_s": 300}
            polls = [asyncio.create_task(client.post("/hicache/prefetch", json=body)) for _ in range(5)]
            await asyncio.to_thread(until, "all poll", lambda: server.state()["waiting_calls"] == 5)
            for poll in polls:
                poll.cancel()

    with server.probe.hold("get") as wait_until_held:
        server.toolgap.submit(input_ids=prefix, operation_id="polled")
        wait_until_held()
        asyncio.run(leave())
        until("nobody polls", lambda: server.state()["waiting_calls"] == 0)
    assert server.ended("polled").state is State.RESTORED


def test_a_long_poll_answers_when_its_time_is_up(server: Server, prompt: Prompt) -> None:
    prefix = prompt(20 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        assert server.toolgap.status(operation_id, wait_s=0.05).state is State.RESTORING
    server.ended(operation_id)
