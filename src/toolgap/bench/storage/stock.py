"""SGLang's own file backend, as its storage thread calls it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toolgap.bench.storage.contenders import Contender, Read
from toolgap.bench.storage.pages import Pages, Target

BATCH_PAGES = 128
"""What SGLang hands to a backend at a time."""


def config(extra: dict[str, Any]) -> Any:
    """What SGLang tells a backend of its set-up: one rank."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="bench",
        extra_config=extra,
    )


def batches(pages: Pages, target: Target) -> list[tuple[list[str], Any]]:
    """Keys and token slots of each call that SGLang makes."""
    page_tokens = target.pool.page_size
    return [
        (
            pages.keys[at : at + BATCH_PAGES],
            target.indices[at * page_tokens : (at + BATCH_PAGES) * page_tokens],
        )
        for at in range(0, len(pages.keys), BATCH_PAGES)
    ]


class StockFile(Contender):
    """``HiCacheFile``: one file a page, read into a fresh tensor and copied from there."""

    name = "SGLang's file backend"

    def _backend(self, folder: Path) -> Any:
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile

        return HiCacheFile(config({}), str(folder))

    def write(self, folder: Path, pages: Pages, target: Target) -> None:
        """See :class:`Contender`."""
        import os

        from sglang.srt.managers.cache_controller import HiCacheController

        controller = SimpleNamespace(
            storage_host_pool=target.pool,
            storage_backend=self._backend(folder),
            page_size=target.pool.page_size,
        )
        for keys, indices in batches(pages, target):
            if not HiCacheController._generic_page_set(controller, keys, indices):
                raise OSError("the file backend did not store a page")
        os.sync()

    @contextmanager
    def opened(self, folder: Path, pages: Pages, target: Target) -> Iterator[Read]:
        """See :class:`Contender`."""
        from sglang.srt.managers.cache_controller import HiCacheController

        controller = SimpleNamespace(
            storage_host_pool=target.pool,
            storage_backend=self._backend(folder),
            page_size=target.pool.page_size,
        )
        operation = SimpleNamespace(request_id="bench", is_terminated=lambda: False)

        def read() -> None:
            for keys, indices in batches(pages, target):
                got = HiCacheController._generic_page_get(controller, operation, keys, indices)
                if got != len(keys):
                    raise OSError("the file backend lacks a page")

        yield read
