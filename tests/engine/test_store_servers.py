"""Servers of other shapes, and on other disks, over Toolgap's store."""

from pathlib import Path

import pytest
from harness import Prompt
from storing import PAGES, TOKENS, counted, flip_pages, recomputed, restored, serving, sizes

from mounts import apart
from toolgap.protocol import Reason, State
from toolgap.store.config import StoreConfig
from toolgap.store.options import Fsync

pytestmark = pytest.mark.engine

RECORD_BYTES = 4096 + 8192
"""One page of the tiny model, with its header."""


@pytest.mark.parametrize("shape", ["--tp-size", "--pp-size"])
def test_every_rank_reads_its_own_pages(model: Path, tmp_path: Path, prompt: Prompt, shape: str) -> None:
    path = tmp_path / "kv"
    first, second = prompt(TOKENS), prompt(TOKENS)
    with serving(model, tmp_path / "server", StoreConfig(path=str(path)), (shape, "2"), ranks=2) as server:
        expected = [recomputed(server, [*prefix, 7]) for prefix in (first, second)]
        server.store([*first, 5])
        before = sizes(path)
        assert len(before) == 2
        server.store([*second, 5])

        outcome = restored(server, first)
        assert (outcome.state, outcome.read_tokens) == (State.RESTORED, TOKENS)
        assert counted(server, "read_pages_total") == 2 * PAGES
        answer = server.generate([*first, 7], tokens=8)
        assert (answer.sources, answer.output_ids) == ((0, TOKENS, 0), expected[0])
        server.flush()

        # What one rank cannot read is of no use to the other.
        damaged = max(before, key=lambda file: file.name)
        flip_pages(damaged, before[damaged], damaged.stat().st_size)
        outcome = restored(server, second)
        assert (outcome.state, outcome.reason) == (State.FAILED, Reason.STORAGE_READ_FAILED)
        answer = server.generate([*second, 7], tokens=8)
        assert (answer.sources, answer.output_ids) == ((0, 0, 0), expected[1])
        assert counted(server, "damaged_pages_total") == PAGES


def test_a_limit_is_kept_and_the_latest_pages_stay(model: Path, tmp_path: Path, prompt: Prompt) -> None:
    limit_bytes = int(2.5 * PAGES * RECORD_BYTES)
    config = StoreConfig(path=str(tmp_path / "kv"), limit_bytes=limit_bytes, fsync=Fsync.BATCH)
    prefixes = [prompt(TOKENS) for _ in range(5)]
    with serving(model, tmp_path / "server", config) as server:
        expected = [recomputed(server, [*prefix, 7]) for prefix in prefixes]
        for prefix in prefixes:
            server.store([*prefix, 5])
            assert 0 < counted(server, "used_bytes") <= limit_bytes
        outcomes = [restored(server, prefix) for prefix in prefixes]
        assert [outcome.state for outcome in outcomes[-2:]] == [State.RESTORED] * 2
        assert outcomes[0].state is State.MISS
        answers = [server.generate([*prefix, 7], tokens=8).output_ids for prefix in prefixes]
        assert answers == expected
        assert counted(server, "evicted_pages_total") >= 2.5 * PAGES


@pytest.fixture
def small_disk(tmp_path: Path) -> list[str]:
    """What runs a command that has a disk of 2 MiB, which nobody else sees and which goes with it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=2m tmpfs '{disk}'"
    return [*apart(disk), "sh", "-c", f'{mount} && exec "$@"', "sh"]


def test_a_full_disk_costs_what_it_could_not_take(
    model: Path, tmp_path: Path, prompt: Prompt, small_disk: list[str]
) -> None:
    config = StoreConfig(path=str(tmp_path / "disk" / "kv"))
    prefixes = [prompt(TOKENS) for _ in range(6)]
    with serving(model, tmp_path / "server", config, launcher=small_disk) as server:
        for prefix in prefixes:
            server.store([*prefix, 5])
        assert counted(server, "failed_pages_total", 'reason="ENOSPC"')
        outcomes = [restored(server, prefix) for prefix in prefixes]
        assert outcomes[0].state is State.RESTORED
        assert outcomes[-1].state is State.MISS
        answers = [server.generate([*prefix, 7], tokens=8).output_ids for prefix in prefixes]
        assert answers == [recomputed(server, [*prefix, 7]) for prefix in prefixes]
        # Room again: the server was not told, and goes on.
        assert server.http.post("/hicache/storage-backend/clear").status_code == 200
        server.store([*prefixes[-1], 5])
        assert restored(server, prefixes[-1]).state is State.RESTORED
