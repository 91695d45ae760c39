"""Many agents at once: pieces, turns, shared reads, and what an operation never evicts."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import PAGE, PATIENT, Prompt, Server, until

from toolgap.protocol import Code, Reason, State

pytestmark = pytest.mark.engine

PIECE_PAGES = 32


@pytest.fixture(scope="module")
def many_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One piece at a time, so that turns can be told; one request at a time, so that others wait."""
    environment = {
        "TOOLGAP_PIECE_TOKENS": str(PIECE_PAGES * PAGE),
        "TOOLGAP_READS_AT_ONCE": "1",
        "TOOLGAP_MAX_OPERATIONS": "16",
        "TOOLGAP_MAX_OPERATION_TOKENS": "6400",
        **PATIENT,
    }
    folder = tmp_path_factory.mktemp("many")
    arguments = ("--max-running-requests", "1")
    with Server(model, folder, arguments=arguments, environment=environment) as server:
        yield server


@pytest.fixture
def server(many_server: Server) -> Iterator[Server]:
    with many_server.left_as_found():
        yield many_server


def pages_of(server: Server, prefix: list[int]) -> list[str]:
    """Storage keys of a prefix's pages, in order."""
    server.probe.reset()
    server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    pages = list(server.probe.reads)
    assert len(pages) == len(prefix) // PAGE
    server.flush()
    server.probe.reset()
    return pages


def order_of_ends(server: Server, *operation_ids: str) -> list[str]:
    for operation_id in operation_ids:
        server.ended(operation_id)
    ended = [status.operation_id for status in reversed(server.toolgap.overview().recent)]
    return [operation_id for operation_id in ended if operation_id in operation_ids]


@contextlib.contextmanager
def a_running_request(server: Server) -> Iterator[None]:
    """Keeps the only place among running requests taken while open."""
    body = {
        "input_ids": [7] * 40,
        "stream": True,
        "sampling_params": {"max_new_tokens": 7000, "ignore_eos": True},
    }
    with server.http.stream("POST", "/generate", json=body) as reply:
        lines = reply.iter_lines()  # closes the stream when it is dropped
        next(lines)
        yield
        del lines


def test_a_long_restore_is_read_in_pieces(server: Server, prompt: Prompt) -> None:
    prefix = prompt(100 * PAGE)
    recomputed = server.store(prefix + [5])
    outcome = server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    assert (outcome.state, outcome.reason) == (State.RESTORED, Reason.COMPLETE)
    assert outcome.found_tokens == outcome.read_tokens == outcome.inserted_tokens == 100 * PAGE
    # 32 and 32 pages; the rest of 36 is one piece, since 4 pages alone would be too few to be read.
    assert server.probe.calls["exists"] == 3
    assert set(server.probe.reads.values()) == {1}
    answer = server.generate(prefix + [5])
    assert answer.sources == (0, 100 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids


def test_a_page_missing_in_a_later_piece(server: Server, prompt: Prompt) -> None:
    prefix = prompt(100 * PAGE)
    recomputed = server.store(prefix + [5])
    missing = pages_of(server, prefix)[70]
    next(server.storage.glob(f"{missing}*.bin")).unlink()
    outcome = server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    assert (outcome.state, outcome.found_tokens) == (State.PARTIAL, 70 * PAGE)
    # Six pages of the third piece are there, and too few for SGLang to read them.
    assert (outcome.reason, outcome.inserted_tokens) == (Reason.BELOW_THRESHOLD, 64 * PAGE)
    assert server.generate(prefix + [5]).output_ids == recomputed.output_ids


def test_an_ordinary_read_gets_in_between_the_pieces(server: Server, prompt: Prompt) -> None:
    long, short = prompt(200 * PAGE), prompt(40 * PAGE)
    server.store(long + [5])
    server.store(short + [5])
    pages = set(pages_of(server, short))
    with ThreadPoolExecutor() as pool, server.probe.hold("get") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=long).operation_id
        wait_until_held()
        request = pool.submit(server.generate, short + [5])
        until("the request reads", lambda: server.toolgap.overview().engine.reads_in_flight == 2)
    assert request.result().sources == (0, 0, 40 * PAGE)
    assert server.ended(operation_id).state is State.RESTORED
    order = [page in pages for page in server.probe.reads]
    assert order[:PIECE_PAGES] == [False] * PIECE_PAGES
    assert order[PIECE_PAGES : PIECE_PAGES + 40] == [True] * 40


def test_turns_go_by_deadline_then_by_arrival(server: Server, prompt: Prompt) -> None:
    prefixes = [prompt(20 * PAGE) for _ in range(5)]
    for prefix in prefixes:
        server.store(prefix + [5])
    with server.probe.hold("exists") as wait_until_held:
        first = server.toolgap.submit(input_ids=prefixes[0], expected_gap_s=500).operation_id
        wait_until_held()
        late, none, soon, soon_too = (
            server.toolgap.submit(input_ids=prefix, expected_gap_s=gap_s, force=True)
            for prefix, gap_s in zip(prefixes[1:], (100.0, None, 1.0, 50.0), strict=True)
        )
        assert all(status.queued for status in (late, none, soon, soon_too))
    ids = [status.operation_id for status in (soon, soon_too, late, none)]
    assert order_of_ends(server, first, *ids) == [first, *ids]


def test_a_small_urgent_restore_gets_in_between_a_large_ones_pieces(server: Server, prompt: Prompt) -> None:
    large, small = prompt(200 * PAGE), prompt(20 * PAGE)
    server.store(large + [5])
    server.store(small + [5])
    with server.probe.hold("get") as wait_until_held:
        first = server.toolgap.submit(input_ids=large, expected_gap_s=100).operation_id
        wait_until_held()
        second = server.toolgap.submit(input_ids=small, expected_gap_s=1, force=True).operation_id
    assert order_of_ends(server, first, second) == [second, first]
    assert set(server.probe.reads.values()) == {1}


def test_an_operation_that_a_request_waits_for_comes_first(server: Server, prompt: Prompt) -> None:
    prefixes = [prompt(20 * PAGE) for _ in range(3)]
    for prefix in prefixes:
        server.store(prefix + [5])
    with ThreadPoolExecutor() as pool:
        with server.probe.hold("exists") as wait_until_held:
            running = server.toolgap.submit(input_ids=prefixes[0]).operation_id
            wait_until_held()
            urgent = server.toolgap.submit(input_ids=prefixes[1], expected_gap_s=1, force=True).operation_id
            awaited = server.toolgap.submit(input_ids=prefixes[2], expected_gap_s=100).operation_id
            continuation = pool.submit(server.generate, prefixes[2] + [5])
            until("the continuation joined", lambda: server.toolgap.status(awaited).joined_requests)
        assert continuation.result().sources == (0, 20 * PAGE, 0)
    assert order_of_ends(server, running, urgent, awaited) == [running, awaited, urgent]


def test_a_request_that_needs_the_first_pieces_goes_on_once_they_have_landed(
    server: Server, prompt: Prompt
) -> None:
    """It waits for what it shares, not for the end of the operation."""
    shared, rest = prompt(40 * PAGE), prompt(160 * PAGE)
    recomputed = server.store(shared + [5])
    server.store(shared + rest + [5])
    pages = pages_of(server, shared + rest)
    with ThreadPoolExecutor() as pool:
        with server.probe.hold("get") as wait_until_held:
            operation_id = server.toolgap.submit(input_ids=shared + rest).operation_id
            wait_until_held()
            continuation = pool.submit(server.generate, shared + [5])
            until("the request joined", lambda: server.toolgap.status(operation_id).joined_requests)
            server.probe.hang("get", page=pages[150])
        answer = continuation.result()
        assert not server.toolgap.status(operation_id).state.terminal
        server.probe.let_go()
    assert answer.sources == (0, 40 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids
    assert server.ended(operation_id).state is State.RESTORED
    assert set(server.probe.reads.values()) == {1}


def test_nested_prefixes_share_one_read(server: Server, prompt: Prompt) -> None:
    prefix = prompt(120 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        first = server.toolgap.submit(input_ids=prefix[: 80 * PAGE]).operation_id
        wait_until_held()
        nested = [
            server.toolgap.submit(input_ids=prefix[: pages * PAGE]).operation_id
            for pages in (40, 60, 80, 100, 120)
        ]
        server.toolgap.cancel(nested[0])
    outcomes = [server.ended(operation_id) for operation_id in (first, *nested[1:])]
    assert {outcome.state for outcome in outcomes} == {State.RESTORED}
    assert sum(outcome.read_tokens for outcome in outcomes) == 120 * PAGE
    assert set(server.probe.reads.values()) == {1}


def test_a_cancelled_leader_reads_its_piece_to_the_end_for_those_who_share_it(
    server: Server, prompt: Prompt
) -> None:
    prefix = prompt(80 * PAGE)
    server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        leader = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        follower = server.toolgap.submit(input_ids=prefix).operation_id
        assert server.toolgap.cancel(leader).stopping
    assert server.ended(leader).state is State.CANCELLED
    assert server.ended(follower).state is State.RESTORED
    assert set(server.probe.reads.values()) == {1}
    assert len(server.probe.reads) == 80


def test_what_all_operations_have_to_read_is_bounded(server: Server, prompt: Prompt) -> None:
    """L2 holds 16,384 tokens here, and operations may fill half of it."""
    with server.probe.hold("exists") as wait_until_held:
        submitted = [server.toolgap.submit(input_ids=prompt(300 * PAGE)).operation_id]
        wait_until_held()
        reply = server.call(action="submit", input_ids=prompt(300 * PAGE))
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, Code.HOST_BUDGET)
        reply = server.call(action="submit", input_ids=prompt(401 * PAGE))
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, Code.PREFIX_TOO_LARGE)
        assert "retry_after_s" not in reply.json()["error"]
        submitted.append(server.toolgap.submit(input_ids=prompt(200 * PAGE)).operation_id)
        assert server.toolgap.overview().engine.budget_used_tokens == 500 * PAGE
    for operation_id in submitted:
        server.ended(operation_id)


def fill_host_memory(server: Server, *prefixes: list[int]) -> None:
    for prefix in prefixes:
        assert server.ended(server.toolgap.submit(input_ids=prefix).operation_id).state is State.RESTORED


def test_a_waiting_requests_prefix_is_not_evicted(server: Server, prompt: Prompt) -> None:
    """The oldest in host memory, it would be the first to go."""
    waiting, wanted = prompt(150 * PAGE), prompt(200 * PAGE)
    others = [prompt(390 * PAGE), prompt(390 * PAGE)]
    recomputed = server.store(waiting + [5])
    for prefix in (*others, wanted):
        server.store(prefix + [5])
    fill_host_memory(server, waiting, *others)
    with ThreadPoolExecutor() as pool:
        with a_running_request(server):
            request = pool.submit(server.generate, waiting + [5])
            until("the request waits", lambda: server.load()["num_waiting_reqs"] == 1)
            fill_host_memory(server, *others)  # resident: now they were used more recently
            server.probe.reset()
            fill_host_memory(server, wanted)
        answer = request.result()
    assert answer.sources == (0, 150 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids


def test_operations_do_not_evict_what_others_have_restored_so_far(server: Server, prompt: Prompt) -> None:
    prefixes = [prompt(240 * PAGE), prompt(240 * PAGE)]
    others = [prompt(390 * PAGE), prompt(390 * PAGE)]
    for prefix in (*prefixes, *others):
        server.store(prefix + [5])
    fill_host_memory(server, *others)
    server.probe.reset()
    submitted = [server.toolgap.submit(input_ids=prefix).operation_id for prefix in prefixes]
    for operation_id in submitted:
        outcome = server.ended(operation_id)
        assert (outcome.state, outcome.inserted_tokens) == (State.RESTORED, 240 * PAGE)
    assert set(server.probe.reads.values()) == {1}
    assert len(server.probe.reads) == 480
    for prefix in prefixes:
        assert server.generate(prefix + [5], tokens=1).host_tokens == 240 * PAGE


def test_sixteen_operations_at_once(server: Server, prompt: Prompt) -> None:
    prefixes = [prompt(20 * PAGE) for _ in range(16)]
    recomputed = [server.store(prefix + [5]) for prefix in prefixes]
    with server.probe.hold("get") as wait_until_held:
        submitted = [server.toolgap.submit(input_ids=prefix).operation_id for prefix in prefixes]
        wait_until_held()
        reply = server.call(action="submit", input_ids=prompt(20 * PAGE))
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, Code.TOO_MANY_OPERATIONS)
        assert reply.json()["error"]["retry_after_s"] > 0
        for operation_id in submitted[::2]:
            server.toolgap.cancel(operation_id)
    outcomes = [server.ended(operation_id).state for operation_id in submitted]
    assert outcomes[1::2] == [State.RESTORED] * 8
    assert set(server.probe.reads.values()) == {1}
    threads = [threading.Thread(target=server.generate, args=(prefix + [5],)) for prefix in prefixes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = [server.generate(prefix + [5]).output_ids for prefix in prefixes]
    assert answers == [answer.output_ids for answer in recomputed]
