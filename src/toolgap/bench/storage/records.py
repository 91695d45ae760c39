"""What one measurement leaves in ``trials.jsonl``, and what the run was made on in ``setup.json``."""

from typing import Any

import msgspec

SETUP, TRIALS, REPORT = "setup.json", "trials.jsonl", "report.md"

OURS, UNCHECKED = "toolgap.store", "toolgap.store, checksums left out"
"""Contenders whose difference is what the checksums take."""


class Setup(msgspec.Struct, kw_only=True):
    """Machine, software and plan of a run."""

    schema: int = 1
    run: str
    began: str
    seed: int
    rounds: int
    page_tokens: list[int]
    total_bytes: int
    """Of all pages of a size, at most."""
    pinned: bool = False
    """Whether the host pool is registered with a GPU, as a server on one has it."""
    contenders: list[str]
    left_out: dict[str, str]
    """Contenders that could not be measured here, and why."""
    hardware: dict[str, Any]
    software: dict[str, str]


class Reading(msgspec.Struct, kw_only=True, tag="read"):
    """All pages of a size read once by one contender."""

    round: int
    page_bytes: int
    pages: int
    cache: str
    contender: str
    read_s: float
    cpu_s: float
    """Of all threads of the process, in the same time."""
    resident_share: float
    """Of its files in the page cache, before the read."""
    load: float
    """Of the machine over the last minute: others work on it."""
    error: str | None = None
    """Why the reading does not count."""


class Writing(msgspec.Struct, kw_only=True, tag="write"):
    """All pages of a size written once, until they are on the device."""

    page_bytes: int
    pages: int
    contender: str
    write_s: float


class Hashing(msgspec.Struct, kw_only=True, tag="hash"):
    """A checksum over memory, piece by piece, by one thread."""

    round: int
    checksum: str
    piece_bytes: int
    total_bytes: int
    hash_s: float
    other_thread_share: float
    """How much another thread got done during one call over everything, of what it does alone: near 0 if the
    interpreter lock is held."""


class Lookup(msgspec.Struct, kw_only=True, tag="exists"):
    """One ``batch_exists`` of pages that are all there."""

    round: int
    contender: str
    pages: int
    lookup_s: float


Trial = Reading | Writing | Hashing | Lookup
