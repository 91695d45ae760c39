"""An open store: what a process does with the pages of one folder."""

import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import msgspec

from toolgap.store.errors import StoreError
from toolgap.store.namespace import Namespace
from toolgap.store.options import Options


class Page(NamedTuple):
    """One page and the caller's memory for it."""

    key: str
    """Unique within the namespace: the page's hash, with whatever tells ranks and pools apart."""
    buffers: Sequence[memoryview]
    """Flat, contiguous, of bytes (format ``B``), writable for reads: the payload is their concatenation."""


def memory(address: int, length_bytes: int) -> memoryview:
    """The bytes at an address, which must stay valid for as long as the view is used."""
    return memoryview((ctypes.c_ubyte * length_bytes).from_address(address)).cast("B")


class StoreStats(msgspec.Struct, kw_only=True):
    """What a store holds, and what this process has done with it since it opened it."""

    pages: int = 0
    used_bytes: int = 0
    limit_bytes: int | None = None
    read_pages: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    """Spent by callers in ``read``."""
    written_pages: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    evicted_pages: int = 0
    damaged_pages: int = 0
    """Pages whose checksum or header failed: set aside, a miss from then on."""
    cancelled_pages: int = 0
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    """Pages that were not read or not written, by reason, such as ``checksum``, ``ENOSPC`` or ``EIO``."""


class Store:
    """The pages of one folder, shared with other processes that have it open.

    After :meth:`open` nothing raises for what disk or folder do: a page that cannot be read is a miss, one that
    cannot be written is not written, and :meth:`stats` counts why. All methods may be called from any thread.
    """

    def __init__(self, path: Path, namespace: Namespace, options: Options) -> None:
        self._path, self._namespace, self._options = path, namespace, options
        self._pages: dict[str, bytes] = {}
        self._stats = StoreStats(limit_bytes=options.limit_bytes)

    @classmethod
    def open(cls, path: Path, namespace: Namespace, options: Options | None = None) -> Self:
        """Open the store at a path, or make one there. Close it when done: it has threads and files.

        Raises:
            StoreError: the store is of another namespace, of an unknown version, or the folder cannot be used.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path} cannot be made: {error.strerror}") from None
        return cls(path, namespace, options or Options())

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which of these pages the store holds, without looking at their bytes."""
        return [key in self._pages for key in keys]

    def leading(self, keys: Sequence[str]) -> int:
        """How many pages from the first on the store holds without a gap."""
        held = self.exists(keys)
        return held.index(False) if False in held else len(held)

    def read(self, pages: Sequence[Page], cancel: threading.Event | None = None) -> list[bool]:
        """Read pages straight into the caller's memory; returns, in their order, which are there and right.

        Where it says False, the buffers' content is undefined. The call blocks with the interpreter lock released.
        Requests of several threads take turns, I/O by I/O. Setting `cancel` ends the read within one I/O: pages
        that were not read by then are False.
        """
        return [self._read(page) for page in pages]

    def _read(self, page: Page) -> bool:
        payload = self._pages.get(page.key)
        if payload is None or len(payload) != sum(len(buffer) for buffer in page.buffers):
            return False
        start = 0
        for buffer in page.buffers:
            buffer[:] = payload[start : start + len(buffer)]
            start += len(buffer)
        return True

    def write(self, pages: Sequence[Page]) -> list[bool]:
        """Write pages from the caller's memory; returns, in their order, which the store now holds.

        A page that it holds already is not written again. The call blocks until the bytes are written, and forced
        to the disk if the options say so; it steps aside for reads meanwhile.
        """
        for page in pages:
            self._pages.setdefault(page.key, b"".join(page.buffers))
        return [True] * len(pages)

    def stats(self) -> StoreStats:
        """A snapshot."""
        return msgspec.structs.replace(self._stats, pages=len(self._pages))

    def close(self) -> None:
        """End its threads and files. Reads in flight end as misses; further calls find and write nothing."""
        self._pages.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
