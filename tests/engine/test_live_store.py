"""Toolgap's store under a real server: what is restored from it is exact, and what is damaged is recomputed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import PAGE, PATIENT, Prompt, Server, until

from toolgap.childserver import ServerError
from toolgap.cpu.model import build_tiny_model
from toolgap.protocol import OperationStatus, Reason, State
from toolgap.store.config import StoreConfig, arguments

pytestmark = pytest.mark.engine

PAGES = 40
"""More than SGLang's shortest read (16 pages)."""
TOKENS = PAGES * PAGE


@contextmanager
def serving(model: Path, folder: Path, store: Path) -> Iterator[Server]:
    with Server(
        model,
        folder,
        arguments=[
            *arguments(StoreConfig(path=str(store))),
            *("--hicache-mem-layout", "page_first", "--served-model-name", "tiny"),
        ],
        environment=PATIENT,
    ) as server:
        yield server


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "kv"


@pytest.fixture(scope="module")
def shared(model: Path, path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("shared"), path) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """A server over a store, with an empty cache; afterwards everything is back where it was."""
    with shared.left_as_found():
        yield shared


def restored(server: Server, prefix: Sequence[int]) -> OperationStatus:
    return server.ended(server.toolgap.submit(input_ids=prefix).operation_id)


def counted(server: Server, name: str) -> float:
    """The sum of one of the store's metrics."""
    lines = server.http.get("/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"sglang:hicache_store_{name}{{")
    )


def recomputed(server: Server, prompt: list[int]) -> list[int]:
    """What the model says to a prompt if nothing of it is cached."""
    answer = server.generate(prompt, tokens=8, extra_key="computed")
    assert answer.sources == (0, 0, 0)
    server.flush()
    return answer.output_ids


def test_a_continuation_of_a_restored_prefix_is_exact(server: Server, prompt: Prompt) -> None:
    prefix = prompt(TOKENS)
    continuation = prefix + prompt(3)
    server.store([*prefix, 5])
    expected = recomputed(server, continuation)

    on_request = server.generate(continuation, tokens=8)
    assert on_request.sources == (0, 0, TOKENS)
    assert on_request.output_ids == expected
    server.flush()

    outcome = restored(server, prefix)
    assert (outcome.state, outcome.reason) == (State.RESTORED, Reason.COMPLETE)
    assert (outcome.found_tokens, outcome.read_tokens) == (TOKENS, TOKENS)
    ahead = server.generate(continuation, tokens=8)
    assert ahead.sources == (0, TOKENS, 0)
    assert ahead.output_ids == expected


def test_pages_with_flipped_bytes_are_recomputed(server: Server, prompt: Prompt, path: Path) -> None:
    prefix = prompt(TOKENS)
    continuation = prefix + prompt(3)
    expected = recomputed(server, continuation)
    before = sizes(path)
    server.store([*prefix, 5])
    damaged = counted(server, "damaged_pages_total")
    for file, size in sizes(path).items():
        flip_pages(file, before.get(file, 0), size, first=20)

    answer = server.generate(continuation, tokens=8)
    assert answer.output_ids == expected
    assert answer.sources == (0, 0, 20 * PAGE)
    assert counted(server, "damaged_pages_total") > damaged
    server.flush()
    # What was recomputed was stored again.
    again = server.generate(continuation, tokens=8)
    assert again.output_ids == expected
    assert again.sources == (0, 0, TOKENS)


def test_a_cancel_ends_the_read_in_flight(server: Server, prompt: Prompt) -> None:
    prefix = prompt(TOKENS)
    server.store([*prefix, 5])
    with server.probe.hold("read") as wait_until_held:
        operation_id = server.toolgap.submit(input_ids=prefix).operation_id
        wait_until_held()
        server.toolgap.cancel(operation_id)
        until(
            "the read is to stop",
            lambda: server.toolgap.status(operation_id).state == State.CANCELLED or True,
        )
    outcome = server.ended(operation_id)
    assert outcome.state is State.CANCELLED
    assert outcome.read_tokens == 0
    until("the pages are counted as cancelled", lambda: counted(server, "cancelled_pages_total") >= PAGES)
    assert server.generate(prefix + prompt(3), tokens=1).storage_tokens == TOKENS


def test_a_cleared_store_holds_nothing(server: Server, prompt: Prompt) -> None:
    prefix = prompt(TOKENS)
    server.store([*prefix, 5])
    assert server.http.post("/hicache/storage-backend/clear").status_code == 200
    outcome = restored(server, prefix)
    assert (outcome.state, outcome.reason) == (State.MISS, Reason.NOT_IN_STORAGE)
    server.flush()
    server.store([*prefix, 5])
    assert restored(server, prefix).state is State.RESTORED


def test_two_servers_share_a_folder_and_other_weights_are_refused(
    server: Server, model: Path, path: Path, prompt: Prompt, tmp_path: Path
) -> None:
    first, second = prompt(TOKENS), prompt(TOKENS)
    server.store([*first, 5])
    expected = {tuple(prefix): recomputed(server, [*prefix, 7, 8, 9]) for prefix in (first, second)}

    with serving(model, tmp_path / "another", path) as another:
        assert restored(another, first).state is State.RESTORED
        answer = another.generate([*first, 7, 8, 9], tokens=8)
        assert (answer.sources, answer.output_ids) == ((0, TOKENS, 0), expected[tuple(first)])
        another.store([*second, 5])
        # Its weights are those of the namespace no more, whatever they are.
        update = {"model_path": str(model)}
        assert another.http.post("/update_weights_from_disk", json=update).status_code == 200
        assert another.generate([*first, 7, 8, 9], tokens=8).sources == (0, 0, 0)
        assert "out of use" in another.log.read_text()
        another.kill()
    outcome = restored(server, second)
    assert (outcome.state, outcome.read_tokens) == (State.RESTORED, TOKENS)
    answer = server.generate([*second, 7, 8, 9], tokens=8)
    assert (answer.sources, answer.output_ids) == ((0, TOKENS, 0), expected[tuple(second)])

    other_weights = build_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(ServerError), serving(other_weights, tmp_path / "refused", path):
        pass
    log = (tmp_path / "refused" / "server.log").read_text()
    assert "StoreError" in log
    assert "weights" in log.partition("StoreError")[2]


def test_a_folder_that_is_gone_costs_the_read_alone(server: Server, prompt: Prompt, path: Path) -> None:
    prefix = prompt(TOKENS)
    continuation = prefix + prompt(3)
    server.store([*prefix, 5])
    expected = recomputed(server, continuation)
    path.rename(path.with_name("elsewhere"))

    outcome = restored(server, prefix)
    assert (outcome.state, outcome.reason, outcome.read_tokens) == (
        State.FAILED,
        Reason.STORAGE_READ_FAILED,
        0,
    )
    answer = server.generate(continuation, tokens=8)
    assert (answer.sources, answer.output_ids) == ((0, 0, 0), expected)
    assert restored(server, prompt(TOKENS)).state is State.MISS


def sizes(store: Path) -> dict[Path, int]:
    return {file: file.stat().st_size for file in store.glob("segments/*.seg")}


def flip_pages(file: Path, begin: int, end: int, *, first: int) -> None:
    """Flip bytes in the middle of each of the last stored pages but the first ones; sizes stay."""
    if end == begin:
        return
    content = bytearray(file.read_bytes())
    # The first page of a segment has a block before it.
    begin = max(begin, end - (end - begin) // PAGES * PAGES)
    record_bytes = (end - begin) // PAGES
    for page in range(first, PAGES):
        at = begin + page * record_bytes + record_bytes // 2
        content[at : at + 1024] = bytes(byte ^ 0xFF for byte in content[at : at + 1024])
    with file.open("r+b") as stream:
        stream.write(content)
