"""Pages into the segment that this process appends to, and from there into the index."""

import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from toolgap.store.batches import batches
from toolgap.store.catalog import Catalog
from toolgap.store.index import Entry, Kind
from toolgap.store.log import LogGoneError
from toolgap.store.namespace import Namespace
from toolgap.store.options import Fsync, Options
from toolgap.store.record import Header, Place, pack, page_check, payload_digest, record_bytes
from toolgap.store.room import Room
from toolgap.store.segments import ActiveSegment, reason
from toolgap.store.stats import Counters

_STEP_ASIDE_S = 0.02
"""How long a write waits for reads, a page: it is slowed by them, never stopped."""

_logger = logging.getLogger(__name__)


class Pending(NamedTuple):
    """One page to write."""

    number: int
    """In the caller's order."""
    key: bytes
    identity: bytes
    buffers: Sequence[memoryview]
    payload_bytes: int


class Writer:
    """Appends pages; callers take turns."""

    def __init__(
        self,
        folder: Path,
        namespace: Namespace,
        options: Options,
        catalog: Catalog,
        room: Room,
        counters: Counters,
        reads_idle: threading.Event,
    ) -> None:
        self._folder, self._namespace, self._options = folder, namespace, options
        self._digest = namespace.digest()
        self._catalog, self._room, self._counters = catalog, room, counters
        self._reads_idle = reads_idle
        self._active: ActiveSegment | None = None

    def write(self, pages: Iterable[Pending]) -> set[int]:
        """Write pages that the index lacks; returns the numbers of those that it has now."""
        written: set[int] = set()
        for batch in batches(pages, lambda page: record_bytes(page.payload_bytes)):
            if refusal := self._catalog.refusal():
                self._counters.fail(refusal, len(batch))
            else:
                written |= self._write(batch)
        self._keep_limit()
        return written

    def _keep_limit(self) -> None:
        """What several processes wrote at once may be too much together, and what was being read was spared."""
        if self._catalog.refusal():
            return
        try:
            self._room.make(0, self._options.limit_bytes)
        except OSError as error:
            self._counters.trouble(reason(error))

    def _write(self, batch: Sequence[Pending]) -> set[int]:
        try:
            size = sum(record_bytes(page.payload_bytes) for page in batch)
            if not self._room.make(size, self._options.limit_bytes):
                self._counters.fail("limit", len(batch))
                return set()
            active = self._segment()
        except OSError as error:
            self._failed(error, len(batch))
            return set()
        start = active.position
        written: list[tuple[Pending, Place]] = []
        failure: OSError | None = None
        try:
            for page in batch:
                self._reads_idle.wait(_STEP_ASIDE_S)
                written.append((page, self._append(active, page)))
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
                # Some process may have seen them named: nothing else is ever written where they were.
                self.retire()
        if failure is None:
            self._counters.trouble(None)
        else:
            self._failed(failure, len(batch) - len(written))
        return {page.number for page, _ in written}

    def _append(self, active: ActiveSegment, page: Pending) -> Place:
        place = active.next_place(page.payload_bytes)
        check = page_check(self._digest, page.key, payload_digest(page.buffers))
        active.append(pack(Header(page.key, page.identity, self._digest, place, check)), page.buffers, place)
        return place

    def _commit(self, active: ActiveSegment, written: Sequence[tuple[Pending, Place]]) -> None:
        """Have written pages in the index."""
        forced = self._options.fsync is Fsync.BATCH
        if forced:
            active.force()
        puts = [Entry(Kind.PUT, page.identity, place) for page, place in written]
        with self._catalog.lock:
            self._catalog.record(puts)
            # Another process may have put the same page first: its own stands.
            losers = {put.place for put in puts if self._catalog.index.get(put.identity) != put.place}
        if forced:
            self._catalog.force()
        self._counters.add(
            written_pages=len(puts) - len(losers),
            written_bytes=sum(put.place.payload_bytes for put in puts if put.place not in losers),
        )
        if losers:
            self._room.free(list(losers))

    def _segment(self) -> ActiveSegment:
        active = self._active
        if active is not None and (active.position >= self._options.segment_bytes or active.is_removed()):
            self.retire()
        if self._active is None:
            self._active = ActiveSegment(self._folder, self._namespace)
        return self._active

    def _failed(self, error: OSError, pages: int) -> None:
        name = "gone" if isinstance(error, LogGoneError) else reason(error)
        self._counters.fail(name, pages)
        if self._counters.trouble(name):
            _logger.warning("%s: pages were not written: %s", self._folder, error.strerror or error)
        if name not in ("ENOSPC", "EDQUOT"):
            # The segment may be what is broken.
            self.retire()

    def retire(self) -> None:
        """Append no more to the present segment."""
        if self._active is not None:
            segment = self._active.segment
            self._active.close()
            self._active = None
            self._room.remove_empty([segment])
