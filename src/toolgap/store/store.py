"""An open store: what a process does with the pages of one folder."""

import errno
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from toolgap.store import recovery
from toolgap.store.batches import BATCH_BYTES, batches
from toolgap.store.catalog import Catalog
from toolgap.store.errors import StoreError
from toolgap.store.files import punch
from toolgap.store.folder import settle
from toolgap.store.index import Entry, Kind
from toolgap.store.landing import DAMAGE, Fault
from toolgap.store.namespace import Namespace
from toolgap.store.options import Options
from toolgap.store.page import Page, memory
from toolgap.store.reader import Reader
from toolgap.store.record import BLOCK_BYTES, KEY_BYTES, Place, identities
from toolgap.store.room import Room
from toolgap.store.segments import key_at
from toolgap.store.stats import Collected, Counters, StoreStats, Verified
from toolgap.store.strips import Wanted, strips
from toolgap.store.writer import Pending, Writer

__all__ = ["Page", "Store", "StoreStats", "memory"]

_logger = logging.getLogger(__name__)


class Store:
    """The pages of one folder, shared with other processes that have it open.

    After :meth:`open` nothing raises for what disk or folder do: a page that cannot be read is a miss, one that
    cannot be written is not written, and :meth:`stats` counts why. All methods may be called from any thread.
    """

    def __init__(self, path: Path, namespace: Namespace, options: Options, *, writable: bool) -> None:
        self.path = path
        self.namespace = namespace
        self._digest = namespace.digest()
        self._options = options
        self._counters = Counters(limit_bytes=options.limit_bytes, writable=writable)
        self._catalog = Catalog(path, self._digest, self._counters, writable=writable)
        self._room = Room(path, self._digest, self._catalog, self._counters)
        self._reader = Reader(path, self._digest, options.read_path, options.readers)
        self._writer = Writer(
            path, namespace, options, self._catalog, self._room, self._counters, self._reader.idle
        )
        # Taken before the catalog's.
        self._write_lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, namespace: Namespace | None = None, options: Options | None = None) -> Self:
        """Open the store at a path; with a namespace, make one if there is none. Close it when done.

        A damaged or lost index is made again from the segments, and what a killed process left is given back.

        Raises:
            StoreError: the store is of another namespace, of an unknown version, or the folder cannot be used.
        """
        options = options or Options()
        own, writable = settle(path, namespace)
        if writable and options.limit_bytes is not None:
            _check_punching(path)
        store = cls(path, own, options, writable=writable)
        try:
            store._catalog.load()
            if writable and recovery.taken_bytes(path) > store._catalog.index.used_bytes + BATCH_BYTES:
                store._room.collect()
        except OSError as error:
            store.close()
            raise StoreError(f"{path} cannot be used: {error.strerror or error}") from None
        return store

    # --- What it holds ---------------------------------------------------------------------------

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which of these pages the store holds, without looking at their bytes."""
        self._catalog.glance()
        return self._catalog.index.holds(identities(self._digest, keys))

    def leading(self, keys: Sequence[str]) -> int:
        """How many pages from the first on the store holds without a gap."""
        held = self.exists(keys)
        return held.index(False) if False in held else len(held)

    def stats(self) -> StoreStats:
        """A snapshot; it waits for nothing."""
        self._catalog.glance()
        index = self._catalog.index
        return msgspec.structs.replace(
            self._counters.snapshot(),
            pages=len(index),
            page_bytes=index.page_bytes,
            used_bytes=index.used_bytes,
            aside_pages=len(index.aside),
        )

    # --- Reading ---------------------------------------------------------------------------------

    def read(self, pages: Sequence[Page], cancel: threading.Event | None = None) -> list[bool]:
        """Read pages straight into the caller's memory; returns, in their order, which are there and right.

        Where it says False, the buffers' content is undefined. The call blocks with the interpreter lock released.
        Requests of several threads take turns, I/O by I/O. Setting `cancel` ends the read within one I/O: pages
        that were not read by then are False.
        """
        started = time.perf_counter()
        self._catalog.glance()
        wanted: list[Wanted] = []
        names = identities(self._digest, [page.key for page in pages])
        missed = sizes = 0
        for number, (page, name) in enumerate(zip(pages, names, strict=True)):
            place = self._catalog.index.get(name)
            if place is None:
                missed += 1
            elif place.payload_bytes != sum(map(len, page.buffers)):
                sizes += 1
            else:
                buffers = [buffer for buffer in page.buffers if buffer]
                wanted.append(Wanted(number, page.key.encode(), place, buffers))
        faults = self._read(wanted, names, cancel)
        right = [page for page in wanted if page.number not in faults]
        self._catalog.use((names[page.number], page.place) for page in right)
        self._counters.fail("size", sizes)
        self._counters.add(
            read_pages=len(right),
            read_bytes=sum(page.place.payload_bytes for page in right),
            missed_pages=missed,
            seconds=time.perf_counter() - started,
        )
        numbers = {page.number for page in right}
        return [number in numbers for number in range(len(pages))]

    def _read(
        self, wanted: Sequence[Wanted], names: Sequence[bytes], cancel: threading.Event | None
    ) -> dict[int, str]:
        """Read them; returns the faults by number, as which `names` are told too. Those that stay are set aside."""
        faults = self._reader.read(strips(wanted, self._options.strip_bytes), cancel)
        if faults:
            self._judge(
                [
                    (Entry(Kind.ASIDE, names[page.number], page.place), faults[page.number])
                    for page in wanted
                    if page.number in faults
                ]
            )
        return faults

    def _judge(self, failed: Sequence[tuple[Entry, str]]) -> None:
        """Count pages that were not read, and set aside those that will not be."""
        for _, fault in failed:
            if fault == Fault.CANCELLED:
                self._counters.add(cancelled_pages=1)
            elif fault not in DAMAGE:
                self._counters.fail(fault)
        if not any(fault in DAMAGE for _, fault in failed):
            return
        damaged: list[Entry] = []
        with self._catalog.lock:
            # First, whether another process evicted them meanwhile, or they went with the folder.
            self._catalog.refresh(thorough=any(fault == "ENOENT" for _, fault in failed))
            if self._catalog.is_gone:
                self._counters.fail("gone", sum(fault in DAMAGE for _, fault in failed))
                return
            for entry, fault in failed:
                if fault in DAMAGE and self._catalog.index.get(entry.identity) == entry.place:
                    is_nothing_left = fault in (Fault.HOLE, "ENOENT")
                    damaged.append(entry._replace(kind=Kind.DROP) if is_nothing_left else entry)
                    self._counters.fail(fault)
                    _logger.warning(
                        "%s: the page at %d of segment %016x is damaged (%s); it is a miss from now on",
                        self.path,
                        entry.place.offset,
                        entry.place.segment,
                        fault,
                    )
            self._catalog.record_or_remember(damaged)
        self._counters.add(damaged_pages=len(damaged))

    # --- Writing ---------------------------------------------------------------------------------

    def write(self, pages: Sequence[Page]) -> list[bool]:
        """Write pages from the caller's memory; returns, in their order, which the store now holds.

        A page that it holds already is not written again. The call blocks until the bytes are written, and forced
        to the disk if the options say so; it steps aside for reads meanwhile.
        """
        started = time.perf_counter()
        held: dict[bytes, Place] = {}
        pending: dict[bytes, Pending] = {}
        names = identities(self._digest, [page.key for page in pages])
        with self._write_lock:
            with self._catalog.lock:
                self._catalog.refresh()
            for number, (page, name) in enumerate(zip(pages, names, strict=True)):
                key = page.key.encode()
                place = self._catalog.index.get(name)
                if place is not None:
                    held[name] = place
                elif len(key) > KEY_BYTES:
                    self._counters.fail("key")
                elif name not in pending:
                    buffers = [buffer for buffer in page.buffers if buffer]
                    pending[name] = Pending(number, key, name, buffers, sum(map(len, buffers)))
            written = self._writer.write(pending.values())
        self._catalog.use(held.items())
        self._counters.add(seconds=time.perf_counter() - started)
        return [name in held or (name in pending and pending[name].number in written) for name in names]

    # --- Upkeep ----------------------------------------------------------------------------------

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Verified:
        """Read and check every page, also while others use the store; those that fail are set aside.

        `progress` is called with the payload bytes that are done, and those there are in all.
        """
        with self._catalog.lock:
            self._catalog.refresh()
            pages = sorted((place, name) for name, place in self._catalog.index.pages())
            total_bytes = self._catalog.index.page_bytes
        verified = Verified()
        for batch in batches(pages, lambda item: item[0].record_bytes):
            self._verify(batch, verified)
            if progress is not None:
                progress(verified.checked_bytes, total_bytes)
        return verified

    def _verify(self, batch: Sequence[tuple[Place, bytes]], verified: Verified) -> None:
        # Of whole blocks of memory, as reading around the page cache asks.
        buffer = memoryview(mmap.mmap(-1, sum(place.record_bytes for place, _ in batch)))
        wanted: list[Wanted] = []
        start = 0
        for number, (place, _) in enumerate(batch):
            # Without a key the read finds what is wrong with the header.
            key = key_at(self.path, place) or b""
            parts = [buffer[start : start + place.payload_bytes]] if place.payload_bytes else []
            wanted.append(Wanted(number, key, place, parts))
            start += place.record_bytes
        faults = self._read(wanted, [name for _, name in batch], None)
        for number, (place, name) in enumerate(batch):
            verified.checked_pages += 1
            verified.checked_bytes += place.payload_bytes
            if faults.get(number) in DAMAGE:
                verified.damaged_pages += 1
            elif number in faults and self._catalog.index.get(name) == place:
                verified.unread_pages += 1

    def gc(self, limit_bytes: int | None = None) -> Collected:
        """Give back the bytes of pages set aside, and those that killed processes left; with a limit, evict to it.

        Segments that a process is appending to keep what that process has not committed.

        Raises:
            StoreError: the folder cannot be written.
        """
        with self._catalog.lock:
            self._catalog.refresh()
            if refusal := self._catalog.refusal():
                raise StoreError(f"{self.path}: nothing can be given back: the store is {refusal}")
        try:
            aside = self._room.drop_aside()
            before = self._catalog.index.used_bytes
            evicted = 0 if limit_bytes is None else self._room.evict(limit_bytes)
            freed = max(0, before - self._catalog.index.used_bytes)
            collected, adopted = self._room.collect()
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror or error}") from None
        return Collected(
            freed_bytes=sum(place.record_bytes for place in aside) + freed + collected,
            aside_pages=len(aside),
            adopted_pages=adopted,
            evicted_pages=evicted,
        )

    def close(self) -> None:
        """End its threads and files. Reads in flight end as misses; further calls find and write nothing."""
        self._reader.close()
        with self._write_lock:
            self._writer.retire()
            self._catalog.close()

    def check_integrity(self) -> None:
        """Its index agrees with itself.

        Raises:
            AssertionError: it does not.
        """
        with self._catalog.lock:
            self._catalog.index.check_integrity()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_punching(path: Path) -> None:
    """That evicted pages can be given back page by page.

    Raises:
        StoreError: they cannot.
    """
    probe = path / f"probe.{os.getpid()}.{threading.get_ident()}"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.truncate(fd, BLOCK_BYTES)
            punch(fd, 0, BLOCK_BYTES)
        finally:
            os.close(fd)
            probe.unlink(missing_ok=True)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            raise StoreError(
                f"{path}: a limit needs a file system that can punch holes, such as ext4, xfs, btrfs or tmpfs"
            ) from None
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(f"{path} cannot be written: {error.strerror or error}") from None
