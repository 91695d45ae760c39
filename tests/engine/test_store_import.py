"""Pages that SGLang's file backend wrote, imported into a store while its server runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import PAGE, PATIENT, Prompt, Server, until
from storing import recomputed, restored

from toolgap.protocol import State
from toolgap.store.config import StoreConfig, arguments
from toolgap.store.stock import import_folder
from toolgap.store.stockpages import Layout
from toolgap.store.store import Store

pytestmark = pytest.mark.engine

BACKEND = "/hicache/storage-backend"
PAGES = 20
TOKENS = PAGES * PAGE


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[Server]:
    layout = ["--hicache-mem-layout", "page_first", "--served-model-name", "tiny"]
    with Server(model, tmp_path / "server", arguments=layout, environment=PATIENT) as server:
        yield server


def test_what_the_file_backend_wrote_is_restored_from_the_store(
    server: Server, prompt: Prompt, tmp_path: Path
) -> None:
    prefix = prompt(TOKENS)
    continuation = prefix + prompt(3)
    expected = recomputed(server, continuation)
    server.store([*prefix, 5])
    until("storage is detached", lambda: server.http.delete(BACKEND).status_code == 200)

    path = tmp_path / "kv"
    _, backend, _, extra = arguments(StoreConfig(path=str(path)))
    body = {"hicache_storage_backend": backend, "hicache_storage_backend_extra_config_json": extra}
    until("the store is attached", lambda: server.http.put(BACKEND, json=body).status_code == 200)
    server.flush()
    with Store.open(path) as store:
        imported = import_folder(store, server.storage, Layout.PAGE_FIRST)
    assert imported.imported_pages >= PAGES
    assert (imported.failed_pages, imported.odd_files) == (0, 0)

    outcome = restored(server, prefix)
    assert (outcome.state, outcome.read_tokens) == (State.RESTORED, TOKENS)
    answer = server.generate(continuation, tokens=8)
    assert (answer.sources, answer.output_ids) == ((0, TOKENS, 0), expected)
