"""The operating system's page cache of storage files: how much of them it holds, dropped or warmed.

A read from storage is a read from the device only if the page cache does not hold the file. Linux only.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

MAX_RESIDENT_SHARE = 0.01
"""Files with no more than this in the page cache count as dropped."""

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
READ_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_MAP_FAILED = ctypes.c_void_p(-1).value


class PageCacheError(RuntimeError):
    """The page cache cannot be made what was asked for; the text says why, and what to do."""


def resident_share(paths: Iterable[Path]) -> float:
    """Share of the files, by pages, that lies in the page cache: 0 to 1, and 0 if there is nothing.

    Files that are gone count for nothing. Linux tells this only of files that the process owns or may
    write, and calls all others resident.
    """
    resident_pages = total_pages = 0
    for file in _opened(paths):
        vector = _residency(file)
        resident_pages += sum(page & 1 for page in vector)
        total_pages += len(vector)
    return resident_pages / total_pages if total_pages else 0.0


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


def _residency(file: FileIO) -> "ctypes.Array[ctypes.c_ubyte]":
    """A byte a page of the file: its lowest bit says whether the page is resident."""
    size_bytes = os.fstat(file.fileno()).st_size
    vector = (ctypes.c_ubyte * -(-size_bytes // mmap.PAGESIZE))()
    if not size_bytes:
        return vector
    # Python's own mmap tells its address only where the mapping is writable.
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == _MAP_FAILED:
        raise _os_error("mmap")
    try:
        if _libc.mincore(address, size_bytes, vector):
            raise _os_error("mincore")
    finally:
        _libc.munmap(address, size_bytes)
    return vector


def _os_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
