"""Pages one behind the other in one file: a plain read of it, and reads of its pages by several threads."""

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from toolgap.bench.storage.contenders import IO_BYTES, Contender, Read
from toolgap.bench.storage.pages import Pages, Target

FILE = "segment"
SEQUENTIAL_BYTES = 8 << 20


class Segments(Contender):
    """``preadv`` straight into the host pool, neighbours together, a few reads in flight."""

    def __init__(self, threads: int, *, direct: bool = False, checksum: bool = False) -> None:
        self._threads, self._direct, self._checksum = threads, direct, checksum
        kind = ", direct" * direct + ", xxh3_128 of each page" * checksum
        self.name = f"preadv, {threads} thread{'s' * (threads > 1)}{kind}"
        if direct:
            self.caches = ("cold",)  # type: ignore[misc]

    @property
    def data(self) -> str:
        """See :class:`Contender`."""
        return "segments"

    def write(self, folder: Path, pages: Pages, target: Target) -> None:
        """See :class:`Contender`."""
        with (folder / FILE).open("wb", buffering=0) as file:
            for page in pages.data:
                file.write(page.data)
            os.fdatasync(file.fileno())

    @contextmanager
    def opened(self, folder: Path, pages: Pages, target: Target) -> Iterator[Read]:
        """See :class:`Contender`."""
        import xxhash

        flags = os.O_RDONLY | (os.O_DIRECT if self._direct else 0)
        file = os.open(folder / FILE, flags)
        size = pages.page_bytes
        ranges = together(len(pages.keys), size)
        expected = [xxhash.xxh3_128_digest(page) for page in pages.data] if self._checksum else []

        def read(group: range) -> None:
            pieces = [piece for page in group for piece in target.pieces[page]]
            if os.preadv(file, pieces, group.start * size) != len(group) * size:
                raise OSError("short read")
            for page in group if expected else ():
                hashed = xxhash.xxh3_128()
                for piece in target.pieces[page]:
                    hashed.update(piece)
                if hashed.digest() != expected[page]:
                    raise OSError("checksum")

        with ThreadPoolExecutor(self._threads) as threads:
            # Started before the clock is.
            list(threads.map(lambda _: None, range(self._threads)))
            yield lambda: list(threads.map(read, ranges)).clear()
        os.close(file)


class Sequential(Segments):
    """The measure of all: the file's bytes in their order, into one buffer, by one thread.

    Cold, it reads around the page cache; warm, through it.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.name = "raw sequential read"

    @contextmanager
    def opened(self, folder: Path, pages: Pages, target: Target) -> Iterator[Read]:
        """See :class:`Contender`."""
        with self.in_cache(folder, pages, cold=True) as read:
            yield read

    @contextmanager
    def in_cache(self, folder: Path, pages: Pages, *, cold: bool) -> Iterator[Read]:
        """What reads the file in one of the two ways."""
        file = os.open(folder / FILE, os.O_RDONLY | (os.O_DIRECT if cold else 0))
        buffer = mmap.mmap(-1, pages.total_bytes)
        buffer.write(bytes(pages.total_bytes))
        view = memoryview(buffer)
        parts = [view[at : at + SEQUENTIAL_BYTES] for at in range(0, len(view), SEQUENTIAL_BYTES)]

        def read() -> None:
            for number, part in enumerate(parts):
                if os.preadv(file, [part], number * SEQUENTIAL_BYTES) != len(part):
                    raise OSError("short read")

        yield read
        if view != pages.data.reshape(-1).data:
            raise OSError("the file is not what was written")
        parts.clear()
        view.release()
        buffer.close()
        os.close(file)


def together(count: int, page_bytes: int) -> Sequence[range]:
    """Neighbouring pages up to :data:`IO_BYTES`."""
    step = max(1, IO_BYTES // page_bytes)
    return [range(at, min(count, at + step)) for at in range(0, count, step)]
