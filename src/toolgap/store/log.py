"""The index on disk: a log of entries of fixed size, each with its checksum, appended to by all processes.

A log and no database, because nothing of a damaged one may kill the process: it is read, never mapped, an entry
that fails its check is skipped, and what is lost is found again in the segments. A lock file orders the appends.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import xxhash

from toolgap.store.files import sync_folder, write_all
from toolgap.store.index import Entry, Kind
from toolgap.store.record import Place

_ENTRY = struct.Struct("<IIQQQ16s8xQ")
_HEAD = struct.Struct("<8sI32s12xQ")
_MAGIC = b"TGINDEX\n"
_VERSION = 1
ENTRY_BYTES = _ENTRY.size
_CHECKED_BYTES = ENTRY_BYTES - 8
_KINDS = {kind.value: kind for kind in Kind}
_CHUNK_BYTES = ENTRY_BYTES << 14


class LogGoneError(OSError):
    """The log, or the whole folder, was removed."""


class Tail(NamedTuple):
    """What was appended since the last look."""

    entries: Iterable[Entry]
    is_anew: bool
    """The log was replaced: the entries are all there are, not only the latest."""


def pack(entry: Entry) -> bytes:
    """The entry's 64 bytes."""
    body = _ENTRY.pack(entry.kind, 0, *entry.place, entry.identity, 0)[:_CHECKED_BYTES]
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


def _head(namespace: bytes) -> bytes:
    body = _HEAD.pack(_MAGIC, _VERSION, namespace, 0)[:_CHECKED_BYTES]
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")


class Log:
    """The log of one folder. Callers serialise their calls, :meth:`changed` apart."""

    def __init__(self, folder: Path, namespace: bytes, *, writable: bool) -> None:
        self._path = folder / "index.log"
        self._lock_path = folder / "lock"
        self._head = _head(namespace)
        self._writable = writable
        self._fd = -1
        self._position = 0
        self.bad_entries = 0
        """Entries of the present log that failed their check."""
        self.entries = 0
        """Entries of the present log that were read."""

    @property
    def writable(self) -> bool:
        """Whether it may be appended to."""
        return self._writable

    def changed(self) -> bool:
        """Whether :meth:`tail` would find anything; cheap.

        Raises:
            OSError: it cannot be told.
        """
        if self._fd < 0:
            return True
        state = os.fstat(self._fd)
        return state.st_nlink == 0 or state.st_size // ENTRY_BYTES * ENTRY_BYTES != self._position

    def look_again(self) -> None:
        """Have :meth:`changed` see also that the folder was moved, or that another was mounted over it."""
        if self._fd < 0:
            return
        try:
            is_same = os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except OSError:
            is_same = False
        if not is_same:
            self.close()

    @contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[None]:
        """Hold the folder's lock: only then is the log appended to or replaced.

        Raises:
            BlockingIOError: it is taken, and `wait` is false.
            LogGoneError: the folder was removed.
            OSError: it cannot be taken.
        """
        try:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError as error:
            raise LogGoneError(*error.args) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield
        finally:
            os.close(fd)

    def tail(self) -> Tail:
        """What was appended since the last call, or all of it if the log was replaced or cut.

        Raises:
            LogGoneError: there is no log, or none of this namespace.
            OSError: it cannot be read.
        """
        is_anew = self._fd < 0
        if not is_anew:
            state = os.fstat(self._fd)
            is_anew = state.st_nlink == 0 or state.st_size < self._position
        if is_anew:
            self._open()
        return Tail(self._read(), is_anew)

    def _open(self) -> None:
        self.close()
        flags = (os.O_RDWR | os.O_APPEND if self._writable else os.O_RDONLY) | os.O_CLOEXEC
        try:
            fd = os.open(self._path, flags)
        except FileNotFoundError as error:
            raise LogGoneError(*error.args) from None
        try:
            head = os.pread(fd, ENTRY_BYTES, 0)
        except OSError:
            os.close(fd)
            raise
        if head != self._head:
            os.close(fd)
            raise LogGoneError(errno.EBADMSG, "the index is damaged")
        self._fd, self._position, self.bad_entries, self.entries = fd, ENTRY_BYTES, 0, 0

    def _read(self) -> Iterator[Entry]:
        # Half of the time that a million of these takes is saved by not going through their constructors.
        check, unpack, new = xxhash.xxh3_64_intdigest, _ENTRY.unpack_from, tuple.__new__
        while True:
            chunk = memoryview(os.pread(self._fd, _CHUNK_BYTES, self._position))
            whole = len(chunk) // ENTRY_BYTES * ENTRY_BYTES
            if not whole:
                return
            self._position += whole
            self.entries += whole // ENTRY_BYTES
            for start in range(0, whole, ENTRY_BYTES):
                number, _, segment, offset, payload_bytes, identity, expected = unpack(chunk, start)
                kind = _KINDS.get(number)
                if kind is None or check(chunk[start : start + _CHECKED_BYTES]) != expected:
                    self.bad_entries += 1
                else:
                    yield new(Entry, (kind, identity, new(Place, (segment, offset, payload_bytes))))

    def append(self, entries: Sequence[Entry]) -> None:
        """Append entries, all or none; under :meth:`locked`, once :meth:`tail` was read. They count as read.

        Raises:
            LogGoneError: the log was removed.
            OSError: the disk says no.
        """
        state = os.fstat(self._fd)
        if state.st_nlink == 0:
            raise LogGoneError(errno.ENOENT, "the index was removed")
        # What a process left that was killed while it appended.
        whole = state.st_size // ENTRY_BYTES * ENTRY_BYTES
        if whole != state.st_size:
            os.ftruncate(self._fd, whole)
        try:
            write_all(self._fd, b"".join(map(pack, entries)))
        except OSError:
            os.ftruncate(self._fd, whole)
            raise
        self._position = whole + len(entries) * ENTRY_BYTES
        self.entries += len(entries)

    def replace(self, entries: Iterable[Entry]) -> None:
        """Write the log anew, whole or not at all; under :meth:`locked`. It counts as read.

        Raises:
            OSError: the disk says no. The old log is as it was.
        """
        draft = self._path.with_suffix(".new")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(fd, self._head)
            batch: list[bytes] = []
            for entry in entries:
                batch.append(pack(entry))
                if len(batch) == 1 << 14:
                    write_all(fd, b"".join(batch))
                    batch.clear()
            write_all(fd, b"".join(batch))
            os.fsync(fd)
            draft.replace(self._path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        sync_folder(self._path.parent)
        self._open()
        whole = os.fstat(self._fd).st_size
        self._position, self.entries = whole, whole // ENTRY_BYTES - 1

    def forcing(self) -> Callable[[], None]:
        """What forces the log as it is now to the disk, called once, also while it is appended to or replaced.

        Raises:
            OSError: there is no log; and when called, the disk says no.
        """
        fd = os.dup(self._fd)

        def force() -> None:
            try:
                os.fdatasync(fd)
            finally:
                os.close(fd)

        return force

    def close(self) -> None:
        """Give its file back; a later :meth:`tail` opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
