"""Whether the page cache holds a part of a file, asked without starting a read.

``preadv2`` with ``RWF_NOWAIT`` is no such question: Linux begins to read ahead when the answer is no, and a read around
the page cache that follows then has the disk read everything twice.
"""

import ctypes
import errno
import mmap

from toolgap.mincore import resident_pages

_CACHESTAT = 451
"""The number of cachestat(2), since Linux 6.5, on every architecture but Alpha."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def holds(fd: int, offset: int, length_bytes: int) -> bool:
    """Whether every page of that part of a file is cached; also said where the system does not tell.

    Args:
        fd: An open file.
        offset: A multiple of the system's page size.
        length_bytes: More than 0.
    """
    cached = _cachestat(fd, offset, length_bytes)
    if cached is None:
        return _mincore(fd, offset, length_bytes)
    return cached * mmap.PAGESIZE >= length_bytes


def _cachestat(fd: int, offset: int, length_bytes: int) -> int | None:
    """Cached pages of the part; None where the system has no such call, or forbids it."""
    asked, told = _Range(offset, length_bytes), _Stat()
    if _libc.syscall(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(told), 0):
        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL):
            return None
        raise OSError(number, "cachestat")
    return int(told.cached)


def _mincore(fd: int, offset: int, length_bytes: int) -> bool:
    try:
        return all(resident_pages(fd, offset, length_bytes))
    except OSError:
        return True
