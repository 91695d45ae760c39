"""The index made again from what the segments themselves say."""

from collections.abc import Iterator
from pathlib import Path

from toolgap.store.index import Entry, Index, Kind
from toolgap.store.segments import headers, segment_path, segments


def found(path: Path, namespace: bytes, segment: int) -> Iterator[Entry]:
    """The pages of a segment whose headers are whole. Their payloads are checked when they are read."""
    try:
        for header in headers(segment_path(path, segment)):
            if header.namespace == namespace and header.place.segment == segment:
                yield Entry(Kind.PUT, header.identity, header.place)
    except OSError:
        return


def recover(index: Index, path: Path, namespace: bytes) -> int:
    """Add what the index lacks, in the order in which the segments were written; returns how many pages.

    A page that was evicted comes back if its bytes are still there, and so may one that was set aside, if the index
    forgot that: it then fails its check once more.

    Raises:
        OSError: the folder cannot be read; a segment that cannot is left out.
    """
    return sum(index.apply(entry) for segment in segments(path) for entry in found(path, namespace, segment))


def taken_bytes(path: Path) -> int:
    """What the segments take on the disk.

    Raises:
        OSError: the folder cannot be read.
    """
    return sum(state.st_blocks * 512 for state in segments(path).values())
