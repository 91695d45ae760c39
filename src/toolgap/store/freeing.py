"""Bytes of segments given back to the file system, without taking them from anybody."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from toolgap.store.files import lock_file, lock_range, punch
from toolgap.store.record import BLOCK_BYTES, Place
from toolgap.store.segments import segment_path


def free(folder: Path, places: Iterable[Place]) -> None:
    """Give the bytes of records back.

    Raises:
        OSError: the disk says no, for one at least; the others were freed.
    """
    failure: OSError | None = None
    for segment, group in _by_segment(places).items():
        try:
            fd = os.open(segment_path(folder, segment), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError as error:
            failure = error
            continue
        try:
            for place in group:
                punch(fd, place.offset, place.record_bytes)
        except OSError as error:
            failure = error
        finally:
            os.close(fd)
    if failure is not None:
        raise failure


def _by_segment(places: Iterable[Place]) -> dict[int, list[Place]]:
    groups: dict[int, list[Place]] = {}
    for place in places:
        groups.setdefault(place.segment, []).append(place)
    return groups


class Claims:
    """Records that nobody reads, and nobody will while this is open: those that may be freed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[int, int | None] = {}

    def claim(self, place: Place) -> bool:
        """Whether nobody was reading it."""
        if place.segment not in self._fds:
            try:
                fd = os.open(segment_path(self._folder, place.segment), os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                self._fds[place.segment] = None
            else:
                self._fds[place.segment] = fd
        held = self._fds[place.segment]
        return held is None or lock_range(held, place.offset, place.record_bytes, exclusive=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            if fd is not None:
                os.close(fd)


class Idle:
    """Segments that no process appends to, and none will while this is open."""

    def __init__(self, folder: Path, candidates: Iterable[int]) -> None:
        self._fds: dict[int, int] = {}
        for segment in candidates:
            try:
                fd = os.open(segment_path(folder, segment), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            # Another may have removed it between the two calls; from now on nobody does.
            if lock_file(fd) and os.fstat(fd).st_nlink:
                self._fds[segment] = fd
            else:
                os.close(fd)

    @property
    def segments(self) -> list[int]:
        """Which they are."""
        return list(self._fds)

    def taken_bytes(self, segment: int) -> int:
        """What one takes on the disk beside its first block."""
        return os.fstat(self._fds[segment]).st_blocks * 512 - BLOCK_BYTES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds.values():
            os.close(fd)


def clear(folder: Path, segment: int, live: Iterable[Place]) -> int:
    """Give back all bytes of a nobody's segment that are not of these records; returns how many.

    Raises:
        OSError: the disk says no.
    """
    path = segment_path(folder, segment)
    before = path.stat().st_blocks * 512
    kept = sorted(live)
    if not kept:
        path.unlink()
        return before
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        end = BLOCK_BYTES
        for place in kept:
            if place.offset > end:
                punch(fd, end, place.offset - end)
            end = max(end, place.end)
        if os.fstat(fd).st_size > end:
            os.ftruncate(fd, end)
        return max(0, before - os.fstat(fd).st_blocks * 512)
    finally:
        os.close(fd)
