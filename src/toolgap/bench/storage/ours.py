"""Toolgap's store, as SGLang's storage thread calls it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from toolgap.bench.storage.contenders import Contender, Read
from toolgap.bench.storage.pages import Pages, Target
from toolgap.bench.storage.records import OURS, UNCHECKED
from toolgap.bench.storage.stock import batches, config
from toolgap.store import native

CHECKED = "toolgap.store.landing.Landing.checks_payloads"
COMPILED = "toolgap.store.native.load"


class ToolgapContender(Contender):
    """``ToolgapStore``: read in place, by its own threads, every page checked.

    Args:
        checked: False leaves out the checksum over each page, to see what it costs. No server can.
        compiled: False reads as where there is no C compiler.
    """

    def __init__(self, *, checked: bool = True, compiled: bool = True) -> None:
        self._checked, self._compiled = checked, compiled
        self.name = OURS if checked else UNCHECKED
        if not compiled:
            self.name += ", without a C compiler"

    @property
    def data(self) -> str:
        """See :class:`Contender`."""
        return OURS

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
                stack.enter_context(patch(CHECKED, new=False))
            if not self._compiled:
                stack.enter_context(patch(COMPILED, return_value=None))
            elif native.load() is None:
                raise OSError("there is no C compiler, and a contender that needs one")
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
