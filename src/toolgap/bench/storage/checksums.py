"""Checksums: how fast, and whether other threads run meanwhile."""

import time
from collections.abc import Callable
from importlib import import_module
from threading import Event, Thread
from typing import Any

from toolgap.bench.storage.records import Hashing

Digest = Callable[[Any], object]

CANDIDATES = {
    "xxh3_128 (xxhash)": ("xxhash", "xxh3_128_digest"),
    "xxh3_64 (xxhash)": ("xxhash", "xxh3_64_digest"),
    "crc32c (crc32c)": ("crc32c", "crc32c"),
    "blake3 (blake3)": ("blake3", "blake3"),
    "crc32 (zlib)": ("zlib", "crc32"),
    "crc32 (isal)": ("isal.isal_zlib", "crc32"),
    "sha256 (hashlib)": ("hashlib", "sha256"),
}
"""Module and function of each."""


def digest_of(name: str) -> Digest:
    """A candidate's function of one buffer.

    Raises:
        ImportError: its package is not installed.
    """
    module, function = CANDIDATES[name]
    found: Digest = getattr(import_module(module), function)
    if name.startswith("blake3"):
        return lambda piece: found(piece).digest()  # type: ignore[attr-defined]
    return found


def measure(name: str, memory: memoryview, piece_bytes: int, round_number: int) -> Hashing:
    """Hash memory piece by piece, and then in one call beside a thread that counts."""
    digest = digest_of(name)
    pieces = [memory[at : at + piece_bytes] for at in range(0, len(memory), piece_bytes)]
    began = time.perf_counter()
    for piece in pieces:
        digest(piece)
    hash_s = time.perf_counter() - began
    return Hashing(
        round=round_number,
        checksum=name,
        piece_bytes=piece_bytes,
        total_bytes=len(memory),
        hash_s=hash_s,
        other_thread_share=_other_thread_share(lambda: digest(memory)),
    )


def _other_thread_share(call: Callable[[], object]) -> float:
    """Progress of a counting thread while the call lasts, of its progress in the same time alone."""
    began = time.perf_counter()
    call()
    alone_s = time.perf_counter() - began
    done = Event()

    def run() -> None:
        call()
        done.set()

    beside = _count_until(done.is_set, Thread(target=run))
    ends = time.perf_counter() + alone_s
    alone = _count_until(lambda: time.perf_counter() >= ends, None)
    return min(1.0, beside / alone) if alone else 0.0


def _count_until(ended: Callable[[], bool], thread: Thread | None) -> int:
    if thread is not None:
        thread.start()
    count = 0
    while not ended():
        count += 1
    if thread is not None:
        thread.join()
    return count
