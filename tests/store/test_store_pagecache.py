import mmap
import os
from pathlib import Path

import pytest

from toolgap.bench.pagecache import drop, resident_share
from toolgap.store import pagecache

PAGE = mmap.PAGESIZE
ASK = {"cachestat": pagecache.holds, "mincore": pagecache._mincore}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * PAGE))
    drop([path])
    return path


@pytest.mark.parametrize("way", ASK)
def test_it_tells_what_is_cached_and_reads_nothing(file: Path, way: str) -> None:
    with file.open("rb", buffering=0) as opened:
        fd = opened.fileno()
        # Otherwise Linux reads more than is asked.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        assert not ASK[way](fd, 0, 64 * PAGE)
        assert resident_share([file]) == 0

        os.pread(fd, 8 * PAGE, 16 * PAGE)
        assert ASK[way](fd, 16 * PAGE, 8 * PAGE)
        assert ASK[way](fd, 17 * PAGE, PAGE // 2)
        assert not ASK[way](fd, 15 * PAGE, 8 * PAGE)
        assert not ASK[way](fd, 0, 64 * PAGE)
        assert resident_share([file]) == 8 / 64
