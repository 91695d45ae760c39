"""An open store: what a process does with the pages of one folder."""

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import msgspec

from toolgap.store import recovery
from toolgap.store.errors import StoreError
from toolgap.store.files import punch
from toolgap.store.folder import settle
from toolgap.store.index import Entry, Index, Kind
from toolgap.store.log import Log, LogGoneError
from toolgap.store.namespace import Namespace
from toolgap.store.options import MIB, Fsync, Options
from toolgap.store.page import Page, memory
from toolgap.store.reader import DAMAGE, Fault, Reader, Wanted, reason, strips
from toolgap.store.record import (
    BLOCK_BYTES,
    KEY_BYTES,
    Header,
    Place,
    filling,
    identity,
    pack,
    payload_check,
)
from toolgap.store.segments import (
    ActiveSegment,
    Claims,
    Idle,
    clear,
    free,
    key_at,
    segments,
)
from toolgap.store.stats import Collected, Counters, StoreStats, Verified

__all__ = ["Page", "Store", "StoreStats", "memory"]

_BATCH_BYTES = 64 * MIB
"""What is written between two commits to the index, and the slack in what the folder may take."""
_TOUCHES = 1024
"""Uses that are kept in memory before the log gets them."""
_SPARE_ENTRIES = 1 << 16
"""Entries that the log may have beyond two a page before it is written anew."""
_STEP_ASIDE_S = 0.02
"""How long a write waits for reads, a page: it is slowed by them, never stopped."""

_SEGMENTS = 256
"""How many segments are open at once while bytes are given back."""

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class _Pending(NamedTuple):
    """One page to write."""

    number: int
    key: bytes
    identity: bytes
    buffers: Sequence[memoryview]
    payload_bytes: int

    @property
    def record_bytes(self) -> int:
        return BLOCK_BYTES + self.payload_bytes + filling(self.payload_bytes)


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
        self._index = Index()
        self._log = Log(path, self._digest, writable=writable)
        self._reader = Reader(path, self._digest, options.read_path, options.readers)
        self._active: ActiveSegment | None = None
        self._touched: dict[bytes, Place] = {}
        self._counters = Counters(limit_bytes=options.limit_bytes, writable=writable)
        self._touch_lock = threading.Lock()
        self._closed = False
        self._is_gone = False
        # Taken in this order, and the folder's lock last.
        self._write_lock = threading.Lock()
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: Path, namespace: Namespace | None = None, options: Options | None = None) -> Self:
        """Open the store at a path; with a namespace, make one if there is none. Close it when done.

        A damaged or lost index is made again from the segments.

        Raises:
            StoreError: the store is of another namespace, of an unknown version, or the folder cannot be used.
        """
        options = options or Options()
        own, writable = settle(path, namespace)
        if writable and options.limit_bytes is not None:
            _check_punching(path)
        store = cls(path, own, options, writable=writable)
        try:
            store._load()
        except OSError as error:
            store.close()
            raise StoreError(f"{path} cannot be read: {error.strerror or error}") from None
        return store

    # --- What it holds ---------------------------------------------------------------------------

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which of these pages the store holds, without looking at their bytes."""
        self._glance()
        index, digest = self._index, self._digest
        return [identity(digest, key.encode()) in index for key in keys]

    def leading(self, keys: Sequence[str]) -> int:
        """How many pages from the first on the store holds without a gap."""
        self._glance()
        index, digest = self._index, self._digest
        for position, key in enumerate(keys):
            if identity(digest, key.encode()) not in index:
                return position
        return len(keys)

    def stats(self) -> StoreStats:
        """A snapshot."""
        with self._lock:
            self._refresh()
            return msgspec.structs.replace(
                self._counters.snapshot(),
                pages=len(self._index),
                page_bytes=self._index.page_bytes,
                used_bytes=self._index.used_bytes,
                aside_pages=len(self._index.aside),
            )

    # --- Reading ---------------------------------------------------------------------------------

    def read(self, pages: Sequence[Page], cancel: threading.Event | None = None) -> list[bool]:
        """Read pages straight into the caller's memory; returns, in their order, which are there and right.

        Where it says False, the buffers' content is undefined. The call blocks with the interpreter lock released.
        Requests of several threads take turns, I/O by I/O. Setting `cancel` ends the read within one I/O: pages
        that were not read by then are False.
        """
        started = time.perf_counter()
        self._glance()
        wanted: list[Wanted] = []
        identities: dict[int, bytes] = {}
        done = [False] * len(pages)
        missed = sizes = 0
        for number, page in enumerate(pages):
            key = page.key.encode()
            name = identity(self._digest, key)
            place = self._index.get(name)
            if place is None:
                missed += 1
            elif place.payload_bytes != sum(map(len, page.buffers)):
                sizes += 1
            else:
                wanted.append(Wanted(number, key, place, [buffer for buffer in page.buffers if buffer]))
                identities[number] = name
        faults = self._read(wanted, identities, cancel)
        read_bytes = 0
        with self._touch_lock:
            for page_read in wanted:
                if page_read.number not in faults:
                    done[page_read.number] = True
                    read_bytes += page_read.place.payload_bytes
                    self._touched[identities[page_read.number]] = page_read.place
            is_much = len(self._touched) >= _TOUCHES
        if is_much:
            self._flush_touches(wait=False)
        self._counters.fail("size", sizes)
        self._counters.add(
            read_pages=len(wanted) - len(faults),
            read_bytes=read_bytes,
            missed_pages=missed,
            seconds=time.perf_counter() - started,
        )
        return done

    def _read(
        self, wanted: Sequence[Wanted], identities: dict[int, bytes], cancel: threading.Event | None
    ) -> dict[int, str]:
        """Read them; returns the faults by number. Those that stay are set aside."""
        faults = self._reader.read(strips(wanted, self._options.strip_bytes), cancel)
        if faults:
            self._judge(
                [
                    (Entry(Kind.ASIDE, identities[page.number], page.place), faults[page.number])
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
        with self._lock:
            # First, whether another process evicted them meanwhile.
            self._refresh()
            for entry, fault in failed:
                if fault in DAMAGE and self._index.get(entry.identity) == entry.place:
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
            self._record_or_remember(damaged)
        self._counters.add(damaged_pages=len(damaged))

    # --- Writing ---------------------------------------------------------------------------------

    def write(self, pages: Sequence[Page]) -> list[bool]:
        """Write pages from the caller's memory; returns, in their order, which the store now holds.

        A page that it holds already is not written again. The call blocks until the bytes are written, and forced
        to the disk if the options say so; it steps aside for reads meanwhile.
        """
        started = time.perf_counter()
        done = [False] * len(pages)
        with self._write_lock:
            pending: dict[bytes, _Pending] = {}
            repeats: dict[int, int] = {}
            with self._lock:
                self._refresh()
                for number, page in enumerate(pages):
                    key = page.key.encode()
                    name = identity(self._digest, key)
                    place = self._index.get(name)
                    if place is not None:
                        done[number] = True
                        with self._touch_lock:
                            self._touched[name] = place
                    elif name in pending:
                        repeats[number] = pending[name].number
                    elif len(key) > KEY_BYTES:
                        self._counters.fail("key")
                    else:
                        buffers = [buffer for buffer in page.buffers if buffer]
                        pending[name] = _Pending(number, key, name, buffers, sum(map(len, buffers)))
            for batch in _batches(pending.values(), lambda page: page.record_bytes):
                for number in self._write_batch(batch):
                    done[number] = True
            for number, first in repeats.items():
                done[number] = done[first]
        self._counters.add(seconds=time.perf_counter() - started)
        return done

    def _write_batch(self, batch: Sequence[_Pending]) -> list[int]:
        """Write pages and commit them; returns the numbers of those that the store now holds."""
        if refusal := self._cannot_write():
            self._counters.fail(refusal, len(batch))
            return []
        written: list[tuple[_Pending, Place]] = []
        failure: OSError | None = None
        try:
            if not self._make_room(sum(page.record_bytes for page in batch)):
                self._counters.fail("limit", len(batch))
                return []
            active = self._segment()
            start = active.position
        except OSError as error:
            self._write_failed(error, len(batch))
            return []
        try:
            for page in batch:
                self._reader.idle.wait(_STEP_ASIDE_S)
                place = active.next_place(page.payload_bytes)
                check = payload_check(self._digest, page.key, page.buffers)
                header = pack(Header(page.key, page.identity, self._digest, place, check))
                active.append(header, page.buffers, page.payload_bytes)
                written.append((page, place))
        except OSError as error:
            failure = error
            active.back_to(active.position)
        if written:
            try:
                self._commit(active, written)
            except OSError as error:
                failure = failure or error
                active.back_to(start)
                written = []
        if failure is not None:
            self._write_failed(failure, len(batch) - len(written))
        else:
            self._counters.trouble(None)
        return [page.number for page, _ in written]

    def _commit(self, active: ActiveSegment, written: Sequence[tuple[_Pending, Place]]) -> None:
        """Have written pages in the index."""
        forced = self._options.fsync is Fsync.BATCH
        if forced:
            active.force()
        puts = [Entry(Kind.PUT, page.identity, place) for page, place in written]
        with self._lock:
            self._record(puts)
            # Another process may have put the same page first: its own stands.
            losers = [put.place for put in puts if self._index.get(put.identity) != put.place]
            log = self._log.duplicate() if forced else None
        if log is not None:
            try:
                os.fdatasync(log)
            finally:
                os.close(log)
        self._counters.add(
            written_pages=len(puts) - len(losers),
            written_bytes=sum(put.place.payload_bytes for put in puts if put.place not in losers),
        )
        if losers:
            self._free(losers)

    def _cannot_write(self) -> str | None:
        if self._closed:
            return "closed"
        if not self._log.writable:
            return "read-only"
        if self._is_gone:
            return "gone"
        return None

    def _segment(self) -> ActiveSegment:
        active = self._active
        if active is not None and (active.position >= self._options.segment_bytes or active.is_removed()):
            self._retire()
        if self._active is None:
            self._active = ActiveSegment(self.path, self.namespace)
        return self._active

    def _retire(self) -> None:
        """Append no more to the segment."""
        if self._active is not None:
            segment = self._active.segment
            self._active.close()
            self._active = None
            self._remove_empty([segment])

    def _write_failed(self, error: OSError, pages: int) -> None:
        gone = isinstance(error, LogGoneError)
        name = "gone" if gone else reason(error)
        self._counters.fail(name, pages)
        if self._counters.trouble(name):
            _logger.warning("%s: pages were not written: %s", self.path, error.strerror or error)
        if name not in ("ENOSPC", "EDQUOT"):
            # The segment may be what is broken.
            self._retire()

    # --- Room ------------------------------------------------------------------------------------

    def _make_room(self, size_bytes: int) -> bool:
        """Evict what is needed to add so much; False if that cannot be."""
        limit = self._options.limit_bytes
        if limit is None:
            return True
        if size_bytes > limit:
            return False
        with self._lock:
            if self._index.used_bytes + size_bytes <= limit:
                return True
        return self._evict(limit - size_bytes)[0]

    def _evict(self, limit_bytes: int) -> tuple[bool, int]:
        """Drop the least recently used until no more than so much is used: whether it is so, and how many pages.

        Pages that are being read, here or in another process, are spared.
        """
        with self._lock:
            self._flush_touches(wait=True)
            pages = len(self._index)
            wanted = self._index.oldest()
            self._drop(wanted, self._index.used_bytes - limit_bytes)
            evicted = pages - len(self._index)
            is_enough = self._index.used_bytes <= limit_bytes
        self._counters.add(evicted_pages=evicted)
        return is_enough, evicted

    def _drop(self, entries: Iterable[Entry], size_bytes: int) -> list[Place]:
        """Drop records, in this order, until so much is freed; under the lock. Those that are being read are spared."""
        victims: list[Entry] = []
        with Claims(self.path) as claims:
            for entry in entries:
                if size_bytes <= 0:
                    break
                if claims.claim(entry.place):
                    victims.append(entry)
                    size_bytes -= entry.place.record_bytes
            self._record_or_remember(victims)
            # Claimed until they are gone: a record that no index has is not to be taken for a forgotten one.
            self._free([entry.place for entry in victims])
        return [entry.place for entry in victims]

    def _free(self, places: Sequence[Place]) -> None:
        """Give bytes back that no page has any more."""
        try:
            free(self.path, places)
        except OSError as error:
            self._counters.trouble(reason(error))
        self._remove_empty({place.segment for place in places})

    def _remove_empty(self, candidates: Iterable[int]) -> None:
        """Remove segments in which nothing is left, and to which nobody appends."""
        empty = [segment for segment in candidates if not self._index.records(segment)]
        if not empty:
            return
        with Idle(self.path, empty) as idle, self._lock:
            # Another process may have found a page in one before it was locked.
            self._refresh()
            for segment in idle.segments:
                if not self._index.records(segment) and not self._is_gone:
                    try:
                        clear(self.path, segment, ())
                    except FileNotFoundError:
                        pass
                    except OSError as error:
                        self._counters.trouble(reason(error))

    # --- The index and its log -------------------------------------------------------------------

    def _load(self) -> None:
        """Read the index, or make it again from the segments; give back what a killed process left."""
        with self._lock:
            lost = False
            try:
                self._apply_tail()
            except LogGoneError:
                lost = True
            if lost or self._log.bad_entries:
                if not lost:
                    _logger.warning("%s: the index is damaged; it is made again", self.path)
                elif any(segments(self.path)):
                    _logger.warning("%s: the index is lost or damaged; it is made again", self.path)
                recovery.recover(self._index, self.path, self._digest)
                if self._log.writable:
                    self._replace_log(lost=lost)
        if self._log.writable:
            try:
                if recovery.taken_bytes(self.path) > self._index.used_bytes + _BATCH_BYTES:
                    self._collect()
            except OSError as error:
                self._counters.trouble(reason(error))

    def _replace_log(self, *, lost: bool) -> None:
        """Write the log anew from the index as it is, unless another process has just done so."""
        try:
            with self._log.locked():
                try:
                    self._apply_tail()
                except LogGoneError:
                    pass
                else:
                    if lost:
                        return
                self._log.replace(self._index.entries())
        except OSError as error:
            # It serves without: what this process writes is not kept.
            self._counters.trouble(reason(error))
            _logger.warning("%s: the index cannot be written: %s", self.path, error.strerror or error)

    def _glance(self) -> None:
        """See what other processes did, unless the index is busy: it is then about to be."""
        if self._lock.acquire(blocking=False):
            try:
                self._refresh()
            finally:
                self._lock.release()

    def _refresh(self) -> None:
        """See what other processes did, under the lock. A removed folder leaves nothing."""
        if self._closed:
            return
        try:
            if self._log.changed():
                self._apply_tail()
        except LogGoneError:
            self._lose()
        except OSError as error:
            self._counters.trouble(reason(error))

    def _lose(self) -> None:
        if self._counters.trouble("gone"):
            _logger.warning("%s: the store was removed; its pages are misses from now on", self.path)
        self._is_gone = True
        self._index = Index()
        with self._touch_lock:
            self._touched = {}
        self._log.close()

    def _apply_tail(self) -> None:
        tail = self._log.tail()
        index = Index() if tail.is_anew else self._index
        for entry in tail.entries:
            index.apply(entry)
        self._index = index
        if self._is_gone:
            self._is_gone = False
            self._counters.trouble(None)
            _logger.warning("%s: the store is there again, with %d pages", self.path, len(index))

    def _record(self, entries: Sequence[Entry], *, wait: bool = True) -> None:
        """Have entries in the log and the index, behind those of other processes; under the lock.

        Raises:
            OSError: they are not in the log.
        """
        try:
            with self._log.locked(wait=wait):
                self._apply_tail()
                self._log.append(entries)
                self._apply_tail()
                if self._log.entries > 2 * len(self._index) + _SPARE_ENTRIES:
                    self._log.replace(self._index.entries())
        except LogGoneError:
            self._lose()
            raise

    def _record_or_remember(self, entries: Sequence[Entry]) -> None:
        """As :meth:`_record`, and where the log cannot be written have them in this process's index alone."""
        if not entries or self._closed:
            return
        try:
            if self._log.writable:
                self._record(entries)
                return
        except LogGoneError:
            return
        except OSError as error:
            self._counters.trouble(reason(error))
        for entry in entries:
            self._index.apply(entry)

    def _flush_touches(self, *, wait: bool) -> None:
        """Have the latest uses in the log, for all processes."""
        if not self._lock.acquire(blocking=wait):
            return
        try:
            with self._touch_lock:
                touched, self._touched = self._touched, {}
            entries = [
                Entry(Kind.TOUCH, name, place)
                for name, place in touched.items()
                if self._index.get(name) == place
            ]
            if entries and self._log.writable and not self._closed:
                try:
                    self._record(entries, wait=wait)
                    return
                except LogGoneError:
                    return
                except OSError:
                    pass  # it is but the order of eviction
            for entry in entries:
                self._index.apply(entry)
        finally:
            self._lock.release()

    # --- Upkeep ----------------------------------------------------------------------------------

    def verify(self, progress: Callable[[int, int], None] | None = None) -> Verified:
        """Read and check every page, also while others use the store; those that fail are set aside.

        `progress` is called with the payload bytes that are done, and those there are in all.
        """
        with self._lock:
            self._refresh()
            pages = sorted(((place, name) for name, place in self._index.pages()), key=lambda item: item[0])
            total_bytes = self._index.page_bytes
        verified = Verified()
        for batch in _batches(pages, lambda item: item[0].payload_bytes):
            self._verify_batch(batch, verified)
            if progress is not None:
                progress(verified.checked_bytes, total_bytes)
        return verified

    def _verify_batch(self, batch: Sequence[tuple[Place, bytes]], verified: Verified) -> None:
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
        faults = self._read(wanted, {number: name for number, (_, name) in enumerate(batch)}, None)
        for number, (place, name) in enumerate(batch):
            verified.checked_pages += 1
            verified.checked_bytes += place.payload_bytes
            if number not in faults:
                continue
            if faults[number] in DAMAGE:
                verified.damaged_pages += 1
            elif self._index.get(name) == place:
                verified.unread_pages += 1

    def gc(self, limit_bytes: int | None = None) -> Collected:
        """Give back the bytes of pages set aside, and those that killed processes left; with a limit, evict to it.

        Segments that a process is appending to keep what that process has not committed.

        Raises:
            StoreError: the folder cannot be written.
        """
        if refusal := self._cannot_write():
            raise StoreError(f"{self.path}: nothing can be given back: the store is {refusal}")
        collected = Collected()
        with self._lock:
            self._refresh()
            aside = [Entry(Kind.DROP, name, place) for place, name in self._index.aside.items()]
            freed = self._drop(aside, sum(entry.place.record_bytes for entry in aside))
        collected.aside_pages = len(freed)
        collected.freed_bytes = sum(place.record_bytes for place in freed)
        if limit_bytes is not None:
            before = self._index.used_bytes
            _, collected.evicted_pages = self._evict(limit_bytes)
            collected.freed_bytes += max(0, before - self._index.used_bytes)
        try:
            freed_bytes, collected.adopted_pages = self._collect()
            collected.freed_bytes += freed_bytes
        except OSError as error:
            raise StoreError(f"{self.path}: {error.strerror or error}") from None
        return collected

    def _collect(self) -> tuple[int, int]:
        """In segments that nobody appends to, make pages of whole records that no index has, and free the rest.

        Returns how many bytes, and how many pages.
        """
        freed = adopted = 0
        left = iter(segments(self.path))
        while group := list(islice(left, _SEGMENTS)):
            with Idle(self.path, group) as idle:
                # Nobody adds to them from now on, and what was added is in the log.
                with self._lock:
                    self._refresh()
                    held = self._index.by_segment()
                    with Claims(self.path) as claims:
                        orphans = [
                            entry
                            for segment in idle.segments
                            if idle.taken_bytes(segment)
                            > sum(place.record_bytes for place in held.get(segment, ()))
                            for entry in recovery.found(self.path, self._digest, segment)
                            if entry.identity not in self._index
                            and entry.place not in self._index.aside
                            # Nobody is about to free it, nor has just done so.
                            and claims.claim(entry.place)
                            and key_at(self.path, entry.place) is not None
                        ]
                        if orphans:
                            self._record(orphans)
                            adopted += len(orphans)
                    held = self._index.by_segment()
                for segment in idle.segments:
                    freed += clear(self.path, segment, held.get(segment, ()))
        return freed, adopted

    def close(self) -> None:
        """End its threads and files. Reads in flight end as misses; further calls find and write nothing."""
        self._reader.close()
        with self._write_lock, self._lock:
            if not self._closed:
                self._flush_touches(wait=True)
                self._retire()
                self._closed = True
                self._log.close()
                self._index = Index()

    def check_integrity(self) -> None:
        """Its index agrees with itself.

        Raises:
            AssertionError: it does not.
        """
        with self._lock:
            self._index.check_integrity()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _batches(items: Iterable[T], size_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    batch: list[T] = []
    total = 0
    for item in items:
        size = size_bytes(item)
        if batch and total + size > _BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def _check_punching(path: Path) -> None:
    """That evicted pages can be given back page by page.

    Raises:
        StoreError: the file system cannot.
        OSError: the folder cannot be written.
    """
    probe = path / f"probe.{os.getpid()}.{threading.get_ident()}"
    fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.truncate(fd, BLOCK_BYTES)
        punch(fd, 0, BLOCK_BYTES)
    except OSError as error:
        raise StoreError(
            f"{path}: a limit needs a file system that can punch holes (ext4, xfs, btrfs, tmpfs): {error.strerror}"
        ) from None
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)
