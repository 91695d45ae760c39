"""What one I/O reads: neighbouring records of one segment."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from toolgap.store.record import Place, record_bytes

RECORDS = 256
"""The most records one I/O reads."""
_BUFFERS = 900
"""The most buffers one I/O fills, below what the system takes."""


class Wanted(NamedTuple):
    """One page to read."""

    number: int
    """In the caller's order."""
    key: bytes
    place: Place
    buffers: Sequence[memoryview]


class Strip(NamedTuple):
    """Neighbouring records of one segment, read by one I/O."""

    wanted: Sequence[Wanted]
    read_bytes: int


def strips(wanted: Iterable[Wanted], strip_bytes: int) -> list[Strip]:
    """Pages in the order of the disk, neighbours together."""
    made: list[Strip] = []
    group: list[Wanted] = []
    group_bytes = buffers = 0
    behind = (-1, -1)
    for page in sorted(wanted, key=lambda page: page.place):
        segment, offset, payload_bytes = page.place
        size, count = record_bytes(payload_bytes), len(page.buffers) + 2
        fits = (
            group
            and behind == (segment, offset)
            and group_bytes + size <= strip_bytes
            and len(group) < RECORDS
            and buffers + count <= _BUFFERS
        )
        if group and not fits:
            made.append(Strip(group, group_bytes))
            group, group_bytes, buffers = [], 0, 0
        group.append(page)
        group_bytes += size
        buffers += count
        behind = segment, offset + size
    if group:
        made.append(Strip(group, group_bytes))
    return made
