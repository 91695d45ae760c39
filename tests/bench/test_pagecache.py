import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from toolgap.bench import pagecache
from toolgap.bench.machine import hardware
from toolgap.bench.pagecache import PageCacheError, drop, resident_share, warm

PAGE_BYTES = mmap.PAGESIZE
FILE_BYTES = 3 << 20


@pytest.fixture(autouse=True)
def drop_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the kernel's switch, which is the whole machine's."""
    switch = tmp_path / "drop_caches"
    monkeypatch.setattr(pagecache, "DROP_CACHES", switch)
    return switch


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.bin" for number in range(2)]
    for path in paths:
        path.write_bytes(os.urandom(FILE_BYTES))
    return paths


@pytest.fixture
def droppable(files: list[Path]) -> list[Path]:
    filesystem = hardware(files[0])["storage"]["filesystem"]
    if filesystem not in ("btrfs", "ext4", "f2fs", "overlay", "xfs"):
        pytest.skip(f"files may not leave the page cache on {filesystem}")
    return files


@contextmanager
def mapped(path: Path) -> Iterator[None]:
    """Keeps a file in the page cache: Linux does not drop pages that a process has mapped."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert view[:]
        yield


def test_written_files_are_resident_until_dropped_and_again_once_warmed(droppable: list[Path]) -> None:
    droppable[0].write_bytes(os.urandom(FILE_BYTES))
    assert resident_share(droppable) == 1.0
    drop(droppable)
    assert resident_share(droppable) <= pagecache.MAX_RESIDENT_SHARE
    warm(droppable)
    assert resident_share(droppable) == 1.0


def test_dropping_loses_nothing_that_was_not_on_the_device_yet(droppable: list[Path]) -> None:
    content = os.urandom(FILE_BYTES + 100)
    droppable[0].write_bytes(content)
    drop(droppable)
    assert droppable[0].read_bytes() == content


def test_the_share_is_by_pages_not_by_files(droppable: list[Path], tmp_path: Path) -> None:
    drop(droppable)
    small = tmp_path / "small.bin"
    small.write_bytes(b"x" * (PAGE_BYTES + 1))
    large_pages = len(droppable) * FILE_BYTES // PAGE_BYTES
    left_pages = resident_share(droppable) * large_pages
    assert resident_share([*droppable, small]) == pytest.approx((left_pages + 2) / (large_pages + 2))


def test_a_share_below_the_limit_counts_as_dropped(
    droppable: list[Path], tmp_path: Path, drop_caches: Path
) -> None:
    small = tmp_path / "small.bin"
    small.write_bytes(b"x" * PAGE_BYTES)
    with mapped(small):
        drop([*droppable, small])
        assert 0 < resident_share([*droppable, small]) <= pagecache.MAX_RESIDENT_SHARE
    assert not drop_caches.exists()


def test_nothing_is_resident_of_nothing(tmp_path: Path) -> None:
    empty, vanished = tmp_path / "empty.bin", tmp_path / "vanished.bin"
    empty.touch()
    assert resident_share([]) == resident_share([empty]) == resident_share([vanished]) == 0.0


def test_empty_and_vanished_files_do_not_count_beside_others(files: list[Path], tmp_path: Path) -> None:
    empty, vanished = tmp_path / "empty.bin", tmp_path / "vanished.bin"
    empty.touch()
    paths = [vanished, empty, *files]
    warm(paths)
    assert resident_share(paths) == 1.0
    with mapped(files[0]), mapped(files[1]), pytest.raises(PageCacheError):
        drop(paths)
    drop([vanished, empty])


def test_paths_may_come_from_an_iterator(files: list[Path]) -> None:
    with mapped(files[0]), mapped(files[1]), pytest.raises(PageCacheError):
        drop(iter(files))
    assert resident_share(iter(files)) == 1.0


def test_files_that_stay_are_an_error_that_says_what_to_do(files: list[Path], drop_caches: Path) -> None:
    with mapped(files[0]), pytest.raises(PageCacheError) as caught:
        drop(files[:1])
    assert drop_caches.read_text() == "1"
    assert str(caught.value).startswith("100% of the storage files stay in the page cache: writing to ")
    assert "did not help" in str(caught.value)
    assert "Run as root" in str(caught.value)
    assert "choose the warm page cache" in str(caught.value)


def test_a_switch_that_may_not_be_written_is_named_in_the_error(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pagecache, "DROP_CACHES", tmp_path)
    with mapped(files[0]), pytest.raises(PageCacheError, match=r"cannot be written \(Is a directory\)"):
        drop(files[:1])


def test_the_whole_page_cache_is_dropped_where_the_files_alone_are_not(
    droppable: list[Path], drop_caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advise = os.posix_fadvise

    def advise_nothing(descriptor: int, offset: int, length: int, advice: int) -> None:
        return

    def write(switch: Path, text: str) -> int:
        assert (switch, text) == (drop_caches, "1")
        for path in droppable:
            with path.open("rb") as file:
                advise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return len(text)

    monkeypatch.setattr(os, "posix_fadvise", advise_nothing)
    monkeypatch.setattr(Path, "write_text", write)
    warm(droppable)
    drop(droppable)
    assert resident_share(droppable) <= pagecache.MAX_RESIDENT_SHARE
