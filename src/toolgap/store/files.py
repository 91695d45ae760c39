"""Calls to the system that Python's os leaves to the caller to finish, or does not have."""

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from pathlib import Path

_IOVECS = 1024
"""The most buffers one preadv or pwritev takes on Linux."""
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def write_all(fd: int, content: bytes) -> None:
    """Write all of it where the file stands.

    Raises:
        OSError: the disk says no; a part may have been written.
    """
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def pwrite_all(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all of the buffers there, one after the other.

    Raises:
        OSError: the disk says no; a part may have been written.
    """
    left = list(buffers)
    while left:
        written = os.pwritev(fd, left[:_IOVECS], offset)
        offset += written
        left = rest(left, written)


def pread_all(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Read the buffers full from there; returns how many bytes there were. Fewer only at the file's end.

    Raises:
        OSError: the disk says no.
    """
    left, read = list(buffers), 0
    while left:
        count = os.preadv(fd, left[:_IOVECS], offset + read)
        read += count
        left = rest(left, count)
        if not count:
            break
    return read


def rest(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """The buffers less their first bytes."""
    for position, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[position + 1 :]]
        count -= len(buffer)
    return []


def punch(fd: int, offset: int, length: int) -> None:
    """Give the bytes of a range back to the file system: they read as zeros from then on.

    Raises:
        OSError: EOPNOTSUPP if the file system cannot, or what the disk says.
    """
    if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def lock_range(fd: int, offset: int, length: int, *, exclusive: bool) -> bool:
    """Lock a range for this open file until it is closed; False if another open file has it.

    Locks of open files and not of processes, so that threads of one process see each other's too.
    """
    kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, offset, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        # A file system without such locks: what is read is checked, locked or not.
    return True


def lock_file(fd: int) -> bool:
    """Lock a whole file until it is closed; False if another has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk.

    Raises:
        OSError: the disk says no.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
