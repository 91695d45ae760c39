"""The index of an open store, kept equal with other processes' through the log they share."""

import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from toolgap.store import recovery
from toolgap.store.index import Entry, Index, Kind
from toolgap.store.log import Log, LogGoneError
from toolgap.store.record import Place
from toolgap.store.segments import reason, segments
from toolgap.store.stats import Counters

_TOUCHES = 1024
"""Uses that are kept in memory before the log gets them."""
_SPARE_ENTRIES = 1 << 16
"""Entries that the log may have beyond two a page before it is written anew."""

_logger = logging.getLogger(__name__)


class Catalog:
    """What is where, and what becomes of it.

    :attr:`lock` guards all of it but lookups in :attr:`index` and :meth:`use`, which never wait for the disk. The
    folder's own lock is taken within.
    """

    def __init__(self, folder: Path, namespace: bytes, counters: Counters, *, writable: bool) -> None:
        self._folder, self._namespace, self._counters = folder, namespace, counters
        self._log = Log(folder, namespace, writable=writable)
        self._used: dict[bytes, Place] = {}
        self._used_lock = threading.Lock()
        self._is_closed = self._is_gone = False
        self.lock = threading.RLock()
        self.index = Index()

    def refusal(self) -> str | None:
        """Why nothing can be written now; None if it can."""
        if self._is_closed:
            return "closed"
        if not self._log.writable:
            return "read-only"
        return "gone" if self._is_gone else None

    @property
    def is_gone(self) -> bool:
        """Whether the folder was removed, or moved away."""
        return self._is_gone

    # --- Seeing what others did ------------------------------------------------------------------

    def load(self) -> None:
        """Read the index, or make it again from the segments.

        Raises:
            OSError: neither can be read.
        """
        with self.lock:
            lost = False
            try:
                self._apply_tail()
            except LogGoneError:
                lost = True
            if not lost and not self._log.bad_entries:
                return
            if not lost or any(segments(self._folder)):
                _logger.warning("%s: the index is lost or damaged; it is made again", self._folder)
            recovery.recover(self.index, self._folder, self._namespace)
            if self._log.writable:
                self.rewrite(unless_there=lost)

    def rewrite(self, *, unless_there: bool = False) -> None:
        """Write the log anew from the index, or leave one that another process has just written."""
        try:
            with self.lock, self._log.locked():
                try:
                    self._apply_tail()
                except LogGoneError:
                    pass
                else:
                    if unless_there:
                        return
                self._log.replace(self.index.entries())
        except OSError as error:
            # It serves without: what this process writes is not kept.
            self._counters.trouble(reason(error))
            _logger.warning("%s: the index cannot be written: %s", self._folder, error.strerror or error)

    def glance(self) -> None:
        """See what other processes did, unless this one is at it."""
        if self.lock.acquire(blocking=False):
            try:
                self.refresh()
            finally:
                self.lock.release()

    def refresh(self, *, thorough: bool = False) -> bool:
        """See what other processes did, under the lock; False if it cannot be told. A removed folder leaves nothing.

        That it was moved away, and not removed, is seen if it is `thorough`.
        """
        if self._is_closed:
            return False
        if thorough:
            self._log.look_again()
        try:
            if self._log.changed():
                self._apply_tail()
        except LogGoneError:
            self._lose()
            return False
        except OSError as error:
            self._counters.trouble(reason(error))
            return False
        return True

    def _apply_tail(self) -> None:
        tail = self._log.tail()
        index = Index() if tail.is_anew else self.index
        try:
            for entry in tail.entries:
                index.apply(entry)
        except OSError:
            if tail.is_anew:
                # From the start again next time.
                self._log.close()
            raise
        self.index = index
        if self._is_gone:
            self._is_gone = False
            self._counters.trouble(None)
            _logger.warning("%s: the store is there again, with %d pages", self._folder, len(index))

    def _lose(self) -> None:
        if self._counters.trouble("gone"):
            _logger.warning("%s: the store was removed; its pages are misses from now on", self._folder)
        self._is_gone = True
        self.index = Index()
        with self._used_lock:
            self._used = {}
        self._log.close()

    # --- Telling others --------------------------------------------------------------------------

    def record(self, entries: Sequence[Entry], *, wait: bool = True) -> None:
        """Have entries in the log and the index, behind those of other processes; under the lock.

        Raises:
            OSError: they are not in the log.
        """
        try:
            with self._log.locked(wait=wait):
                self._apply_tail()
                self._log.append(entries)
                for entry in entries:
                    self.index.apply(entry)
                try:
                    # Whoever cannot wait for the lock has no time for this either.
                    if wait and self._log.entries > 2 * len(self.index) + _SPARE_ENTRIES:
                        self._log.replace(self.index.entries())
                except OSError as error:
                    self._counters.trouble(reason(error))
        except LogGoneError:
            self._lose()
            raise

    def record_or_remember(self, entries: Sequence[Entry]) -> None:
        """As :meth:`record`, and where the log cannot be written have them in this process's index alone."""
        if not entries or self._is_closed:
            return
        try:
            if self._log.writable:
                self.record(entries)
                return
        except LogGoneError:
            return
        except OSError as error:
            self._counters.trouble(reason(error))
        for entry in entries:
            self.index.apply(entry)

    def force(self) -> None:
        """Have what was recorded on the disk; not under the lock.

        Raises:
            OSError: the disk says no.
        """
        with self.lock:
            forcing = self._log.forcing()
        forcing()

    def use(self, used: Iterable[tuple[bytes, Place]]) -> None:
        """These pages were used: they are the last to be evicted. Told to others now and then."""
        with self._used_lock:
            self._used.update(used)
            is_much = len(self._used) >= _TOUCHES
        if is_much:
            self.tell_uses(wait=False)

    def tell_uses(self, *, wait: bool) -> None:
        """Have the latest uses in the log; without `wait`, only if nobody else is at it."""
        if not self.lock.acquire(blocking=wait):
            return
        try:
            with self._used_lock:
                used, self._used = self._used, {}
            entries = [
                Entry(Kind.TOUCH, name, place)
                for name, place in used.items()
                if self.index.get(name) == place
            ]
            if entries and self.refusal() is None:
                try:
                    self.record(entries, wait=wait)
                    return
                except LogGoneError:
                    return
                except OSError:
                    pass  # it is but the order of eviction
            for entry in entries:
                self.index.apply(entry)
        finally:
            self.lock.release()

    def close(self) -> None:
        """Hold nothing any more."""
        with self.lock:
            if not self._is_closed:
                self.tell_uses(wait=True)
                self._is_closed = True
                self._log.close()
                self.index = Index()
