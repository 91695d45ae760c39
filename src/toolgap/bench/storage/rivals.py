"""Stores and I/O libraries that others keep: imported only by those that measure them."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from toolgap.bench.storage.contenders import Contender, Read
from toolgap.bench.storage.pages import Pages, Target
from toolgap.bench.storage.segments import FILE, Segments, together


class _KeyValue(Contender):
    """A library that hands out a page's bytes, which are then copied into the host pool."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.name = f"{self.library}, {threads} thread{'s' * (threads > 1)}"

    library: str

    @property
    def data(self) -> str:
        """See :class:`Contender`."""
        return self.library

    @contextmanager
    def _reading(self, get: Any, pages: Pages, target: Target) -> Iterator[Read]:
        half = pages.page_bytes // 2
        places = [tuple(np.frombuffer(piece, np.uint8) for piece in pieces) for pieces in target.pieces]

        def read(page: int) -> None:
            with get(pages.keys[page].encode()) as value:
                content = np.frombuffer(value, np.uint8)
                # Large copies of numpy release the interpreter lock.
                np.copyto(places[page][0], content[:half])
                np.copyto(places[page][1], content[half:])

        with ThreadPoolExecutor(self._threads) as threads:
            list(threads.map(lambda _: None, range(self._threads)))
            yield lambda: list(threads.map(read, range(len(pages.keys)))).clear()


class Lmdb(_KeyValue):
    """A B+ tree in a memory map: no copy but the one into the host pool."""

    library = "LMDB"

    def write(self, folder: Path, pages: Pages, target: Target) -> None:
        """See :class:`Contender`."""
        import lmdb

        with lmdb.open(str(folder), map_size=4 * pages.total_bytes) as database:
            with database.begin(write=True) as change:
                for key, page in zip(pages.keys, pages.data, strict=True):
                    change.put(key.encode(), page.data)
            database.sync(True)

    @contextmanager
    def opened(self, folder: Path, pages: Pages, target: Target) -> Iterator[Read]:
        """See :class:`Contender`."""
        import lmdb

        @contextmanager
        def get(key: bytes) -> Iterator[Any]:
            with database.begin(buffers=True) as view:
                yield view.get(key)

        with (
            lmdb.open(str(folder), map_size=4 * pages.total_bytes, readonly=True, lock=False) as database,
            self._reading(get, pages, target) as read,
        ):
            yield read


class RocksDb(_KeyValue):
    """A log-structured tree with the pages in blob files, which it checks as it reads."""

    library = "RocksDB blob files"

    @staticmethod
    def _options() -> Any:
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_enable_blob_files(True)
        options.set_min_blob_size(4096)
        options.set_blob_compression_type(rocksdict.DBCompressionType.none())
        return options

    def write(self, folder: Path, pages: Pages, target: Target) -> None:
        """See :class:`Contender`."""
        import rocksdict

        database = rocksdict.Rdict(str(folder), self._options())
        for key, page in zip(pages.keys, pages.data, strict=True):
            database[key.encode()] = page.tobytes()
        database.flush()
        database.close()
        os.sync()

    @contextmanager
    def opened(self, folder: Path, pages: Pages, target: Target) -> Iterator[Read]:
        """See :class:`Contender`."""
        import rocksdict

        @contextmanager
        def get(key: bytes) -> Iterator[Any]:
            yield database[key]

        database = rocksdict.Rdict(str(folder), self._options(), access_type=rocksdict.AccessType.read_only())
        with self._reading(get, pages, target) as read:
            yield read
        database.close()


class Nixl(Segments):
    """NIXL's POSIX plugin on the segment file: one transfer of all pages."""

    def __init__(self, engine: str, *, direct: bool = False) -> None:
        super().__init__(1, direct=direct)
        self._engine = engine
        self.name = f"NIXL POSIX, {engine}{', direct' * direct}"

    @contextmanager
    def opened(self, folder: Path, pages: Pages, target: Target) -> Iterator[Read]:
        """See :class:`Contender`."""
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        file = os.open(folder / FILE, os.O_RDONLY | (os.O_DIRECT if self._direct else 0))
        agent = nixl_agent("bench", nixl_agent_config(backends=[]))
        engines = ("use_uring", "use_aio", "use_posix_aio")
        agent.create_backend("POSIX", {name: str(name == f"use_{self._engine}").lower() for name in engines})
        half = pages.page_bytes // 2
        memory = [
            (np.frombuffer(piece, np.uint8).ctypes.data, half, 0)
            for pieces in target.pieces
            for piece in pieces
        ]
        parts = [(number * half, half, file) for number in range(len(memory))]
        pool = target.pool.kv_buffer
        whole = [(pool.data_ptr(), pool.numel() * pool.element_size(), 0, "")]
        registered = [
            agent.register_memory(agent.get_reg_descs(whole, "DRAM")),
            agent.register_memory(agent.get_reg_descs([(0, pages.total_bytes, file, "")], "FILE")),
        ]
        host, storage = agent.get_xfer_descs(memory, "DRAM"), agent.get_xfer_descs(parts, "FILE")

        def read() -> None:
            handle = agent.initialize_xfer("READ", host, storage, "bench")
            state = agent.transfer(handle)
            while state != "DONE":
                if state == "ERR":
                    raise OSError("NIXL: the transfer failed")
                os.sched_yield()
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)

        yield read
        for one in registered:
            agent.deregister_memory(one)
        os.close(file)


class IoUring(Segments):
    """io_uring by way of the package liburing: all reads submitted at once, by one thread."""

    def __init__(self, *, direct: bool = False) -> None:
        super().__init__(1, direct=direct)
        self.name = f"io_uring (liburing){', direct' * direct}"

    @contextmanager
    def opened(self, folder: Path, pages: Pages, target: Target) -> Iterator[Read]:
        """See :class:`Contender`."""
        import liburing as uring

        file = os.open(folder / FILE, os.O_RDONLY | (os.O_DIRECT if self._direct else 0))
        groups = together(len(pages.keys), pages.page_bytes)
        ring = uring.Ring()
        uring.io_uring_queue_init(max(8, len(groups)), ring)
        vectors = [
            uring.Iovec([piece for page in group for piece in target.pieces[page]]) for group in groups
        ]

        def read() -> None:
            for number, group in enumerate(groups):
                entry = uring.io_uring_get_sqe(ring)
                uring.io_uring_prep_readv(entry, file, vectors[number], group.start * pages.page_bytes)
                entry.user_data = number + 1
            uring.io_uring_submit_and_wait(ring, len(groups))
            done = uring.Cqe()
            for _ in groups:
                uring.io_uring_wait_cqe(ring, done)
                entry = done[0]
                if entry.res != len(groups[entry.user_data - 1]) * pages.page_bytes:
                    raise OSError(f"io_uring: {entry.res} bytes")
                uring.io_uring_cq_advance(ring, 1)

        yield read
        uring.io_uring_queue_exit(ring)
        os.close(file)
