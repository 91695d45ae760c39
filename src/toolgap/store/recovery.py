"""The index made again from what the segments themselves say."""

from collections.abc import Iterator
from pathlib import Path

from toolgap.store.index import Entry, Index, Kind
from toolgap.store.record import BLOCK_BYTES, Header, page_check, payload_digest
from toolgap.store.segments import headers, segment_path, segments


def found(path: Path, namespace: bytes, segment: int) -> Iterator[Entry]:
    """The pages of a segment whose headers are whole.

    Their payloads are checked when they are read, but that of the last one now: a process may have been killed, or a
    disk full, in the middle of it.
    """
    last: Header | None = None
    try:
        for header in headers(segment_path(path, segment)):
            if header.namespace == namespace and header.place.segment == segment:
                if last is not None:
                    yield Entry(Kind.PUT, last.identity, last.place)
                last = header
        if last is not None and _is_whole(path, last):
            yield Entry(Kind.PUT, last.identity, last.place)
    except OSError:
        return


def _is_whole(path: Path, header: Header) -> bool:
    with segment_path(path, header.place.segment).open("rb") as file:
        file.seek(header.place.offset + BLOCK_BYTES)
        payload = memoryview(file.read(header.place.payload_bytes))
    if len(payload) != header.place.payload_bytes:
        return False
    return page_check(header.namespace, header.key, payload_digest([payload])) == header.check


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
