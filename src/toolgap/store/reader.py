"""Reads in flight: strips of neighbouring records, taken in turns from all requests by a few threads."""

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from toolgap.store import pagecache
from toolgap.store.files import lock_range, pread_all
from toolgap.store.options import ReadPath
from toolgap.store.record import BLOCK_BYTES, Place, check_in, filling, is_hole, payload_check, record_bytes
from toolgap.store.segments import reason, segment_path

_logger = logging.getLogger(__name__)

_RECORDS = 256
"""The most records one I/O reads."""
_BUFFERS = 900
"""The most buffers one I/O fills, below what the system takes."""
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


class Wanted(NamedTuple):
    """One page to read."""

    number: int
    """In the caller's order."""
    key: bytes
    place: Place
    buffers: Sequence[memoryview]


class Strip(NamedTuple):
    """Neighbouring records of one segment, read by one I/O."""

    wanted: Sequence[Wanted]
    read_bytes: int


def strips(wanted: Iterable[Wanted], strip_bytes: int) -> list[Strip]:
    """Pages in the order of the disk, neighbours together."""
    made: list[Strip] = []
    group: list[Wanted] = []
    group_bytes = buffers = 0
    behind = (-1, -1)
    for page in sorted(wanted, key=lambda page: page.place):
        segment, offset, payload_bytes = page.place
        size, count = record_bytes(payload_bytes), len(page.buffers) + 2
        fits = (
            group
            and behind == (segment, offset)
            and group_bytes + size <= strip_bytes
            and len(group) < _RECORDS
            and buffers + count <= _BUFFERS
        )
        if group and not fits:
            made.append(Strip(group, group_bytes))
            group, group_bytes, buffers = [], 0, 0
        group.append(page)
        group_bytes += size
        buffers += count
        behind = segment, offset + size
    if group:
        made.append(Strip(group, group_bytes))
    return made


class _Request:
    def __init__(self, made: Iterable[Strip], cancel: threading.Event | None) -> None:
        self.strips = deque(made)
        self.cancel = cancel
        self.running = 0
        self.faults: dict[int, str] = {}
        self.done = threading.Event()

    def drop(self) -> None:
        """Let what was not begun be cancelled."""
        for strip in self.strips:
            self.faults.update((page.number, Fault.CANCELLED) for page in strip.wanted)
        self.strips.clear()


class Reader:
    """The threads that read. A request's strips run side by side; between requests they alternate."""

    def __init__(self, folder: Path, namespace: bytes, path: ReadPath, threads: int) -> None:
        self._folder, self._namespace, self._read_path = folder, namespace, path
        self._threads = threads
        self._started: list[threading.Thread] = []
        self._requests: deque[_Request] = deque()
        self._work = threading.Condition()
        self._active = 0
        self._closed = False
        self.idle = threading.Event()
        """Set while there is nothing to read."""
        self.idle.set()

    def read(self, made: Sequence[Strip], cancel: threading.Event | None) -> dict[int, str]:
        """Read them; returns the faults by the pages' numbers."""
        request = _Request(made, cancel)
        with self._work:
            if self._closed:
                request.drop()
            if not request.strips:
                return request.faults
            while len(self._started) < min(self._threads, len(made) + self._active):
                thread = threading.Thread(target=self._run, name="toolgap-store-read", daemon=True)
                thread.start()
                self._started.append(thread)
            self._active += 1
            self.idle.clear()
            self._requests.append(request)
            self._work.notify_all()
        request.done.wait()
        with self._work:
            self._active -= 1
            if not self._active:
                self.idle.set()
        return request.faults

    def _run(self) -> None:
        scratch = memoryview(mmap.mmap(-1, (_RECORDS + 1) * BLOCK_BYTES))
        while True:
            with self._work:
                while not self._requests:
                    if self._closed:
                        return
                    self._work.wait()
                request = self._requests.popleft()
                if self._closed or (request.cancel is not None and request.cancel.is_set()):
                    request.drop()
                if not request.strips:
                    if not request.running:
                        request.done.set()
                    continue
                strip = request.strips.popleft()
                request.running += 1
                if request.strips:
                    self._requests.append(request)
            try:
                faults = self.read_strip(strip, scratch)
            except Exception:
                # Memory that cannot be written, say. The thread goes on, and nobody waits for ever.
                _logger.exception("toolgap store: %d pages were not read", len(strip.wanted))
                faults = {page.number: Fault.FAILED for page in strip.wanted}
            with self._work:
                request.faults.update(faults)
                request.running -= 1
                if not request.strips and not request.running:
                    request.done.set()
            # The caller's memory is the caller's again.
            del request, strip

    def read_strip(self, strip: Strip, scratch: memoryview) -> dict[int, str]:
        """Read and check one strip, in this thread; returns the faults by the pages' numbers.

        `scratch` is a thread's own: a block for every header, and one for the filling.
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
            faults.update(self.read_strip(Strip([page], page.place.record_bytes), scratch))
        return faults

    def _fill(self, strip: Strip, scratch: memoryview) -> int:
        """Read a strip's bytes; returns how many there were."""
        parts: list[memoryview] = []
        spare = scratch[_RECORDS * BLOCK_BYTES :]
        for position, page in enumerate(strip.wanted):
            parts.append(scratch[position * BLOCK_BYTES : (position + 1) * BLOCK_BYTES])
            parts.extend(page.buffers)
            if end := filling(page.place.payload_bytes):
                parts.append(spare[:end])
        first = strip.wanted[0].place
        path = segment_path(self._folder, first.segment)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if not lock_range(fd, first.offset, strip.read_bytes, exclusive=False):
                raise BlockingIOError
            if self._read_path is ReadPath.CACHED:
                return pread_all(fd, parts, first.offset)
            if self._read_path is ReadPath.AUTO and pagecache.holds(fd, first.offset, strip.read_bytes):
                return pread_all(fd, parts, first.offset)
            return _around_page_cache(path, fd, parts, first.offset)
        finally:
            os.close(fd)

    def _check(self, strip: Strip, read_bytes: int, scratch: memoryview) -> dict[int, str]:
        faults: dict[int, str] = {}
        start = strip.wanted[0].place.offset
        for position, page in enumerate(strip.wanted):
            # The filling's bytes are nobody's: a segment may end without them.
            if page.place.offset - start + BLOCK_BYTES + page.place.payload_bytes > read_bytes:
                faults[page.number] = Fault.TRUNCATED
                continue
            block = scratch[position * BLOCK_BYTES : (position + 1) * BLOCK_BYTES]
            check = check_in(block, self._namespace, page.key, page.place)
            if check is None:
                faults[page.number] = Fault.HOLE if is_hole(block) else Fault.HEADER
            elif payload_check(self._namespace, page.key, page.buffers) != check:
                faults[page.number] = Fault.CHECKSUM
        return faults

    def close(self) -> None:
        """End the threads; what was not begun is cancelled."""
        with self._work:
            self._closed = True
            for request in self._requests:
                request.drop()
            self._work.notify_all()
        for thread in self._started:
            thread.join()


def _around_page_cache(path: Path, fd: int, parts: Sequence[memoryview], offset: int) -> int:
    if offset % _SECTOR_BYTES == 0 and all(map(_is_aligned, parts)):
        try:
            direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            try:
                return pread_all(direct, parts, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            finally:
                os.close(direct)
    read = pread_all(fd, parts, offset)
    os.posix_fadvise(fd, offset, read, os.POSIX_FADV_DONTNEED)
    return read


def _is_aligned(part: memoryview) -> bool:
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(part))
    return (address | len(part)) % _SECTOR_BYTES == 0
