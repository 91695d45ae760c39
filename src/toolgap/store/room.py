"""Space on the disk: what is given back, and when."""

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from toolgap.store import recovery
from toolgap.store.catalog import Catalog
from toolgap.store.freeing import Claims, Idle, clear, free
from toolgap.store.index import Entry, Kind
from toolgap.store.record import Place
from toolgap.store.segments import key_at, reason, segments
from toolgap.store.stats import Counters

_SEGMENTS = 256
"""How many segments are open at once while bytes are given back."""


class Room:
    """The folder's space. Records that are being read, here or in another process, are spared."""

    def __init__(self, folder: Path, namespace: bytes, catalog: Catalog, counters: Counters) -> None:
        self._folder, self._namespace = folder, namespace
        self._catalog, self._counters = catalog, counters

    def make(self, size_bytes: int, limit_bytes: int | None) -> bool:
        """Evict what is needed to add so much below a limit; False if that cannot be.

        Raises:
            OSError: files cannot be opened.
        """
        if limit_bytes is None:
            return True
        if size_bytes > limit_bytes:
            return False
        with self._catalog.lock:
            if self._catalog.index.used_bytes + size_bytes > limit_bytes:
                self.evict(limit_bytes - size_bytes)
            return self._catalog.index.used_bytes + size_bytes <= limit_bytes

    def evict(self, limit_bytes: int) -> int:
        """Drop the least recently used until no more than so much is used; returns how many pages.

        Raises:
            OSError: files cannot be opened.
        """
        with self._catalog.lock:
            self._catalog.tell_uses(wait=True)
            index = self._catalog.index
            before = len(index)
            self._drop(index.oldest(), index.used_bytes - limit_bytes)
            evicted = before - len(self._catalog.index)
        self._counters.add(evicted_pages=evicted)
        return evicted

    def drop_aside(self) -> list[Place]:
        """Drop what was set aside; returns it.

        Raises:
            OSError: files cannot be opened.
        """
        with self._catalog.lock:
            aside = [Entry(Kind.DROP, name, place) for place, name in self._catalog.index.aside.items()]
            return self._drop(aside, sum(entry.place.record_bytes for entry in aside))

    def _drop(self, entries: Iterable[Entry], size_bytes: int) -> list[Place]:
        victims: list[Entry] = []
        with Claims(self._folder) as claims:
            for entry in entries:
                if size_bytes <= 0:
                    break
                if claims.claim(entry.place):
                    victims.append(entry)
                    size_bytes -= entry.place.record_bytes
            self._catalog.record_or_remember(victims)
            # Claimed until they are gone: a record that no index has is not to be taken for a forgotten one.
            self.free([entry.place for entry in victims])
        return [entry.place for entry in victims]

    def free(self, places: Sequence[Place]) -> None:
        """Give bytes back that no index has any more."""
        try:
            free(self._folder, places)
        except OSError as error:
            self._counters.trouble(reason(error))
        self.remove_empty({place.segment for place in places})

    def remove_empty(self, candidates: Iterable[int]) -> None:
        """Remove segments in which nothing is left, and to which nobody appends."""
        empty = [segment for segment in candidates if not self._catalog.index.records(segment)]
        if not empty:
            return
        with Idle(self._folder, empty) as idle, self._catalog.lock:
            # Another process may have found a page in one before it was locked.
            if not self._catalog.refresh():
                return
            for segment in idle.segments:
                if not self._catalog.index.records(segment):
                    try:
                        clear(self._folder, segment, ())
                    except OSError as error:
                        self._counters.trouble(reason(error))

    def collect(self) -> tuple[int, int]:
        """In segments that nobody appends to, make pages of whole records that no index has, and free the rest.

        Returns how many bytes, and how many pages.

        Raises:
            OSError: the folder cannot be read or written.
        """
        freed = adopted = 0
        left = iter(segments(self._folder))
        while group := list(islice(left, _SEGMENTS)):
            with Idle(self._folder, group) as idle:
                # Nobody adds to them from now on, and what was added is in the log.
                with self._catalog.lock:
                    if not self._catalog.refresh():
                        break
                    adopted += self._adopt(idle)
                    held = self._catalog.index.by_segment()
                for segment in idle.segments:
                    freed += clear(self._folder, segment, held.get(segment, ()))
        return freed, adopted

    def _adopt(self, idle: Idle) -> int:
        index = self._catalog.index
        held = index.by_segment()
        with Claims(self._folder) as claims:
            orphans = [
                entry
                for segment in idle.segments
                if idle.taken_bytes(segment) > sum(place.record_bytes for place in held.get(segment, ()))
                for entry in recovery.found(self._folder, self._namespace, segment)
                if entry.identity not in index
                and entry.place not in index.aside
                # Nobody is about to free it, nor has just done so.
                and claims.claim(entry.place)
                and key_at(self._folder, entry.place) is not None
            ]
            if orphans:
                self._catalog.record(orphans)
        return len(orphans)
