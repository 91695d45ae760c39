"""Model families beyond full attention: what a restore brings is exact, or the family is refused by name."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import PAGE, PATIENT, Prompt, Server, joined, until

from toolgap.cpu.model import build_tiny_latent_model, build_tiny_window_model
from toolgap.protocol import OperationStatus, Reason, State

pytestmark = pytest.mark.engine

WINDOW_PAGES = 32
"""More than SGLang's shortest read (16 pages), so that prefixes can be shorter than the window."""
SHORT, LONG = 20, 80
"""Prefixes in pages, on either side of it."""


ENVIRONMENT = {
    **PATIENT,
}


@pytest.fixture(scope="module")
def window_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_window_model(
        tmp_path_factory.mktemp("model") / "window", window_tokens=WINDOW_PAGES * PAGE
    )


@pytest.fixture(scope="module")
def shared_windows(window_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(window_model, tmp_path_factory.mktemp("windows"), environment=ENVIRONMENT) as server:
        yield server


@pytest.fixture
def windows(shared_windows: Server) -> Iterator[Server]:
    """A server of a sliding-window model with an empty cache; afterwards everything is back where it was."""
    with shared_windows.left_as_found():
        yield shared_windows


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def restored(server: Server, prefix: list[int]) -> OperationStatus:
    return server.ended(server.toolgap.submit(input_ids=prefix).operation_id)


def window_reads(server: Server) -> int:
    """Pages of the windows' pool that were read."""
    return sum(count for key, count in server.probe.reads.items() if ".swa" in key)


def window_files(server: Server) -> list[Path]:
    """Pages of the windows' pool in storage, the oldest first."""
    return sorted(server.storage.glob("*.swa_*"), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("pages", [SHORT, WINDOW_PAGES, LONG])
@pytest.mark.parametrize("extra_tokens", [0, 7])
def test_the_continuation_is_served_from_host_memory(
    windows: Server, prompt: Prompt, pages: int, extra_tokens: int
) -> None:
    prefix = prompt(pages * PAGE + extra_tokens)
    continuation = prefix + prompt(3 * PAGE)
    windows.store(prefix + [5])
    recomputed = windows.generate(continuation, tokens=8, extra_key="another namespace")
    assert recomputed.sources == (0, 0, 0)
    windows.flush()
    windows.probe.reset()

    outcome = restored(windows, prefix)
    assert (outcome.state, outcome.reason) == (State.RESTORED, Reason.COMPLETE)
    tokens = pages * PAGE
    assert (outcome.found_tokens, outcome.read_tokens, outcome.inserted_tokens) == (tokens,) * 3
    assert outcome.dropped_tokens == 0
    assert set(windows.probe.reads.values()) == {1}
    assert window_reads(windows) == min(pages, WINDOW_PAGES)

    reads = len(windows.probe.reads)
    answer = windows.generate(continuation, tokens=8)
    assert answer.sources == (0, tokens, 0)
    assert answer.output_ids == recomputed.output_ids
    assert len(windows.probe.reads) == reads, "the continuation read storage"
    assert restored(windows, prefix).reason is Reason.ALREADY_RESIDENT


def test_a_turn_ends_where_its_answer_did(windows: Server, prompt: Prompt) -> None:
    """The next turn's prefix is this turn's prompt and answer: their KV ends in the middle of a decode."""
    first = prompt(LONG * PAGE + 3)
    answered = windows.generate(first, tokens=3 * PAGE)
    prefix = first + answered.output_ids
    continuation = prefix + prompt(2 * PAGE)
    recomputed = windows.generate(continuation, extra_key="another namespace")
    windows.flush()
    windows.probe.reset()

    outcome = restored(windows, prefix)
    assert (outcome.state, outcome.read_tokens) == (State.RESTORED, (LONG + 3) * PAGE)
    answer = windows.generate(continuation)
    assert answer.sources == (0, (LONG + 3) * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids


def test_an_early_continuation_joins(windows: Server, prompt: Prompt, pool: ThreadPoolExecutor) -> None:
    prefix = prompt(LONG * PAGE)
    recomputed = windows.store(prefix + [5])
    with windows.probe.hold("get") as wait_until_held:
        operation_id = windows.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        continuation = pool.submit(windows.generate, prefix + [5])
        until("the continuation joined", joined(windows, operation_id))
    answer = continuation.result()
    assert answer.sources == (0, LONG * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids
    assert set(windows.probe.reads.values()) == {1}
    assert windows.ended(operation_id).state is State.RESTORED


def test_a_submit_follows_an_ordinary_requests_read(
    windows: Server, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    prefix = prompt(LONG * PAGE)
    recomputed = windows.store(prefix + [5])
    with windows.probe.hold("get") as wait_until_held:
        request = pool.submit(windows.generate, prefix + [5])
        wait_until_held()
        submitted = windows.toolgap.submit(input_ids=prefix)
        assert submitted.following
    answer = request.result()
    assert answer.sources == (0, 0, LONG * PAGE)
    assert answer.output_ids == recomputed.output_ids
    assert windows.ended(submitted.operation_id).state is State.RESTORED
    assert set(windows.probe.reads.values()) == {1}


def test_who_asks_for_exactly_the_prefix_reads_for_itself(windows: Server, prompt: Prompt) -> None:
    """Its last token is always computed, so that it needs the window one page earlier."""
    prefix = prompt(LONG * PAGE)
    recomputed = windows.store(prefix)
    assert restored(windows, prefix).state is State.RESTORED
    reads = sum(windows.probe.reads.values())
    answer = windows.generate(prefix)
    assert answer.output_ids == recomputed.output_ids
    assert sum(windows.probe.reads.values()) > reads


def test_who_leaves_the_prefix_early_does_not_wait(
    windows: Server, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    """A restore is of no use to a request that needs the window at another place."""
    prefix = prompt(LONG * PAGE)
    other = prefix[: -4 * PAGE] + prompt(2 * PAGE)
    recomputed = windows.generate(other, extra_key="another namespace")
    windows.store(prefix + [5])
    with windows.probe.hold("get") as wait_until_held:
        operation_id = windows.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        assert windows.generate(other).output_ids == recomputed.output_ids
        assert windows.toolgap.status(operation_id).joined_requests == 0
    assert windows.ended(operation_id).state is State.RESTORED


def test_what_ends_elsewhere_in_storage_is_not_restored(windows: Server, prompt: Prompt) -> None:
    """Full-attention KV is there for every page, the window only before the end that was stored."""
    stored = prompt(LONG * PAGE)
    windows.store(stored + [5])
    outcome = restored(windows, stored[: LONG // 2 * PAGE])
    assert (outcome.state, outcome.reason) == (State.MISS, Reason.NOT_IN_STORAGE)
    assert (outcome.found_tokens, outcome.read_tokens) == (0, 0)
    assert not windows.probe.reads


def test_only_what_is_missing_is_read(windows: Server, prompt: Prompt) -> None:
    first, second = prompt(40 * PAGE), prompt(40 * PAGE)
    recomputed = windows.store(first + second + [5])
    windows.generate(first + [5])
    windows.probe.reset()
    outcome = restored(windows, first + second)
    assert (outcome.state, outcome.resident_tokens, outcome.read_tokens) == (
        State.RESTORED,
        40 * PAGE,
        40 * PAGE,
    )
    assert (len(windows.probe.reads), window_reads(windows)) == (40 + WINDOW_PAGES, WINDOW_PAGES)
    answer = windows.generate(first + second + [5])
    assert answer.sources == (40 * PAGE, 40 * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids


def test_behind_a_resident_part_less_than_a_window_is_not_read(windows: Server, prompt: Prompt) -> None:
    """SGLang reads no window for it, so that the rest of the read would be of no use."""
    first, second = prompt(40 * PAGE), prompt(20 * PAGE)
    recomputed = windows.store(first + second + [5])
    windows.generate(first + [5])
    windows.probe.reset()
    outcome = restored(windows, first + second)
    assert (outcome.state, outcome.reason) == (State.PARTIAL, Reason.BELOW_THRESHOLD)
    assert (outcome.resident_tokens, outcome.read_tokens) == (40 * PAGE, 0)
    assert not windows.probe.reads
    assert windows.generate(first + second + [5]).output_ids == recomputed.output_ids


def test_a_page_missing_in_storage_ends_the_restore_at_the_end_before(
    windows: Server, prompt: Prompt
) -> None:
    first, second = prompt(40 * PAGE), prompt(40 * PAGE)
    windows.store(first + [5])
    older = window_files(windows)
    recomputed = windows.store(first + second + [5])
    newer = [path for path in window_files(windows) if path not in older]
    newer[len(newer) // 2].unlink()

    outcome = restored(windows, first + second)
    assert (outcome.state, outcome.reason) == (State.PARTIAL, Reason.STORAGE_SHORTFALL)
    assert (outcome.found_tokens, outcome.read_tokens, outcome.inserted_tokens) == (40 * PAGE,) * 3
    answer = windows.generate(first + second + [5])
    assert answer.sources[:2] == (0, 40 * PAGE)
    assert answer.output_ids == recomputed.output_ids


@pytest.mark.parametrize(
    "page", [pytest.param(10, id="full attention"), pytest.param(LONG + 10, id="window")]
)
@pytest.mark.parametrize("answer", ["miss", "fail"])
def test_a_page_that_cannot_be_read_drops_the_restore(
    windows: Server, prompt: Prompt, page: int, answer: str
) -> None:
    prefix = prompt(LONG * PAGE)
    recomputed = windows.store(prefix + [5])
    windows.probe.spoil("get", answer, page)
    outcome = restored(windows, prefix)
    assert (outcome.state, outcome.reason) == (State.FAILED, Reason.STORAGE_READ_FAILED)
    assert (outcome.found_tokens, outcome.inserted_tokens) == (LONG * PAGE, 0)
    assert outcome.dropped_tokens == outcome.read_tokens
    continuation = windows.generate(prefix + [5])
    assert continuation.sources[:2] == (0, 0)
    assert continuation.output_ids == recomputed.output_ids


def test_a_cancelled_restore_leaves_nothing(windows: Server, prompt: Prompt) -> None:
    """Time and again, so that staging of the windows that were kept would run out."""
    prefix = prompt(LONG * PAGE)
    recomputed = windows.store(prefix + [5])
    before = windows.baseline()
    for _ in range(40):
        with windows.probe.hold("get") as wait_until_held:
            operation_id = windows.toolgap.submit(input_ids=prefix).operation_id
            wait_until_held()
            windows.toolgap.cancel(operation_id)
        outcome = windows.ended(operation_id)
        assert (outcome.state, outcome.inserted_tokens) == (State.CANCELLED, 0)
    until("host memory is free again", lambda: windows.baseline() == before)
    assert restored(windows, prefix).state is State.RESTORED
    answer = windows.generate(prefix + [5])
    assert answer.sources == (0, LONG * PAGE, 0)
    assert answer.output_ids == recomputed.output_ids


def test_the_pool_of_the_windows_changes_no_answer(
    windows: Server, window_model: Path, tmp_path: Path, prompt: Prompt
) -> None:
    """The CPU profile finds the windows' KV: without a pool of their own, stock attention answers the same."""
    prompts = [prompt(tokens) for tokens in (50, SHORT * PAGE, LONG * PAGE + 3)]
    answers = [windows.generate(tokens, tokens=40).output_ids for tokens in prompts]
    with Server(window_model, tmp_path, arguments=("--disable-hybrid-swa-memory",)) as server:
        assert [server.generate(tokens, tokens=40).output_ids for tokens in prompts] == answers


def test_latent_attention_is_restored_like_any_other(
    tmp_path: Path, prompt: Prompt, pool: ThreadPoolExecutor
) -> None:
    """MLA: one latent a token, in a host pool of another kind, under keys that name no rank."""
    model = build_tiny_latent_model(tmp_path / "model")
    prefix, early = prompt(40 * PAGE), prompt(40 * PAGE)
    with Server(model, tmp_path / "server", environment=ENVIRONMENT) as server:
        before = server.baseline()
        recomputed = [server.generate(tokens + [5]) for tokens in (prefix, early)]
        assert recomputed[0].output_ids != recomputed[1].output_ids
        server.flush()
        server.probe.reset()

        outcome = restored(server, prefix)
        assert (outcome.state, outcome.read_tokens) == (State.RESTORED, 40 * PAGE)
        answer = server.generate(prefix + [5])
        assert answer.sources == (0, 40 * PAGE, 0)
        assert answer.output_ids == recomputed[0].output_ids

        with server.probe.hold("get") as wait_until_held:
            operation_id = server.toolgap.submit(input_ids=early).operation_id
            wait_until_held()
            continuation = pool.submit(server.generate, early + [5])
            until("the continuation joined", joined(server, operation_id))
        answer = continuation.result()
        assert answer.sources == (0, 40 * PAGE, 0)
        assert answer.output_ids == recomputed[1].output_ids
        assert set(server.probe.reads.values()) == {1}
        server.check_back_at(before)


def test_a_restore_for_which_host_memory_is_short_is_dropped(
    window_model: Path, tmp_path: Path, prompt: Prompt
) -> None:
    """What the device holds stays in host memory: there is room for a part, which would be of no use."""
    prefix = prompt(150 * PAGE)
    arguments = ("--hicache-ratio", "1", "--max-total-tokens", str(400 * PAGE))
    with Server(window_model, tmp_path, arguments=arguments, environment=ENVIRONMENT) as server:
        before = server.baseline()
        recomputed = server.store(prefix + [5])
        for _ in range(2):
            server.generate(prompt(140 * PAGE), tokens=1)
        outcome = restored(server, prefix)
        assert outcome.reason is Reason.HOST_CAPACITY
        assert (outcome.found_tokens, outcome.inserted_tokens) == (150 * PAGE, 0)
        assert 0 < outcome.read_tokens == outcome.dropped_tokens < 150 * PAGE
        assert server.generate(prefix + [5]).output_ids == recomputed.output_ids
        server.check_back_at(before)
