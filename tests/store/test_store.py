import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from stores import NAMESPACE, SIZE, blanks, content, pages, payload, read_right

from toolgap.store.errors import StoreError
from toolgap.store.options import Fsync, Options, ReadPath
from toolgap.store.page import Page, memory
from toolgap.store.record import BLOCK_BYTES, KEY_BYTES
from toolgap.store.store import Store

KEYS = [f"k{number}" for number in range(12)]
RECORD = SIZE + BLOCK_BYTES


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", NAMESPACE) as store:
        yield store


def test_what_was_written_is_read_by_the_same_and_by_the_next(tmp_path: Path) -> None:
    with Store.open(tmp_path, NAMESPACE) as store:
        assert store.write(pages(KEYS)) == [True] * 12
        assert all(read_right(store, KEYS))
        assert store.exists(["k3", "other"]) == [True, False]
    with Store.open(tmp_path, NAMESPACE) as store:
        assert all(read_right(store, KEYS))
        assert store.leading(["k0", "k1", "other", "k2"]) == 2
        assert store.leading(KEYS) == 12
        stats = store.stats()
    assert (stats.pages, stats.read_pages, stats.read_bytes) == (12, 12, 12 * SIZE)
    assert (stats.used_bytes, stats.failures, stats.trouble) == (12 * RECORD, {}, None)


@pytest.mark.parametrize("read_path", list(ReadPath))
@pytest.mark.parametrize("size", [1, 511, 4096, 5000, 3 * 4096])
def test_every_way_of_reading_gives_the_bytes(tmp_path: Path, read_path: ReadPath, size: int) -> None:
    options = Options(read_path=read_path, strip_bytes=3 * 8192)
    with Store.open(tmp_path, NAMESPACE, options) as store:
        assert all(store.write(pages(KEYS, size)))
        for parts in (1, 2, 3):
            made = blanks(reversed(KEYS), size, parts)
            assert all(store.read(made))
            assert [content(page) for page in made] == [payload(key, size) for key in reversed(KEYS)]


def test_pages_that_are_not_in_the_page_cache_are_read_around_it(tmp_path: Path) -> None:
    with Store.open(tmp_path, NAMESPACE, Options(fsync=Fsync.BATCH)) as store:
        store.write(pages(KEYS))
        for path in tmp_path.glob("segments/*"):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        assert all(read_right(store, KEYS))


def test_memory_is_named_by_its_address(store: Store) -> None:
    import ctypes

    source = ctypes.create_string_buffer(payload("k0"), SIZE)
    target = ctypes.create_string_buffer(SIZE)
    halves = [memory(ctypes.addressof(source), 4096), memory(ctypes.addressof(source) + 4096, 4096)]
    assert store.write([Page("k0", halves)]) == [True]
    assert store.read([Page("k0", [memory(ctypes.addressof(target), SIZE)])]) == [True]
    assert target.raw == payload("k0")


def test_a_page_is_written_once(store: Store) -> None:
    assert store.write(pages(["k0", "k0"])) == [True, True]
    assert store.write(pages(["k0"])) == [True]
    assert store.stats().written_pages == 1
    assert store.stats().used_bytes == RECORD


def test_a_read_of_another_size_is_a_miss(store: Store) -> None:
    store.write(pages(["k0"]))
    assert store.read(blanks(["k0"], SIZE + 1)) == [False]
    assert store.stats().failures == {"size": 1}
    assert all(read_right(store, ["k0"]))


def test_an_empty_page_and_long_keys(store: Store) -> None:
    longest = "x" * KEY_BYTES
    assert store.write([Page("", []), *pages([longest, longest + "x"])]) == [True, True, False]
    assert store.read([Page("", [])]) == [True]
    assert all(read_right(store, [longest]))
    assert store.stats().failures == {"key": 1}


def test_a_cancelled_read_says_so_and_reads_no_more(store: Store) -> None:
    store.write(pages(KEYS))
    cancel = threading.Event()
    cancel.set()
    assert store.read(blanks(KEYS), cancel) == [False] * 12
    assert store.stats().cancelled_pages == 12
    assert store.stats().read_pages == 0
    assert all(read_right(store, KEYS))


def test_readers_share_the_threads(tmp_path: Path) -> None:
    results: list[bool] = []
    with Store.open(tmp_path, NAMESPACE, Options(readers=2, strip_bytes=RECORD)) as store:
        store.write(pages(KEYS))
        threads = [threading.Thread(target=lambda: results.extend(read_right(store, KEYS))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 72


def test_a_closed_store_finds_and_writes_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path, NAMESPACE)
    store.write(pages(KEYS))
    store.close()
    store.close()
    assert store.exists(KEYS) == [False] * 12
    assert store.read(blanks(KEYS)) == [False] * 12
    assert store.write(pages(KEYS)) == [False] * 12
    assert store.stats().failures == {"closed": 12}


@pytest.mark.parametrize(
    "field", ["model", "weights", "dtype", "layout", "page_size_tokens", "ranks", "salt"]
)
def test_a_store_of_another_namespace_is_refused_by_name(tmp_path: Path, field: str) -> None:
    with Store.open(tmp_path, NAMESPACE) as store:
        store.write(pages(KEYS))
    other = msgspec.structs.replace(NAMESPACE, **{field: 32 if field == "page_size_tokens" else "another"})
    with pytest.raises(StoreError, match=f"another namespace: {field} is .* there and .* here"):
        Store.open(tmp_path, other)
    # Nor without the label.
    (tmp_path / "namespace.json").unlink()
    with pytest.raises(StoreError, match=f"another namespace: {field} is"):
        Store.open(tmp_path, other)
    with Store.open(tmp_path) as store:
        assert store.namespace == NAMESPACE
        assert all(read_right(store, KEYS))


def test_a_path_that_cannot_hold_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot hold a store: Not a directory"):
        Store.open(tmp_path / "file" / "store", NAMESPACE)
    with pytest.raises(StoreError, match="there is no folder"):
        Store.open(tmp_path / "none")
    with pytest.raises(StoreError, match="holds no store"):
        Store.open(tmp_path)


def test_a_store_of_a_later_version_is_refused(tmp_path: Path) -> None:
    with Store.open(tmp_path, NAMESPACE):
        pass
    label = tmp_path / "namespace.json"
    label.write_bytes(label.read_bytes().replace(b'"version":2', b'"version":9'))
    with pytest.raises(StoreError, match="version 9; this release knows 2"):
        Store.open(tmp_path, NAMESPACE)


def test_the_least_recently_used_pages_go(tmp_path: Path) -> None:
    with Store.open(tmp_path, NAMESPACE, Options(limit_bytes=4 * RECORD)) as store:
        store.write(pages(KEYS[:4]))
        assert all(read_right(store, ["k0"]))
        assert store.write(pages(["k4"])) == [True]
        assert store.exists(KEYS[:5]) == [True, False, True, True, True]
        assert store.stats().used_bytes == 4 * RECORD
        assert store.write(pages(["big"], 4 * RECORD)) == [False]
        assert store.stats().failures == {"limit": 1}
    taken = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("segments/*"))
    assert taken <= 4 * RECORD + BLOCK_BYTES
    with Store.open(tmp_path, NAMESPACE) as store:
        assert read_right(store, KEYS[:5]) == [True, False, True, True, True]


def test_a_page_that_is_being_read_is_spared(tmp_path: Path) -> None:
    from toolgap.store.files import lock_range
    from toolgap.store.segments import segment_path

    with Store.open(tmp_path, NAMESPACE, Options(limit_bytes=2 * RECORD)) as store:
        store.write(pages(["k0", "k1"]))
        place = min(place for _, place in store._catalog.index.pages())
        reading = os.open(segment_path(tmp_path, place.segment), os.O_RDONLY)
        assert lock_range(reading, place.offset, place.record_bytes, exclusive=False)
        store.write(pages(["k2"]))
        assert store.exists(["k0", "k1", "k2"]) == [True, False, True]
        os.close(reading)
        store.write(pages(["k3"]))
        assert store.exists(["k0", "k1", "k2", "k3"]) == [False, False, True, True]


def test_full_segments_are_followed_by_others_and_go_when_empty(tmp_path: Path) -> None:
    options = Options(segment_bytes=2 * RECORD, limit_bytes=4 * RECORD)
    with Store.open(tmp_path, NAMESPACE, options) as store:
        for key in KEYS:
            store.write(pages([key]))
        assert read_right(store, KEYS) == [False] * 8 + [True] * 4
        assert len(list(tmp_path.glob("segments/*"))) <= 3
        store.check_integrity()


def test_two_stores_on_one_path_see_each_other(tmp_path: Path) -> None:
    with Store.open(tmp_path, NAMESPACE) as one, Store.open(tmp_path, NAMESPACE) as two:
        one.write(pages(["k0"]))
        assert all(read_right(two, ["k0"]))
        two.write(pages(["k1", "k0"]))
        assert all(read_right(one, ["k0", "k1"]))
        assert two.stats().written_pages == 1
        assert one.stats().used_bytes == two.stats().used_bytes == 2 * RECORD
        # A use that one logged counts in the other's eviction.
        one._catalog.tell_uses(wait=True)
        two._catalog.tell_uses(wait=True)
        read_right(one, ["k0"])
        one._catalog.tell_uses(wait=True)
        two._room.evict(RECORD)
        assert one.exists(["k0", "k1"]) == [True, False]


def test_the_first_of_two_puts_of_one_page_stands(tmp_path: Path) -> None:
    from unittest import mock

    with Store.open(tmp_path, NAMESPACE) as one, Store.open(tmp_path, NAMESPACE) as two:
        one.write(pages(["k0"]))
        # As if two had looked a moment earlier.
        with mock.patch.object(two._catalog, "refresh"):
            assert two.write(pages(["k0"])) == [True]
        assert two.stats().written_pages == 0
        assert one.stats().used_bytes == two.stats().used_bytes == RECORD
        assert all(read_right(two, ["k0"]))


def test_the_log_is_written_anew_before_it_grows_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolgap.store.catalog._SPARE_ENTRIES", 8)
    with Store.open(tmp_path, NAMESPACE) as one, Store.open(tmp_path, NAMESPACE) as two:
        one.write(pages(KEYS))
        for _ in range(20):
            read_right(one, ["k0"])
            one._catalog.tell_uses(wait=True)
        assert (tmp_path / "index.log").stat().st_size <= 64 * (2 * 12 + 8 + 2)
        assert all(read_right(two, KEYS))
        two.write(pages(["more"]))
        assert all(read_right(one, [*KEYS, "more"]))


def test_gc_gives_back_what_nobody_has(tmp_path: Path) -> None:
    with Store.open(tmp_path, NAMESPACE) as store:
        store.write(pages(KEYS))
        (segment,) = tmp_path.glob("segments/*")
    with segment.open("ab") as file:
        file.write(bytes([1]) * (1 << 20))
    with Store.open(tmp_path, NAMESPACE) as store:
        assert store.gc().freed_bytes >= 1 << 20
        assert store.gc().freed_bytes == 0
        assert store.gc(5 * RECORD).evicted_pages == 7
        assert sum(read_right(store, KEYS)) == 5
        assert segment.stat().st_blocks * 512 <= 5 * RECORD + BLOCK_BYTES
        store.check_integrity()


def test_gc_makes_pages_of_what_the_index_forgot(tmp_path: Path) -> None:
    with Store.open(tmp_path, NAMESPACE) as store:
        store.write(pages(KEYS))
    log = tmp_path / "index.log"
    os.truncate(log, 64 * 3)
    with Store.open(tmp_path, NAMESPACE) as store:
        assert sum(store.exists(KEYS)) == 2
        assert store.gc().adopted_pages == 10
        assert all(read_right(store, KEYS))


def test_another_process_may_be_reading_and_writing(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from stores import *\n"
        "with Store.open(Path(sys.argv[1]), NAMESPACE) as store:\n"
        "    assert all(read_right(store, ['k0'])); assert all(store.write(pages(['k1'])))\n"
    )
    with Store.open(tmp_path, NAMESPACE) as store:
        store.write(pages(["k0"]))
        here = str(Path(__file__).parent)
        subprocess.run([sys.executable, "-c", script, str(tmp_path), here], check=True, timeout=60)
        assert all(read_right(store, ["k0", "k1"]))


def test_a_write_steps_aside_for_reads_but_not_for_ever(store: Store) -> None:
    store._reader.idle.clear()
    assert all(store.write(pages(["k0"])))


def test_errors_are_named(tmp_path: Path) -> None:
    from toolgap.store.segments import reason

    assert reason(OSError(errno.ENOSPC, "full")) == "ENOSPC"
    assert reason(OSError("odd")) == "unknown"
