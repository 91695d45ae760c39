"""Whose turn it is, seen strip by strip."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from stores import NAMESPACE, SIZE, blanks, pages, read_right

from toolgap.store.options import Options
from toolgap.store.page import Page
from toolgap.store.record import Place, record_bytes
from toolgap.store.store import Store
from toolgap.store.strips import Strip, Wanted, strips

LARGE = [f"large{number}" for number in range(8)]
RECORD = record_bytes(SIZE)


class Turns:
    """Lets a store read one strip after the other, each when told to."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[str] = []
        self.began = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        land = store._reader.landing.land

        def take_turn(strip: Strip, scratch: memoryview) -> dict[int, str]:
            self.read.append(strip.wanted[0].key.decode())
            self.began.release()
            assert self.go_on.acquire(timeout=60)
            return land(strip, scratch)

        monkeypatch.setattr(store._reader.landing, "land", take_turn)

    def step(self) -> None:
        assert self.began.acquire(timeout=60)
        self.go_on.release()


class Reading(threading.Thread):
    def __init__(self, store: Store, keys: Sequence[str], cancel: threading.Event | None = None) -> None:
        super().__init__()
        self.there: list[bool] = []
        self._work = (store, keys, cancel)
        self.start()

    def run(self) -> None:
        store, keys, cancel = self._work
        self.there = store.read(blanks(keys), cancel)


def until_queued(store: Store, requests: int) -> None:
    """That so many requests have come in."""
    reader = store._reader
    with reader._work:
        assert reader._work.wait_for(lambda: reader._active >= requests, timeout=60)


def test_a_small_read_is_not_stuck_behind_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(tmp_path, NAMESPACE, Options(readers=1, strip_bytes=RECORD)) as store:
        store.write(pages([*LARGE, "small"]))
        turns = Turns(store, monkeypatch)
        large = Reading(store, LARGE)
        assert turns.began.acquire(timeout=60)
        small = Reading(store, ["small"])
        until_queued(store, 2)
        turns.go_on.release()
        for _ in range(8):
            turns.step()
        large.join()
        small.join()
    assert turns.read.index("small") <= 2
    assert large.there == [True] * 8
    assert small.there == [True]


def test_cancelling_takes_effect_within_one_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(tmp_path, NAMESPACE, Options(readers=1, strip_bytes=RECORD)) as store:
        store.write(pages(LARGE))
        turns = Turns(store, monkeypatch)
        cancel = threading.Event()
        large = Reading(store, LARGE, cancel)
        turns.step()
        assert turns.began.acquire(timeout=60)
        cancel.set()
        turns.go_on.release()
        large.join()
        assert len(turns.read) == 2
        assert large.there == [True] * 2 + [False] * 6
        assert store.stats().cancelled_pages == 6


def test_closing_ends_reads_as_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(tmp_path, NAMESPACE, Options(readers=1, strip_bytes=RECORD))
    store.write(pages(LARGE))
    turns = Turns(store, monkeypatch)
    large = Reading(store, LARGE)
    assert turns.began.acquire(timeout=60)
    closing = threading.Thread(target=store.close)
    closing.start()
    with store._reader._work:
        assert store._reader._work.wait_for(lambda: store._reader._closed, timeout=60)
    turns.go_on.release()
    large.join()
    closing.join()
    assert large.there == [True] + [False] * 7


def test_neighbours_are_read_together_in_the_order_of_the_disk() -> None:
    def wanted(number: int, segment: int, position: int) -> Wanted:
        return Wanted(number, b"", Place(segment, position * RECORD, SIZE), ())

    made = strips(
        [wanted(0, 2, 5), wanted(1, 1, 3), wanted(2, 1, 1), wanted(3, 1, 2), wanted(4, 1, 4)], 3 * RECORD
    )
    assert [[page.number for page in strip.wanted] for strip in made] == [[2, 3, 1], [4], [0]]
    assert [strip.read_bytes for strip in made] == [3 * RECORD, RECORD, RECORD]
    apart = strips([wanted(0, 1, 1), wanted(1, 1, 3)], 1 << 30)
    assert len(apart) == 2


def test_many_small_pieces_are_more_than_one_io(tmp_path: Path) -> None:
    keys = [f"k{number}" for number in range(40)]
    with Store.open(tmp_path, NAMESPACE) as store:
        store.write(pages(keys))
        assert all(store.read(blanks(keys, parts=64)))
        assert all(read_right(store, keys))


def test_memory_that_cannot_be_written_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Store.open(tmp_path, NAMESPACE) as store:
        store.write(pages(LARGE))
        assert store.read([Page(LARGE[0], [memoryview(bytes(SIZE))])]) == [False]
        assert store.stats().failures == {"failed": 1}
        assert "1 pages were not read" in caplog.text
        assert all(read_right(store, LARGE))
