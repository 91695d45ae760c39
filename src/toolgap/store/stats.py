"""What a store tells of itself."""

import threading

import msgspec


class StoreStats(msgspec.Struct, kw_only=True):
    """What a store holds, and what this process has done with it since it opened it."""

    pages: int = 0
    page_bytes: int = 0
    """Of the payloads of these pages."""
    used_bytes: int = 0
    """Of all records, headers and filling and pages set aside included: what the limit is about."""
    limit_bytes: int | None = None
    aside_pages: int = 0
    """Records whose check failed, in the folder until ``gc``, or until their space is needed."""
    writable: bool = True
    trouble: str | None = None
    """Why the last access to the folder failed, such as ``ENOSPC``; None after one that did not."""
    read_pages: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    """Spent by callers in ``read``; it counts twice where two of them wait."""
    missed_pages: int = 0
    """Asked for in ``read`` and not there."""
    written_pages: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    """Spent by callers in ``write``."""
    evicted_pages: int = 0
    damaged_pages: int = 0
    """Pages that failed for good when they were read: a miss from then on."""
    cancelled_pages: int = 0
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    """Pages that were there and not read, or not written, by reason: a :class:`toolgap.store.landing.Fault`, the
    name of a system's error such as ``ENOSPC`` or ``EIO``, ``limit``, ``gone``, ``read-only``, ``size``, ``key`` or
    ``closed``."""


class Counters:
    """The counting half of :class:`StoreStats`, from any thread; it never waits for the disk."""

    def __init__(self, *, limit_bytes: int | None, writable: bool) -> None:
        self._lock = threading.Lock()
        self._stats = StoreStats(limit_bytes=limit_bytes, writable=writable)

    def add(self, *, seconds: float = 0.0, **pages_or_bytes: int) -> None:
        """Add to fields by name; seconds go to ``read_s`` or ``write_s``, by which pages are counted."""
        with self._lock:
            for name, amount in pages_or_bytes.items():
                setattr(self._stats, name, getattr(self._stats, name) + amount)
            if "read_pages" in pages_or_bytes:
                self._stats.read_s += seconds
            else:
                self._stats.write_s += seconds

    def fail(self, reason: str, pages: int = 1) -> None:
        """So many pages were not read or not written."""
        if pages:
            with self._lock:
                self._stats.failures[reason] = self._stats.failures.get(reason, 0) + pages

    def trouble(self, reason: str | None) -> bool:
        """How the last access to the folder ended; whether that is news."""
        with self._lock:
            is_news = self._stats.trouble != reason
            self._stats.trouble = reason
            return is_news

    def snapshot(self) -> StoreStats:
        """A copy."""
        with self._lock:
            return msgspec.structs.replace(self._stats, failures=dict(self._stats.failures))


class Verified(msgspec.Struct, kw_only=True):
    """What a check of every page found."""

    checked_pages: int = 0
    checked_bytes: int = 0
    damaged_pages: int = 0
    """Those that failed, now set aside."""
    unread_pages: int = 0
    """Those that could not be read now, and may be right."""


class Collected(msgspec.Struct, kw_only=True):
    """What was given back."""

    freed_bytes: int = 0
    aside_pages: int = 0
    """Damaged records among it."""
    adopted_pages: int = 0
    """Whole records that the index had forgotten, now pages again."""
    evicted_pages: int = 0
    """Pages among it, for a limit."""
