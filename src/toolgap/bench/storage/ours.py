"""Toolgap's store, as SGLang's storage thread calls it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from toolgap.bench.storage.contenders import Contender, Read
from toolgap.bench.storage.pages import Pages, Target
from toolgap.bench.storage.stock import batches, config

READER = "toolgap.store.reader.payload_check"


class ToolgapContender(Contender):
    """``ToolgapStore``: read in place, by its own threads, every page checked.

    Args:
        checked: False leaves out the checksum over each page, to see what it costs. No server can.
    """

    def __init__(self, *, checked: bool = True) -> None:
        self._checked = checked
        self.name = "toolgap.store" if checked else "toolgap.store, checksums left out"

    @property
    def data(self) -> str:
        """See :class:`Contender`."""
        return "toolgap.store"

    def write(self, folder: Path, pages: Pages, target: Target) -> None:
        """See :class:`Contender`."""
        with backend(folder, target.pool, fsync="batch") as store:
            for keys, indices in batches(pages, target):
                if not all(store.batch_set_v1(keys, indices)):
                    raise OSError("the store did not store a page")

    @contextmanager
    def opened(self, folder: Path, pages: Pages, target: Target) -> Iterator[Read]:
        """See :class:`Contender`."""
        with ExitStack() as stack:
            if not self._checked:
                stack.enter_context(patch(READER, lambda *_: _Anything()))
            store = stack.enter_context(backend(folder, target.pool))
            calls = batches(pages, target)
            # Its threads start with the first read.
            store.batch_get_v1(*batches(Pages(["0" * 64] * 4, pages.data[:4]), target)[0])

            def read() -> None:
                for keys, indices in calls:
                    if not all(store.batch_get_v1(keys, indices)):
                        raise OSError("the store lacks a page")

            yield read


@contextmanager
def backend(folder: Path, pool: Any, **settings: Any) -> Iterator[Any]:
    """The backend over a folder, as SGLang makes and ends it."""
    from toolgap.store.hicache import ToolgapStore

    store = ToolgapStore(config({"path": str(folder), "weights": "random", **settings}), {})
    store.register_mem_pool_host(pool)
    try:
        yield store
    finally:
        store.close()


class _Anything:
    """Equal to every checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0
