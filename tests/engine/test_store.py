"""Toolgap's store under a real server: what is restored from it is exact, and what is damaged is recomputed."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from harness import PAGE, PATIENT, Prompt, Server, until

from toolgap.childserver import ServerError
from toolgap.protocol import OperationStatus, Reason, State
from toolgap.store.config import StoreConfig, arguments

pytestmark = pytest.mark.engine

PAGES = 40
"""More than SGLang's shortest read (16 pages)."""


@contextmanager
def serving(model: Path, folder: Path, store: Path, *more: str) -> Iterator[Server]:
    with Server(
        model,
        folder,
        arguments=[*arguments(StoreConfig(path=str(store))), "--hicache-mem-layout", "page_first", *more],
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
def stored(shared: Server) -> Iterator[Server]:
    """A server over a store, with an empty cache; afterwards everything is back where it was."""
    with shared.left_as_found():
        yield shared


def restored(server: Server, prefix: Sequence[int]) -> OperationStatus:
    return server.ended(server.toolgap.submit(input_ids=prefix).operation_id)


def test_a_continuation_of_a_restored_prefix_is_exact(stored: Server, prompt: Prompt) -> None:
    prefix = prompt(PAGES * PAGE)
    continuation = prefix + prompt(3)
    stored.store(prefix + [5])
    recomputed = stored.generate(continuation, tokens=8, extra_key="another namespace")
    stored.flush()

    on_request = stored.generate(continuation, tokens=8)
    assert on_request.sources == (0, 0, PAGES * PAGE)
    assert on_request.output_ids == recomputed.output_ids
    stored.flush()

    outcome = restored(stored, prefix)
    assert (outcome.state, outcome.reason) == (State.RESTORED, Reason.COMPLETE)
    assert (outcome.found_tokens, outcome.read_tokens) == (PAGES * PAGE, PAGES * PAGE)
    ahead = stored.generate(continuation, tokens=8)
    assert ahead.sources == (0, PAGES * PAGE, 0)
    assert ahead.output_ids == recomputed.output_ids
