"""Storage calls that never return: SGLang's thread is replaced, and storage serves again without a restart."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PAGE, Prompt, Server, until

from toolgap.protocol import Code, Reason, State

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def stalling_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    environment = {
        "TOOLGAP_STALL_TIMEOUT_S": "2",
        "TOOLGAP_READER_PATIENCE_S": "3",
        "TOOLGAP_STOP_GRACE_S": "1",
    }
    with Server(model, tmp_path_factory.mktemp("stalling"), environment=environment) as server:
        yield server


@pytest.fixture
def server(stalling_server: Server) -> Iterator[Server]:
    with stalling_server.left_as_found():
        yield stalling_server


def accepts(server: Server, prefix: list[int]) -> str | None:
    """Submit; the operation's id, or None while the server refuses because a call hangs."""
    reply = server.call(action="submit", input_ids=prefix)
    if reply.status_code == 200:
        operation_id: str = reply.json()["operation_id"]
        return operation_id
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (503, Code.STORAGE_STALLED)
    assert error["retry_after_s"] > 0
    return None


@pytest.mark.parametrize("call", ["exists", "get"])
def test_the_thread_of_a_call_that_never_returns_is_replaced(
    server: Server, prompt: Prompt, call: str
) -> None:
    hung, other = prompt(40 * PAGE), prompt(40 * PAGE)
    recomputed = server.store(hung + [5])
    server.store(other + [5])
    server.probe.hang(call, number=0)
    outcome = server.ended(server.toolgap.submit(input_ids=hung).operation_id)
    assert (outcome.state, outcome.reason) == (State.FAILED, Reason.STORAGE_STALLED)
    engine = server.toolgap.overview().engine
    assert (engine.stalled_reads, engine.quarantined_tokens) == (1, 40 * PAGE if call == "get" else 0)
    assert accepts(server, other) is None
    restored = server.ended(until("storage serves again", lambda: accepts(server, other)))
    assert (restored.state, restored.read_tokens) == (State.RESTORED, 40 * PAGE)
    # The call still hangs, and its pages are kept for it; ordinary requests read as well.
    assert server.toolgap.overview().engine.stalled_reads == 1
    answer = server.generate(hung + [5])
    assert answer.sources == (0, 0, 40 * PAGE)
    assert answer.output_ids == recomputed.output_ids
    # SGLang's own reset would hand out the pages that the call may still write to.
    assert server.http.post("/flush_cache").status_code == 400
    server.probe.let_go()
    until("the call returned", lambda: server.toolgap.overview().engine.stalled_reads == 0)
    assert server.toolgap.overview().engine.quarantined_tokens == 0
    # Its thread ended with it: the next calls are made by one thread, in order.
    server.flush()
    assert server.ended(server.toolgap.submit(input_ids=hung).operation_id).state is State.RESTORED


def test_an_ordinary_requests_call_that_hangs_is_found_out(server: Server, prompt: Prompt) -> None:
    """An operation behind it cannot go on: the call in its way is the one that hangs."""
    ordinary, prefix = prompt(40 * PAGE), prompt(40 * PAGE)
    recomputed = server.store(ordinary + [5])
    server.store(prefix + [5])
    server.probe.hang("get", number=0)
    # SGLang gives its own read up after a while, and computes.
    assert server.generate(ordinary + [5]).output_ids == recomputed.output_ids
    outcome = server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    assert outcome.reason is Reason.STORAGE_STALLED
    assert server.toolgap.overview().engine.stalled_reads == 1
    restored = server.ended(until("storage serves again", lambda: accepts(server, prefix)))
    assert (restored.state, restored.read_tokens) == (State.RESTORED, 40 * PAGE)


def test_operations_in_the_queue_behind_a_stall_are_served_afterwards(server: Server, prompt: Prompt) -> None:
    prefixes = [prompt(40 * PAGE) for _ in range(4)]
    for prefix in prefixes:
        server.store(prefix + [5])
    server.probe.hang("get", number=0)
    submitted = [server.toolgap.submit(input_ids=prefix).operation_id for prefix in prefixes]
    states = [server.ended(operation_id).state for operation_id in submitted]
    assert states[0] is State.FAILED
    assert states[2:] == [State.RESTORED, State.RESTORED]
