"""Bytes that are not what was written: never returned, never more than a miss."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from stores import NAMESPACE, blanks, pages, read_right

from toolgap.store.errors import StoreError
from toolgap.store.folder import settle
from toolgap.store.landing import SCRATCH_BYTES, Landing
from toolgap.store.log import ENTRY_BYTES
from toolgap.store.options import ReadPath
from toolgap.store.record import BLOCK_BYTES
from toolgap.store.segments import headers, namespace_of
from toolgap.store.store import Store
from toolgap.store.strips import Wanted, strips

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("way")]

KEYS = ["a", "b", "c"]
SIZE = 64


def small_store(path: Path) -> Path:
    """Makes one, and returns its only segment."""
    with Store.open(path, NAMESPACE) as store:
        assert all(store.write(pages(KEYS, SIZE)))
    (segment,) = path.glob("segments/*")
    return segment


def wrong(right: bytes, bit: int) -> bytes:
    changed = bytearray(right)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@contextmanager
def flipped(fd: int, bit: int) -> Iterator[None]:
    right = os.pread(fd, 1, bit // 8)
    os.pwrite(fd, bytes([right[0] ^ (1 << bit % 8)]), bit // 8)
    yield
    os.pwrite(fd, right, bit // 8)


def test_no_bit_of_a_record_may_flip(fast_path: Path) -> None:
    segment = small_store(fast_path)
    first = next(headers(segment))
    landing = Landing(fast_path, NAMESPACE.digest(), ReadPath.CACHED)
    (page,) = blanks([first.key.decode()], SIZE)
    (strip,) = strips([Wanted(0, first.key, first.place, page.buffers)], 1)
    scratch = memoryview(bytearray(SCRATCH_BYTES))
    assert landing.land(strip, scratch) == {}
    fd = os.open(segment, os.O_RDWR)
    start = first.place.offset * 8
    try:
        for bit in range(start, start + (BLOCK_BYTES + SIZE) * 8):
            with flipped(fd, bit):
                expected = "header" if bit < start + BLOCK_BYTES * 8 else "checksum"
                assert landing.land(strip, scratch) == {0: expected}, f"bit {bit}"
        # The filling is nobody's.
        with flipped(fd, first.place.end * 8 - 1):
            assert landing.land(strip, scratch) == {}
    finally:
        os.close(fd)


def test_no_bit_of_the_index_may_flip(fast_path: Path) -> None:
    small_store(fast_path)
    log = fast_path / "index.log"
    right = log.read_bytes()
    assert len(right) == (1 + len(KEYS)) * ENTRY_BYTES
    for bit in range(len(right) * 8):
        log.write_bytes(wrong(right, bit))
        with Store.open(fast_path) as store:
            # Made again from the segments, nothing is lost.
            assert read_right(store, KEYS, SIZE) == [True] * 3, f"bit {bit}"
            assert store.stats().damaged_pages == 0
    with Store.open(fast_path) as store:
        assert store._catalog._log.bad_entries == 0


def test_no_bit_of_the_label_may_flip(fast_path: Path) -> None:
    small_store(fast_path)
    label = fast_path / "namespace.json"
    right = label.read_bytes()
    for bit in range(len(right) * 8):
        label.write_bytes(wrong(right, bit))
        assert settle(fast_path, NAMESPACE) == (NAMESPACE, True), f"bit {bit}"
        assert label.read_bytes() == right


def test_no_bit_of_a_segments_first_block_may_flip(fast_path: Path) -> None:
    segment = small_store(fast_path)
    fd = os.open(segment, os.O_RDWR)
    assert namespace_of(segment) == NAMESPACE
    for bit in range(BLOCK_BYTES * 8):
        with flipped(fd, bit):
            assert namespace_of(segment) is None
    os.close(fd)


def test_a_damaged_page_is_set_aside_counted_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    segment = small_store(tmp_path)
    first = next(headers(segment))
    name = first.key.decode()
    fd = os.open(segment, os.O_RDWR)
    os.pwrite(fd, b"\xff\x00", first.place.offset + BLOCK_BYTES)
    os.close(fd)
    with caplog.at_level(logging.WARNING), Store.open(tmp_path) as store, Store.open(tmp_path) as other:
        for _ in range(3):
            assert read_right(store, KEYS, SIZE) == [key != name for key in KEYS]
        assert read_right(other, KEYS, SIZE) == [key != name for key in KEYS]
        assert store.exists([name]) == [False]
        stats = store.stats()
        assert (stats.damaged_pages, stats.aside_pages, stats.failures) == (1, 1, {"checksum": 1})
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        # It may be written again, and what was set aside is given back.
        assert store.write(pages([name], SIZE)) == [True]
        assert all(read_right(other, KEYS, SIZE))
        assert store.gc().aside_pages == 1
        store.check_integrity()
        other.stats()
        other.check_integrity()
    with Store.open(tmp_path) as store:
        assert store.stats().aside_pages == 0
        assert all(read_right(store, KEYS, SIZE))


def test_a_segment_cut_at_every_byte(fast_path: Path) -> None:
    segment = small_store(fast_path)
    ends = {header.key.decode(): header.place.offset + BLOCK_BYTES + SIZE for header in headers(segment)}
    with Store.open(fast_path) as store:
        # The pages between the cuts are filled with nothing, and cut off no page.
        for length in range(segment.stat().st_size, -1, -1):
            os.truncate(segment, length)
            if length % BLOCK_BYTES in (0, 1, SIZE - 1, SIZE, SIZE + 1, BLOCK_BYTES - 1) or length < 100:
                assert read_right(store, KEYS, SIZE) == [length >= ends[key] for key in KEYS], length
        assert store.stats().damaged_pages == 3


def test_every_length_of_a_cut_record_is_told(fast_path: Path) -> None:
    segment = small_store(fast_path)
    last = list(headers(segment))[-1]
    landing = Landing(fast_path, NAMESPACE.digest(), ReadPath.AUTO)
    (page,) = blanks([last.key.decode()], SIZE)
    (strip,) = strips([Wanted(0, last.key, last.place, page.buffers)], 1)
    scratch = memoryview(bytearray(SCRATCH_BYTES))
    for length in range(last.place.end, last.place.offset - 1, -1):
        os.truncate(segment, length)
        whole = length >= last.place.offset + BLOCK_BYTES + SIZE
        assert landing.land(strip, scratch) == ({} if whole else {0: "truncated"})


def test_an_index_cut_at_every_byte(fast_path: Path) -> None:
    small_store(fast_path / "right")
    size = (fast_path / "right" / "index.log").stat().st_size
    for length in range(size):
        shutil.copytree(fast_path / "right", fast_path / "cut", dirs_exist_ok=True)
        os.truncate(fast_path / "cut" / "index.log", length)
        with Store.open(fast_path / "cut") as store:
            # Without a head it is made again; with one, what is behind the cut is forgotten.
            whole = 3 if length < ENTRY_BYTES else length // ENTRY_BYTES - 1
            assert sum(read_right(store, KEYS, SIZE)) == whole
            assert all(store.write(pages(KEYS, SIZE)))
        with Store.open(fast_path / "cut") as store:
            assert all(read_right(store, KEYS, SIZE))
            assert store._catalog._log.bad_entries == 0
        shutil.rmtree(fast_path / "cut")


@pytest.mark.parametrize("lost", ["index.log", "namespace.json", "lock"])
def test_a_lost_file_is_made_again(tmp_path: Path, lost: str) -> None:
    small_store(tmp_path)
    (tmp_path / lost).unlink()
    with Store.open(tmp_path, NAMESPACE) as store:
        assert all(read_right(store, KEYS, SIZE))


def test_pages_are_found_again_behind_a_damaged_header_and_under_any_clock(tmp_path: Path) -> None:
    segment = small_store(tmp_path)
    second = list(headers(segment))[1]
    fd = os.open(segment, os.O_RDWR)
    os.pwrite(fd, b"?", second.place.offset + 9)
    os.close(fd)
    (tmp_path / "index.log").unlink()
    os.utime(segment, (1e10, 0))
    with Store.open(tmp_path) as store:
        assert read_right(store, KEYS, SIZE) == [key != second.key.decode() for key in KEYS]


def test_a_swapped_page_is_no_page(tmp_path: Path) -> None:
    segment = small_store(tmp_path)
    first, second, _ = headers(segment)
    fd = os.open(segment, os.O_RDWR)
    length = first.place.record_bytes
    os.pwrite(fd, os.pread(fd, length, second.place.offset), first.place.offset)
    os.close(fd)
    with Store.open(tmp_path) as store:
        assert read_right(store, KEYS, SIZE).count(False) == 1
        assert store.stats().failures == {"header": 1}


def test_verify_finds_every_damaged_page(tmp_path: Path) -> None:
    segment = small_store(tmp_path)
    first, second, _ = headers(segment)
    fd = os.open(segment, os.O_RDWR)
    os.pwrite(fd, b"?", first.place.offset + BLOCK_BYTES + SIZE - 1)
    os.pwrite(fd, b"?", second.place.offset + BLOCK_BYTES - 1)
    os.close(fd)
    progress: list[tuple[int, int]] = []
    with Store.open(tmp_path) as store:
        verified = store.verify(lambda done, total: progress.append((done, total)))
        assert (verified.checked_pages, verified.damaged_pages, verified.unread_pages) == (3, 2, 0)
        assert progress[-1] == (3 * SIZE, 3 * SIZE)
        assert store.verify().damaged_pages == 0
        assert store.stats().pages == 1


def test_files_that_are_no_segments_are_left_alone(tmp_path: Path) -> None:
    small_store(tmp_path)
    odd = tmp_path / "segments" / "notes.seg"
    odd.write_text("mine")
    garbage = tmp_path / "segments" / f"{7:016x}.seg"
    garbage.write_bytes(os.urandom(3 * BLOCK_BYTES))
    (tmp_path / "index.log").write_bytes(os.urandom(1000))
    with Store.open(tmp_path) as store:
        assert all(read_right(store, KEYS, SIZE))
    assert odd.read_text() == "mine"
    (tmp_path / "namespace.json").write_bytes(os.urandom(100))
    with Store.open(tmp_path) as store:
        assert store.namespace == NAMESPACE


def test_garbage_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    (tmp_path / "segments" / f"{7:016x}.seg").write_bytes(os.urandom(3 * BLOCK_BYTES))
    with pytest.raises(StoreError, match="holds no store"):
        Store.open(tmp_path)
