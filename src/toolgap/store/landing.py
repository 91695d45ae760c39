"""How the bytes of a strip come into the caller's memory, and are checked there."""

import errno
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, NamedTuple

from toolgap.store import native, pagecache
from toolgap.store.files import lock_range, pread_all
from toolgap.store.options import ReadPath
from toolgap.store.page import address
from toolgap.store.record import BLOCK_BYTES, check_in, filling, is_hole, page_check, payload_digest
from toolgap.store.segments import reason, segment_path
from toolgap.store.strips import RECORDS, Strip

SCRATCH_BYTES = (RECORDS + 1) * BLOCK_BYTES
"""A block for every header of a strip, and one for the filling."""
_SECTOR_BYTES = 512
"""What O_DIRECT asks at least."""


class Fault(StrEnum):
    """Why a page that the index has was not read, where the system gave no error of its own."""

    HEADER = "header"
    """Its header is damaged, or is that of another page."""
    CHECKSUM = "checksum"
    """Its bytes are not those that were written."""
    TRUNCATED = "truncated"
    """Its segment ends before it does."""
    HOLE = "hole"
    """There is nothing: it was evicted meanwhile, or never reached the disk."""
    EVICTED = "evicted"
    """It is being evicted."""
    FAILED = "failed"
    """The caller's memory cannot be read into, or there is a fault in the store: the log says which."""
    CANCELLED = "cancelled"
    """The read was cancelled, or the store closed, first."""


DAMAGE = frozenset({Fault.HEADER, Fault.CHECKSUM, Fault.TRUNCATED, Fault.HOLE, "EIO", "ENOENT"})
"""Faults that stay: reading the page again is no use."""


class _Filled(NamedTuple):
    read_bytes: int
    """Fewer than asked for only at the file's end."""
    digests: Sequence[bytes] | None
    """Of the pages' payloads, if they were made meanwhile."""


class _Memory(NamedTuple):
    """Where the bytes of a strip go."""

    parts: Sequence[memoryview]
    owners: Sequence[int]
    """For each part the page whose payload it is, from 1; 0: nobody's."""
    pages: int

    def filled(self, fd: int, offset: int, piece_bytes: int) -> _Filled:
        """Fill it from the file.

        Raises:
            OSError: the disk says no.
        """
        if (reader := native.load()) is not None:
            return _Filled(*reader.read(fd, offset, self.parts, self.owners, self.pages, piece_bytes))
        return _Filled(pread_all(fd, self.parts, offset), None)


class Landing:
    """Reads strips and checks their pages, in the calling thread."""

    checks_payloads: ClassVar[bool] = True
    """A benchmark leaves it out, to see what it costs; nothing else does."""

    def __init__(self, folder: Path, namespace: bytes, path: ReadPath) -> None:
        self._folder, self._namespace, self._read_path = folder, namespace, path

    def land(self, strip: Strip, scratch: memoryview) -> dict[int, str]:
        """Read and check one strip; returns the faults by the pages' numbers.

        Args:
            strip: What to read, and where to.
            scratch: A thread's own memory, of :data:`SCRATCH_BYTES`, from the start of a block on.
        """
        try:
            return self._check(strip, self._fill(strip, scratch), scratch)
        except OSError as error:
            if len(strip.wanted) == 1:
                blocked = isinstance(error, BlockingIOError)
                return {strip.wanted[0].number: Fault.EVICTED if blocked else reason(error)}
        # One of them is to blame, not all.
        faults: dict[int, str] = {}
        for page in strip.wanted:
            faults.update(self.land(Strip([page], page.place.record_bytes), scratch))
        return faults

    def _fill(self, strip: Strip, scratch: memoryview) -> _Filled:
        parts: list[memoryview] = []
        owners: list[int] = []
        spare = scratch[RECORDS * BLOCK_BYTES :]
        for position, page in enumerate(strip.wanted):
            parts.append(scratch[position * BLOCK_BYTES : (position + 1) * BLOCK_BYTES])
            owners.append(0)
            parts.extend(page.buffers)
            owners.extend([position + 1 if self.checks_payloads else 0] * len(page.buffers))
            if end := filling(page.place.payload_bytes):
                parts.append(spare[:end])
                owners.append(0)
        memory = _Memory(parts, owners, len(strip.wanted))
        first = strip.wanted[0].place
        path = segment_path(self._folder, first.segment)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not lock_range(fd, first.offset, strip.read_bytes, exclusive=False):
                raise BlockingIOError
            if self._through_page_cache(fd, first.offset, strip.read_bytes):
                return memory.filled(fd, first.offset, native.PIECE_BYTES)
            return _around_page_cache(path, fd, memory, first.offset, strip.read_bytes)
        finally:
            os.close(fd)

    def _through_page_cache(self, fd: int, offset: int, length_bytes: int) -> bool:
        if self._read_path is ReadPath.AUTO:
            return pagecache.holds(fd, offset, length_bytes)
        return self._read_path is ReadPath.CACHED

    def _check(self, strip: Strip, filled: _Filled, scratch: memoryview) -> dict[int, str]:
        read_bytes, digests = filled
        faults: dict[int, str] = {}
        start = strip.wanted[0].place.offset
        for position, page in enumerate(strip.wanted):
            # The filling's bytes are nobody's: a segment may end without them.
            if page.place.offset - start + BLOCK_BYTES + page.place.payload_bytes > read_bytes:
                faults[page.number] = Fault.TRUNCATED
                continue
            block = scratch[position * BLOCK_BYTES : (position + 1) * BLOCK_BYTES]
            expected = check_in(block, self._namespace, page.key, page.place)
            if expected is None:
                faults[page.number] = Fault.HOLE if is_hole(block) else Fault.HEADER
                continue
            if not self.checks_payloads:
                continue
            # A page without a byte has no part that could have been hashed.
            digest = digests[position] if digests and page.buffers else payload_digest(page.buffers)
            if page_check(self._namespace, page.key, digest) != expected:
                faults[page.number] = Fault.CHECKSUM
        return faults


def _around_page_cache(path: Path, fd: int, memory: _Memory, offset: int, strip_bytes: int) -> _Filled:
    if offset % _SECTOR_BYTES == 0 and all(map(_is_aligned, memory.parts)):
        try:
            direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            try:
                # At once: the disk is what is waited for.
                return memory.filled(direct, offset, strip_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            finally:
                os.close(direct)
    filled = memory.filled(fd, offset, native.PIECE_BYTES)
    os.posix_fadvise(fd, offset, filled.read_bytes, os.POSIX_FADV_DONTNEED)
    return filled


def _is_aligned(part: memoryview) -> bool:
    return (address(part) | len(part)) % _SECTOR_BYTES == 0
