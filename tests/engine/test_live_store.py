"""Toolgap's store under a real server: what is restored from it is exact, and what is damaged is recomputed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PAGE, Prompt, Server, until
from storing import PAGES, TOKENS, counted, flip_pages, recomputed, restored, serving, sizes

from toolgap.childserver import ServerError
from toolgap.cpu.model import build_tiny_model
from toolgap.protocol import Reason, State
from toolgap.store.config import StoreConfig

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "kv"


@pytest.fixture(scope="module")
def shared(model: Path, path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("shared"), StoreConfig(path=str(path))) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """A server over a store, with an empty cache; afterwards everything is back where it was."""
    with shared.left_as_found():
        yield shared


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

    with serving(model, tmp_path / "another", StoreConfig(path=str(path))) as another:
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
    with (
        pytest.raises(ServerError),
        serving(other_weights, tmp_path / "refused", StoreConfig(path=str(path))),
    ):
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
