"""Storage that lacks, spoils, refuses or withholds pages: a true reason, and ordinary requests go on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PAGE, Prompt, Server, until

from toolgap.client import ToolgapError
from toolgap.protocol import Code, Reason, State

pytestmark = pytest.mark.engine

BATCH_PAGES = 128
"""SGLang reads storage in batches of this many pages; one that raises loses its whole batch."""


def newest_pages(server: Server) -> list[Path]:
    """Page files in the order in which they were written."""
    return sorted(server.storage.glob("*.bin"), key=lambda path: path.stat().st_mtime_ns)


def restore(server: Server, prefix: list[int]) -> tuple[State, Reason | None, int]:
    outcome = server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    assert outcome.read_tokens == outcome.inserted_tokens
    return outcome.state, outcome.reason, outcome.inserted_tokens


def test_a_page_missing_in_the_middle(server: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    before = set(newest_pages(server))
    recomputed = server.store(prefix + [5])
    server.toolgap.cancel(server.toolgap.submit(input_ids=prefix).operation_id)
    pages = [path for path in newest_pages(server) if path not in before]
    assert len(pages) == 40
    server.flush()
    server.probe.reset()
    server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    hashes = list(server.probe.reads)
    next(path for path in pages if path.name.startswith(hashes[25])).unlink()
    server.flush()
    assert restore(server, prefix) == (State.PARTIAL, Reason.STORAGE_SHORTFALL, 25 * PAGE)
    answer = server.generate(prefix + [5])
    assert answer.sources == (0, 25 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids


def test_a_page_that_vanishes_between_query_and_read(server: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    recomputed = server.store(prefix + [5])
    server.probe.spoil("get", "miss", number=25)
    assert restore(server, prefix) == (State.PARTIAL, Reason.STORAGE_READ_FAILED, 25 * PAGE)
    assert server.generate(prefix + [5]).output_ids == recomputed.output_ids


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (BATCH_PAGES + 5, (State.PARTIAL, Reason.STORAGE_READ_FAILED, BATCH_PAGES * PAGE)),
        (5, (State.FAILED, Reason.STORAGE_READ_FAILED, 0)),
    ],
)
def test_a_truncated_page_file(
    server: Server, prompt: Prompt, page: int, expected: tuple[State, Reason, int]
) -> None:
    prefix = prompt(160 * PAGE)
    recomputed = server.store(prefix + [5])
    server.ended(server.toolgap.submit(input_ids=prefix).operation_id)
    key = list(server.probe.reads)[page]
    server.flush()
    [path] = server.storage.glob(f"{key}*.bin")
    with path.open("r+b") as file:
        file.truncate(100)
    assert restore(server, prefix) == expected
    assert server.generate(prefix + [5]).output_ids == recomputed.output_ids


def test_a_read_that_raises(server: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    recomputed = server.store(prefix + [5])
    server.probe.spoil("get", "fail")
    assert restore(server, prefix) == (State.FAILED, Reason.STORAGE_READ_FAILED, 0)
    server.probe.reset()
    assert server.generate(prefix + [5]).output_ids == recomputed.output_ids


def test_a_query_that_raises(server: Server, prompt: Prompt) -> None:
    prefix = prompt(40 * PAGE)
    server.store(prefix + [5])
    server.probe.spoil("exists", "fail")
    assert restore(server, prefix) == (State.FAILED, Reason.STORAGE_QUERY_FAILED, 0)


def test_a_flush_while_an_ordinary_requests_query_hangs(server: Server, prompt: Prompt) -> None:
    """SGLang gave the query up and is idle; its own flush would end the scheduler all the same."""
    with server.probe.hold("exists"):
        assert server.generate(prompt(40 * PAGE)).sources == (0, 0, 0)
        until("backups are done", lambda: server.state()["host_locks"] == 0)
        assert server.http.post("/flush_cache").status_code == 400
    server.flush()


@pytest.fixture(scope="module")
def impatient_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Short time limits, strict single-trajectory mode, and a policy that waits for storage."""
    environment = {
        "TOOLGAP_JOIN_TIMEOUT_S": "0.5",
        "TOOLGAP_STALL_TIMEOUT_S": "5",
        "TOOLGAP_STOP_GRACE_S": "0.5",
        "TOOLGAP_MAX_OPERATIONS": "1",
        "TOOLGAP_MAX_OUTCOMES": "3",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.02",
    }
    arguments = ("--hicache-storage-prefetch-policy", "wait_complete")
    folder = tmp_path_factory.mktemp("impatient")
    with Server(model, folder, arguments=arguments, environment=environment) as server:
        yield server


@pytest.fixture
def impatient(impatient_server: Server) -> Iterator[Server]:
    impatient_server.flush()
    before = impatient_server.baseline()
    yield impatient_server
    impatient_server.probe.reset()
    until("hung reads returned", lambda: impatient_server.toolgap.overview().engine.stalled_reads == 0)
    impatient_server.check_back_at(before)


@pytest.mark.parametrize("call", ["exists", "get"])
def test_storage_that_hangs(impatient: Server, prompt: Prompt, call: str) -> None:
    server, prefix = impatient, prompt(40 * PAGE)
    recomputed = server.store(prefix + [5])
    with server.probe.hold(call) as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        outcome = server.ended(operation_id)
        assert (outcome.state, outcome.reason) == (State.FAILED, Reason.STORAGE_STALLED)
        assert server.toolgap.overview().engine.stalled_reads == 1
        with pytest.raises(ToolgapError) as refused:
            server.toolgap.submit(input_ids=prompt(40 * PAGE))
        assert refused.value.status_code == 503
        assert refused.value.error.code is Code.STORAGE_STALLED
        # SGLang's own flush would end the scheduler here: it cannot join the thread that hangs.
        assert server.http.post("/flush_cache").status_code == 400
        assert server.http.post("/release_memory_occupation", json={}).status_code == 400
        # A prompt below the threshold needs no storage: it is served while storage hangs.
        assert server.generate(prompt(100)).sources == (0, 0, 0)
    until("the read returned", lambda: server.toolgap.overview().engine.stalled_reads == 0)
    assert server.generate(prefix + [5]).output_ids == recomputed.output_ids


def test_a_join_is_bounded(impatient: Server, prompt: Prompt) -> None:
    """The request goes on without what is still being read, and reads none of it twice."""
    server, prefix = impatient, prompt(40 * PAGE)
    recomputed = server.store(prefix + [5])
    with server.probe.hold("get") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix, ttl_s=600).operation_id
        wait_until_held()
        answer = server.generate(prefix + [5])
        assert answer.sources == (0, 0, 0)
        assert answer.output_ids == recomputed.output_ids
    outcome = server.ended(operation_id)
    assert outcome.joined_requests <= 1
    assert set(server.probe.reads.values()) == {1}


def test_slow_storage_restores_all_the_same(impatient: Server, prompt: Prompt) -> None:
    server, prefix = impatient, prompt(300 * PAGE)
    recomputed = server.store(prefix + [5])
    assert restore(server, prefix) == (State.RESTORED, Reason.COMPLETE, 300 * PAGE)
    answer = server.generate(prefix + [5])
    assert answer.sources == (0, 300 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids


def test_strict_mode_takes_one_operation_at_once(impatient: Server, prompt: Prompt) -> None:
    server = impatient
    with server.probe.hold("exists") as wait_until_held:
        first = server.toolgap.submit(input_ids=prompt(20 * PAGE)).operation_id
        wait_until_held()
        reply = server.call(action="submit", input_ids=prompt(20 * PAGE))
        assert reply.status_code == 429
        assert reply.json()["error"]["code"] == Code.TOO_MANY_OPERATIONS
        assert int(reply.headers["Retry-After"]) >= 1
        server.toolgap.cancel(first)
    for _ in range(5):
        server.ended(server.toolgap.submit(input_ids=prompt(20 * PAGE)).operation_id)
    assert len(server.toolgap.overview().recent) == 3
