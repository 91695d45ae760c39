"""A disk that says no: misses and a reason, never an exception."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from stores import NAMESPACE, pages, read_right

from mounts import apart
from toolgap.store.errors import StoreError
from toolgap.store.options import Fsync, Options
from toolgap.store.store import Store

pytestmark = pytest.mark.slow

KEYS = [f"k{number}" for number in range(6)]
HERE = Path(__file__).parent


def test_a_removed_folder_is_misses_until_it_is_back(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with Store.open(path, NAMESPACE) as store:
        store.write(pages(KEYS[:3]))
        path.rename(tmp_path / "elsewhere")
        # Moved, its files are still the store's; removed, they are nobody's.
        shutil.rmtree(tmp_path / "elsewhere")
        assert store.exists(KEYS) == [False] * 6
        assert read_right(store, KEYS) == [False] * 6
        assert store.write(pages(KEYS)) == [False] * 6
        stats = store.stats()
        assert (stats.trouble, stats.failures, stats.pages) == ("gone", {"gone": 6}, 0)
        with Store.open(path, NAMESPACE) as other:
            other.write(pages(["k0"]))
            assert read_right(store, ["k0", "k1"]) == [True, False]
            assert all(store.write(pages(KEYS)))
            assert store.stats().trouble is None
            assert all(read_right(other, KEYS))


def test_a_folder_that_was_moved_away_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store"
    with Store.open(path, NAMESPACE) as store:
        store.write(pages(KEYS))
        path.rename(tmp_path / "elsewhere")
        assert read_right(store, KEYS) == [False] * 6
        stats = store.stats()
        assert (stats.trouble, stats.failures, stats.damaged_pages) == ("gone", {"gone": 6}, 0)
        (record,) = caplog.records
        assert "was removed" in record.message
        (tmp_path / "elsewhere").rename(path)
        assert all(read_right(store, KEYS))


def test_a_folder_that_comes_back_as_another_store_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with Store.open(path, NAMESPACE) as store:
        store.write(pages(KEYS))
        shutil.rmtree(path)
        import msgspec

        other = msgspec.structs.replace(NAMESPACE, weights="others")
        with Store.open(path, other) as theirs:
            assert store.write(pages(KEYS)) == [False] * 6
            assert theirs.write(pages(["k0"])) == [True]
            assert read_right(store, KEYS) == [False] * 6
            assert all(read_right(theirs, ["k0"]))


def test_removed_segments_are_misses(tmp_path: Path) -> None:
    with Store.open(tmp_path, NAMESPACE) as store:
        store.write(pages(KEYS[:3]))
        for segment in tmp_path.glob("segments/*"):
            segment.unlink()
        assert read_right(store, KEYS[:3]) == [False] * 3
        assert store.stats().failures == {"ENOENT": 3}
        assert all(store.write(pages(KEYS)))
        assert all(read_right(store, KEYS))


def test_a_segment_that_cannot_be_read_is_misses(tmp_path: Path) -> None:
    with Store.open(tmp_path, NAMESPACE) as store:
        store.write(pages(KEYS))
    (segment,) = tmp_path.glob("segments/*")
    segment.unlink()
    # Reading where a process has no memory is what EIO is for.
    segment.symlink_to("/proc/self/mem")
    with Store.open(tmp_path) as store:
        assert read_right(store, KEYS) == [False] * 6
        assert store.stats().failures == {"EIO": 6}
        assert all(store.write(pages(KEYS)))
        assert all(read_right(store, KEYS))


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwritev", "write", "fdatasync"])
def test_a_write_that_fails_is_not_written_and_nothing_else(tmp_path: Path, number: int, call: str) -> None:
    name = errno.errorcode[number]
    with Store.open(tmp_path, NAMESPACE, Options(fsync=Fsync.BATCH)) as store:
        assert all(store.write(pages(KEYS[:2])))
        with mock.patch(f"os.{call}", side_effect=OSError(number, os.strerror(number))):
            assert store.write(pages(KEYS[:3])) == [True, True, False]
            assert store.stats().trouble == name
            assert store.stats().failures == {name: 1}
            assert all(read_right(store, KEYS[:2]))
        assert all(store.write(pages(KEYS)))
        assert all(read_right(store, KEYS))
        assert store.stats().trouble is None
        store.check_integrity()
    with Store.open(tmp_path) as store:
        assert all(read_right(store, KEYS))


LIMITED = """
import resource, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from stores import *
keys = ["a", "b", "c"]
right = Path(sys.argv[1]) / "right"
with Store.open(right, NAMESPACE) as store:
    store.write(pages(["old"], 64))
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
failed = 0
for limit in [*range(0, 64 * 6 + 1, 7), *range(4000, 4 * 8192 + 4200, 131)]:
    path = Path(sys.argv[1]) / "full"
    shutil.copytree(right, path)
    with Store.open(path, NAMESPACE) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        written = store.write(pages(keys, 64))
        there = read_right(store, keys, 64)
        assert there == written, (limit, there, written)
        assert sum(store.stats().failures.values()) == written.count(False)
        assert read_right(store, ["old"], 64) == [True]
        failed += written.count(False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with Store.open(path) as store:
        assert read_right(store, ["old", *keys], 64) == [True, *written], limit
        assert all(store.write(pages(keys, 64))), limit
        assert all(read_right(store, keys, 64))
        store.check_integrity()
    shutil.rmtree(path)
assert failed > 50
print("done")
"""


def test_a_disk_full_at_any_byte(fast_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(fast_path), str(HERE)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout == "done\n", result.stderr


MOUNTED = """
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from stores import *
from toolgap.store.errors import StoreError
from toolgap.store.options import Fsync, Options
disk = Path(sys.argv[1])

def mount(*options):
    subprocess.run(["mount", *options, str(disk)], check=True)

mount("-t", "tmpfs", "-o", "size=64k", "tmpfs")
keys = [f"k{n}" for n in range(20)]
with Store.open(disk, NAMESPACE) as store:
    written = store.write(pages(keys))
    assert 0 < sum(written) < 20, written
    assert read_right(store, keys) == written
    assert store.stats().trouble == "ENOSPC" and set(store.stats().failures) == {"ENOSPC"}
    assert store.write(pages(["k19"])) == [False]
with Store.open(disk, NAMESPACE) as store:
    # The disk is as full as before, and yet pages are read, and evicted to make room.
    assert read_right(store, keys) == written
    assert store.gc(2 * 12288).evicted_pages > 0
    assert store.write(pages(["k19"])) == [True]
    assert all(read_right(store, ["k19"]))
mount("-o", "remount,ro")
with Store.open(disk, NAMESPACE, Options(limit_bytes=1 << 20)) as store:
    assert not store.stats().writable
    assert all(read_right(store, ["k19"]))
    assert store.write(pages(["new"])) == [False]
    assert store.stats().failures == {"read-only": 1}
    try:
        store.gc()
    except StoreError as error:
        assert "read-only" in str(error)
    else:
        raise AssertionError
with Store.open(disk, NAMESPACE, Options(limit_bytes=12288)) as store:
    # It is beyond the limit, and nothing can be done about it.
    assert store.stats().used_bytes > 12288
    assert store.write(pages(["new"])) == [False]
    assert store.stats().trouble is None
    assert all(read_right(store, ["k19"]))
try:
    Store.open(disk / "other", NAMESPACE)
except StoreError as error:
    assert "Read-only" in str(error), error
else:
    raise AssertionError
with Store.open(disk, NAMESPACE) as store:
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
    assert read_right(store, ["k19"]) == [False]
    assert (store.stats().trouble, store.stats().failures) == ("gone", {"gone": 1})
print("done")
"""


def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    result = subprocess.run(
        [*apart(tmp_path), sys.executable, "-c", MOUNTED, str(tmp_path), str(HERE)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout == "done\n", result.stderr


def test_a_limit_needs_holes(tmp_path: Path) -> None:
    refusal = OSError(errno.EOPNOTSUPP, "Operation not supported")
    with (
        mock.patch("toolgap.store.store.punch", side_effect=refusal),
        pytest.raises(StoreError, match="needs a file system that can punch holes"),
    ):
        Store.open(tmp_path, NAMESPACE, Options(limit_bytes=1))
    assert not list(tmp_path.glob("probe*"))
