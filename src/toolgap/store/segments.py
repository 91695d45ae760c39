"""The segment files of a store: each is appended to by the one process that made it, until it is full.

A segment begins with a block that names its store's namespace; records follow, each at a multiple of the block.
"""

import contextlib
import errno
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from toolgap.store.files import lock_file, pwrite_all, sync_folder
from toolgap.store.namespace import Namespace
from toolgap.store.record import BLOCK_BYTES, Header, Place, filling, unpack

_MAGIC = b"TGSEGM\r\n"
_FIELDS = struct.Struct("<8sII")
_VERSION = 2
_CHECK_AT = BLOCK_BYTES - 16
NAMESPACE_BYTES = _CHECK_AT - _FIELDS.size
"""The longest namespace, encoded."""
_FILLING = memoryview(bytes(BLOCK_BYTES))


def reason(error: OSError) -> str:
    """What a system's error is counted as: its name, such as ``EIO``."""
    return errno.errorcode.get(error.errno or 0, "unknown")


def segment_path(folder: Path, segment: int) -> Path:
    """Where a segment lies in a store's folder."""
    return folder / "segments" / f"{segment:016x}.seg"


def segments(folder: Path) -> dict[int, os.stat_result]:
    """The segments of a store, oldest first.

    Raises:
        OSError: the folder cannot be read.
    """
    found = {}
    for path in (folder / "segments").glob("*.seg"):
        try:
            found[int(path.stem, 16)] = path.stat()
        except (ValueError, FileNotFoundError):
            continue
    return dict(sorted(found.items(), key=lambda item: item[1].st_mtime_ns))


def _first_block(namespace: Namespace) -> bytes:
    encoded = namespace.encoded()
    body = (_FIELDS.pack(_MAGIC, _VERSION, len(encoded)) + encoded).ljust(_CHECK_AT, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def namespace_of(path: Path) -> Namespace | None:
    """What a segment's first block names; None if the block is damaged.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        block = os.pread(fd, BLOCK_BYTES, 0)
    finally:
        os.close(fd)
    if block[:8] != _MAGIC or xxhash.xxh3_128_digest(block[:_CHECK_AT]) != block[_CHECK_AT:]:
        return None
    _, _, length = _FIELDS.unpack_from(block)
    try:
        return msgspec.json.decode(block[_FIELDS.size : _FIELDS.size + length], type=Namespace)
    except msgspec.MsgspecError:
        return None


def headers(path: Path) -> Iterator[Header]:
    """The records of a segment whose headers are whole, in order; holes are skipped, damaged headers searched past.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset = BLOCK_BYTES
        while True:
            try:
                data = os.lseek(fd, offset, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:
                    return
                raise
            offset = data // BLOCK_BYTES * BLOCK_BYTES
            header = unpack(os.pread(fd, BLOCK_BYTES, offset).ljust(BLOCK_BYTES, b"\0"))
            if header is not None and header.place.offset == offset:
                yield header
                offset = header.place.end
            else:
                offset += BLOCK_BYTES
    finally:
        os.close(fd)


def key_at(folder: Path, place: Place) -> bytes | None:
    """The key of the page that lies there; None if no whole header says so."""
    try:
        fd = os.open(segment_path(folder, place.segment), os.O_RDONLY | os.O_CLOEXEC)
        try:
            header = unpack(os.pread(fd, BLOCK_BYTES, place.offset).ljust(BLOCK_BYTES, b"\0"))
        finally:
            os.close(fd)
    except OSError:
        return None
    return None if header is None else header.key


class ActiveSegment:
    """The segment that a process appends to: locked, so that nobody takes its unindexed bytes for waste."""

    def __init__(self, folder: Path, namespace: Namespace) -> None:
        """Make it.

        Raises:
            OSError: the disk says no.
        """
        while True:
            self.segment = secrets.randbits(63)
            path = segment_path(folder, self.segment)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            # Between the two calls somebody may have cleared it away as nobody's.
            if lock_file(self._fd) and os.fstat(self._fd).st_nlink:
                break
            os.close(self._fd)
        try:
            pwrite_all(self._fd, [memoryview(_first_block(namespace))], 0)
        except OSError:
            os.close(self._fd)
            path.unlink(missing_ok=True)
            raise
        self.position = BLOCK_BYTES
        self._folder = path.parent
        self._is_named = False

    def is_removed(self) -> bool:
        """Whether somebody removed it: what is appended from then on is lost."""
        return not os.fstat(self._fd).st_nlink

    def next_place(self, payload_bytes: int) -> Place:
        """Where a page would be written."""
        return Place(self.segment, self.position, payload_bytes)

    def append(self, header: bytes, buffers: Sequence[memoryview], place: Place) -> None:
        """Write a record at :meth:`next_place`.

        Raises:
            OSError: the disk says no; a part may have been written.
        """
        end = filling(place.payload_bytes)
        parts = [memoryview(header), *buffers, *([_FILLING[:end]] if end else [])]
        pwrite_all(self._fd, parts, place.offset)
        self.position = place.end

    def back_to(self, position: int) -> None:
        """Give up what was appended from there on, whole or torn."""
        self.position = position
        with contextlib.suppress(OSError):  # what is left of it is no page: no index has it
            os.ftruncate(self._fd, position)

    def force(self) -> None:
        """Have all of it on the disk, its name too.

        Raises:
            OSError: the disk says no.
        """
        os.fdatasync(self._fd)
        if not self._is_named:
            sync_folder(self._folder)
            self._is_named = True

    def close(self) -> None:
        """Unlock it: from now on it is nobody's."""
        os.close(self._fd)
