"""The operating system's page cache of storage files: how much of them it holds, dropped or warmed.

A read from storage is a read from the device only if the page cache does not hold the file. Linux only.
"""

import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

from toolgap.mincore import resident_pages

MAX_RESIDENT_SHARE = 0.01
"""Files with no more than this in the page cache count as dropped."""

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
READ_BYTES = 1 << 20


class PageCacheError(RuntimeError):
    """The page cache cannot be made what was asked for; the text says why, and what to do."""


def resident_share(paths: Iterable[Path]) -> float:
    """Share of the files, by pages, that lies in the page cache: 0 to 1, and 0 if there is nothing.

    Files that are gone count for nothing. See :func:`toolgap.mincore.resident_pages` for what Linux tells.
    """
    resident = total_pages = 0
    for file in _opened(paths):
        pages = resident_pages(file.fileno(), 0, os.fstat(file.fileno()).st_size)
        resident += sum(pages)
        total_pages += len(pages)
    return resident / total_pages if total_pages else 0.0


def drop(paths: Iterable[Path]) -> None:
    """Take the files out of the page cache, after writing back what is not on the device yet.

    If asking for these files alone is not enough, the page cache of the whole machine is dropped,
    where that is permitted.

    Raises:
        PageCacheError: more than ``MAX_RESIDENT_SHARE`` of them is still resident.
    """
    paths = list(paths)
    for file in _opened(paths):
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_share(paths) <= MAX_RESIDENT_SHARE:
        return
    try:
        DROP_CACHES.write_text("1")
        tried = f"writing to {DROP_CACHES} did not help"
    except OSError as error:
        tried = f"{DROP_CACHES} cannot be written ({error.strerror})"
    share = resident_share(paths)
    if share > MAX_RESIDENT_SHARE:
        raise PageCacheError(
            f"{share:.0%} of the storage files stay in the page cache: {tried}. Run as root, with the files on "
            "a disk (tmpfs keeps them in memory) and no process mapping them, or choose the warm page cache"
        )


def warm(paths: Iterable[Path]) -> None:
    """Read every file once, which leaves it in the page cache as far as memory allows."""
    buffer = bytearray(READ_BYTES)
    for file in _opened(paths):
        while file.readinto(buffer):
            pass


def _opened(paths: Iterable[Path]) -> Iterator[FileIO]:
    """Each file that is still there, open for reading until the next is asked for."""
    for path in paths:
        try:
            file = path.open("rb", buffering=0)
        except FileNotFoundError:
            continue
        with file:
            yield file
