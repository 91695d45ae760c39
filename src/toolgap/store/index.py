"""What is where: the pages of a store in the order of their last use, in memory.

Pure: no I/O and no clock. Every process that shares a store applies the same entries in the same order, that of the
log (:mod:`toolgap.store.log`), and so holds the same index.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

from toolgap.store.record import Place, record_bytes


class Kind(IntEnum):
    """What happened to a page."""

    PUT = 1
    """It was written."""
    TOUCH = 2
    """It was used."""
    ASIDE = 3
    """It failed its check: it is no page any more, its bytes stay until they are freed."""
    DROP = 4
    """Its bytes are given back."""


class Entry(NamedTuple):
    """One thing that happened."""

    kind: Kind
    identity: bytes
    place: Place


class Index:
    """The pages there are, the least recently used first, and those set aside."""

    def __init__(self) -> None:
        self._pages: OrderedDict[bytes, Place] = OrderedDict()
        self._aside: dict[Place, bytes] = {}
        self._records: Counter[int] = Counter()
        self.used_bytes = 0
        """Of all records, those set aside included."""
        self.page_bytes = 0
        """Of the payloads of pages that can be read."""

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._pages

    def holds(self, identities: Iterable[bytes]) -> list[bool]:
        """Which of them it has."""
        pages = self._pages
        return [identity in pages for identity in identities]

    def get(self, identity: bytes) -> Place | None:
        """Where a page lies."""
        return self._pages.get(identity)

    def pages(self) -> Iterator[tuple[bytes, Place]]:
        """All pages, the least recently used first."""
        return iter(self._pages.items())

    def by_segment(self) -> dict[int, list[Place]]:
        """Where all records are, those set aside included."""
        groups: dict[int, list[Place]] = {}
        for place in itertools.chain(self._pages.values(), self._aside):
            groups.setdefault(place.segment, []).append(place)
        return groups

    @property
    def aside(self) -> dict[Place, bytes]:
        """The records that were set aside, and what they were."""
        return self._aside

    def records(self, segment: int) -> int:
        """How many records of a segment are in use or set aside."""
        return self._records[segment]

    def entries(self) -> Iterator[Entry]:
        """What would make this index from an empty one."""
        # Those set aside first: a page of the same identity may have been put since.
        for place, identity in self._aside.items():
            yield Entry(Kind.PUT, identity, place)
            yield Entry(Kind.ASIDE, identity, place)
        for identity, place in self._pages.items():
            yield Entry(Kind.PUT, identity, place)

    def oldest(self) -> Iterator[Entry]:
        """The drops that free space, in the order in which they should happen."""
        for place, identity in self._aside.items():
            yield Entry(Kind.DROP, identity, place)
        for identity, place in self._pages.items():
            yield Entry(Kind.DROP, identity, place)

    def apply(self, entry: Entry) -> bool:
        """Let it have happened. False if it changes nothing, such as a put of a page that lies elsewhere already."""
        kind, identity, place = entry
        held = self._pages.get(identity)
        if kind is Kind.PUT:
            if held is not None or place in self._aside:
                return False
            self._pages[identity] = place
            self._count(place, 1)
            self.page_bytes += place.payload_bytes
            return True
        if held != place:
            if kind is Kind.DROP and self._aside.get(place) == identity:
                del self._aside[place]
                self._count(place, -1)
                return True
            return False
        if kind is Kind.TOUCH:
            self._pages.move_to_end(identity)
            return True
        del self._pages[identity]
        self.page_bytes -= place.payload_bytes
        if kind is Kind.ASIDE:
            self._aside[place] = identity
        else:
            self._count(place, -1)
        return True

    def _count(self, place: Place, records: int) -> None:
        left = self._records[place.segment] = self._records[place.segment] + records
        self.used_bytes += records * record_bytes(place.payload_bytes)
        if not left:
            del self._records[place.segment]

    def check_integrity(self) -> None:
        """Its sums are those of its records, and no two records overlap.

        Raises:
            AssertionError: they are not.
        """
        places = sorted([*self._pages.values(), *self._aside])
        for left, right in itertools.pairwise(places):
            assert left.segment != right.segment or left.end <= right.offset, (left, right)
        assert self.used_bytes == sum(place.record_bytes for place in places)
        assert self.page_bytes == sum(place.payload_bytes for place in self._pages.values())
        assert self._records == Counter(place.segment for place in places)
