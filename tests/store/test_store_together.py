"""Readers, writers and evictors at once, on two stores of one path."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stores import NAMESPACE, pages, read_right

from toolgap.store import native
from toolgap.store.options import Options, ReadPath
from toolgap.store.record import BLOCK_BYTES, identity
from toolgap.store.segments import segment_path
from toolgap.store.store import Store

KEYS = [f"k{number}" for number in range(16)]
SIZE = 4096
RECORD = SIZE + BLOCK_BYTES
MEMORY = Path("/dev/shm")

stores = st.integers(0, 1)
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8)


class Together(RuleBasedStateMachine):
    """Whatever happens: no wrong bytes, and nothing that was written is lost unless somebody took it."""

    @initialize(
        limit=st.none() | st.integers(2, 10),
        path=st.sampled_from(ReadPath),
        segment=st.integers(1, 6),
        is_compiled=st.booleans(),
    )
    def open(self, limit: int | None, path: ReadPath, segment: int, *, is_compiled: bool) -> None:
        loaded = native.load() if is_compiled else None
        assert loaded or not is_compiled
        self.way = mock.patch.object(native, "load", return_value=loaded)
        self.way.start()
        self.path = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None, prefix="toolgap-store-"))
        self.limit = None if limit is None else limit * RECORD
        self.options = Options(
            limit_bytes=self.limit,
            read_path=path,
            readers=2,
            segment_bytes=segment * RECORD,
            strip_bytes=2 * RECORD,
        )
        self.stores = [Store.open(self.path, NAMESPACE, self.options) for _ in range(2)]
        self.held: set[str] = set()
        self.executor = ThreadPoolExecutor(4)

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            self.executor.shutdown()
            self.way.stop()
            for store in self.stores:
                store.close()
            shutil.rmtree(self.path)

    def _see(self) -> None:
        """What may have gone has gone from the model too."""
        there = self.stores[0].exists(KEYS)
        self.held = {key for key, is_there in zip(KEYS, there, strict=True) if is_there and key in self.held}

    def _write(self, which: int, keys: Sequence[str]) -> list[bool]:
        return self.stores[which].write(pages(keys, SIZE))

    @rule(which=stores, keys=some_keys)
    def write(self, which: int, keys: Sequence[str]) -> None:
        written = self._write(which, keys)
        fits = self.limit is None or len(set(keys)) * RECORD <= self.limit
        assert written == [True] * len(keys) or not fits
        if self.limit is None:
            self.held |= set(keys)
        else:
            assert self.stores[which].stats().used_bytes <= self.limit

    @rule(which=stores, keys=some_keys)
    def read(self, which: int, keys: Sequence[str]) -> None:
        there = read_right(self.stores[which], keys, SIZE)
        assert all(is_there for key, is_there in zip(keys, there, strict=True) if key in self.held)

    @rule(
        work=st.lists(
            st.tuples(st.sampled_from(["read", "write", "evict", "gc"]), stores, some_keys), max_size=6
        )
    )
    def together(self, work: list[tuple[str, int, list[str]]]) -> None:
        def do(what: str, which: int, keys: list[str]) -> None:
            if what == "read":
                read_right(self.stores[which], keys, SIZE)
            elif what == "write":
                self._write(which, keys)
            elif what == "evict":
                self.stores[which].gc(len(keys) * RECORD)
            else:
                self.stores[which].gc()

        for done in [self.executor.submit(do, *item) for item in work]:
            done.result(timeout=60)
        if any(what == "evict" for what, _, _ in work):
            self._see()

    @rule(which=stores, pages_left=st.integers(0, 16))
    def evict(self, which: int, pages_left: int) -> None:
        self.stores[which].gc(pages_left * RECORD)
        assert self.stores[which].stats().used_bytes <= pages_left * RECORD
        self._see()

    @rule(which=stores)
    def reopen(self, which: int) -> None:
        self.stores[which].close()
        self.stores[which] = Store.open(self.path, NAMESPACE, self.options)

    @rule(which=stores)
    def compact(self, which: int) -> None:
        self.stores[which]._catalog.rewrite()

    @rule(which=stores, key=st.sampled_from(KEYS), bit=st.integers(0, (BLOCK_BYTES + SIZE) * 8 - 1))
    def damage(self, which: int, key: str, bit: int) -> None:
        store = self.stores[which]
        place = store._catalog.index.get(identity(NAMESPACE.digest(), key.encode()))
        if place is None:
            return
        fd = os.open(segment_path(self.path, place.segment), os.O_RDWR)
        right = os.pread(fd, 1, place.offset + bit // 8)
        os.pwrite(fd, bytes([right[0] ^ 1 << bit % 8]), place.offset + bit // 8)
        os.close(fd)
        self.held.discard(key)
        assert read_right(self.stores[1 - which], [key], SIZE) == [False]

    @precondition(lambda self: self.limit is None)
    @rule()
    def lose_the_index(self) -> None:
        for store in self.stores:
            store.close()
        (self.path / "index.log").unlink()
        self.stores = [Store.open(self.path, NAMESPACE, self.options) for _ in range(2)]

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "stores"):
            return
        one, two = self.stores
        assert one.exists(KEYS) == two.exists(KEYS)
        for store in self.stores:
            stats = store.stats()
            store.check_integrity()
            assert not stats.failures.keys() - {"limit", "header", "checksum", "evicted"}, stats.failures
            assert stats.trouble is None, stats.trouble


TestTogether = Together.TestCase
TestTogether.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
