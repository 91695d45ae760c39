"""Which pages of a file lie in the page cache, by mincore(2). Linux only."""

import ctypes
import mmap
import os

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


def resident_pages(fd: int, offset: int, length_bytes: int) -> list[bool]:
    """For each page of that part of a file, whether it is resident.

    Linux tells this only of files that the process owns or may write, and calls all others resident.

    Args:
        fd: An open file.
        offset: A multiple of the system's page size.
        length_bytes: 0 or more.

    Raises:
        OSError: the file cannot be mapped.
    """
    vector = (ctypes.c_ubyte * -(-length_bytes // mmap.PAGESIZE))()
    if not length_bytes:
        return []
    # Python's own mmap tells its address only where the mapping is writable.
    address = _libc.mmap(None, length_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
    if address == _MAP_FAILED:
        raise _os_error("mmap")
    try:
        if _libc.mincore(address, length_bytes, vector):
            raise _os_error("mincore")
    finally:
        _libc.munmap(address, length_bytes)
    return [bool(page & 1) for page in vector]


def _os_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
