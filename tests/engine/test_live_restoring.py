"""``restoring`` around a tool call, on a real server: the continuation joins, and an exception cancels."""

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness import ADMIN_KEY, PAGE, Prompt, Server, joined, until

from toolgap.client import AsyncToolgap, Toolgap
from toolgap.protocol import Reason, State

pytestmark = pytest.mark.engine


class ToolError(Exception):
    """What a tool raises."""


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def test_a_continuation_that_comes_early_joins_what_the_block_began(
    server: Server, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    prefix = prompt(40 * PAGE)
    recomputed = server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        with server.toolgap.restoring(input_ids=prefix) as restore:
            wait_until_held()
        continuation = pool.submit(server.generate, prefix + [5])
        until("the continuation joined", joined(server, restore.operation_id))
    answer = continuation.result()
    assert answer.sources == (0, 40 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids
    assert set(server.probe.reads.values()) == {1}
    outcome = restore.status(wait_s=60.0)
    assert outcome is not None
    assert (outcome.state, outcome.joined_requests) == (State.RESTORED, 1)
    assert restore.outcome == outcome
    assert until("the use is counted", lambda: (restore.status() or outcome).used_tokens) == 40 * PAGE


def test_a_block_that_raises_cancels_what_it_began(server: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        with (
            contextlib.suppress(ToolError),
            Toolgap(server.url, api_key=ADMIN_KEY) as toolgap,
            toolgap.restoring(input_ids=prefix) as restore,
        ):
            wait_until_held()
            raise ToolError
        # The client is closed, so that the cancel has been answered.
        status = server.toolgap.status(restore.operation_id)
        assert status.stopping or status.state is State.CANCELLED
    outcome = server.ended(restore.operation_id)
    assert (outcome.state, outcome.reason) == (State.CANCELLED, Reason.REQUESTED)


def test_a_refresh_goes_on_with_the_earlier_ones_read(server: Server, prompt: Prompt) -> None:
    prefix, result = prompt(40 * PAGE), prompt(30 * PAGE)
    server.store(prefix + result + [5])
    with (
        server.probe.hold("get") as wait_until_held,
        server.toolgap.restoring(input_ids=prefix) as restore,
    ):
        first = restore.operation_id
        wait_until_held()
        restore.refresh(input_ids=prefix + result)
        status = restore.status()
        assert status is not None
        assert restore.operation_id == status.operation_id != first
    assert server.ended(first).state is State.CANCELLED
    assert server.ended(restore.operation_id).state is State.RESTORED
    assert set(server.probe.reads.values()) == {1}
    assert len(server.probe.reads) == 70
    assert server.generate(prefix + result + [5]).sources == (0, 70 * PAGE, 0)


def test_the_async_form_names_a_request_and_a_cancelled_task_cancels(server: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    server.store(prefix, rid="turn-7")

    async def run() -> list[str]:
        operation_ids = []
        async with AsyncToolgap(server.url, api_key=ADMIN_KEY) as toolgap:
            async with toolgap.restoring(request_id="turn-7") as restore:
                status = await restore.status(wait_s=60.0)
            assert status is not None, restore.error
            assert status.state is State.RESTORED
            operation_ids.append(restore.operation_id)
            await asyncio.to_thread(server.flush)

            async def call_tool() -> None:
                async with toolgap.restoring(request_id="turn-7") as restore:
                    operation_ids.append(restore.operation_id)
                    await asyncio.to_thread(wait_until_held)
                    raise asyncio.CancelledError

            with server.probe.hold("get") as wait_until_held:
                task = asyncio.create_task(call_tool())
                await asyncio.wait([task])
                assert task.cancelled()
                await toolgap.close()
        return operation_ids

    first, second = asyncio.run(run())
    outcome = server.ended(first)
    assert (outcome.state, outcome.requested_tokens) == (State.RESTORED, 40 * PAGE + 4)
    assert server.ended(second).state is State.CANCELLED


def test_a_server_without_the_prefix_or_the_key_never_reaches_the_agent(
    server: Server, prompt: Prompt
) -> None:
    with Toolgap(server.url, api_key=ADMIN_KEY) as toolgap:
        with toolgap.restoring(request_id="never") as restore:
            assert restore.status() is None
        assert restore.error is not None
    with Toolgap(server.url) as toolgap:
        with toolgap.restoring(input_ids=prompt(40 * PAGE)) as restore:
            assert restore.status() is None
        assert "API key" in str(restore.error)
