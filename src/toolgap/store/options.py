"""How a store works: limits, durability, and the way its reads take."""

import os
from enum import StrEnum

import msgspec

MIB = 1 << 20


READERS = max(4, min(8, len(os.sched_getaffinity(0)) // 2))
"""Half of the cores: each reader copies and checks. On an H200's host eight were faster than four and fourteen."""


class Fsync(StrEnum):
    """When written pages are forced to the disk. Whatever it is, a torn page is never returned."""

    NONE = "none"
    """Pages survive the death of the process, also by kill -9. A loss of power may cost the latest ones."""
    BATCH = "batch"
    """Pages that a call of ``write`` reported as written survive a loss of power."""


class ReadPath(StrEnum):
    """How bytes come from the disk into the caller's memory."""

    CACHED = "cached"
    """Through the page cache."""
    DIRECT = "direct"
    """Around the page cache, where address and length allow it, else through it and dropped from it."""
    AUTO = "auto"
    """What lies in the page cache from there, the rest around it."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an open store. They may differ between processes that share a path."""

    limit_bytes: int | None = None
    """Least recently used pages go when the folder would grow beyond it; None: until the disk is full."""
    fsync: Fsync = Fsync.NONE
    read_path: ReadPath = ReadPath.AUTO
    readers: int = READERS
    """I/Os in flight at most."""
    strip_bytes: int = 4 * MIB
    """The most that one I/O reads, unless one page is larger: the grain of fairness and of cancelling."""
    segment_bytes: int = 256 * MIB
    """A segment file that has grown beyond it is followed by another."""
