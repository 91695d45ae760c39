"""The store as a storage backend of SGLang's HiCache, loaded by ``--hicache-storage-backend dynamic``.

SGLang calls it from its storage threads: one that asks which pages are there, one that reads, one that writes.
"""

import functools
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from toolgap.store import config as configuration
from toolgap.store import native, stopping
from toolgap.store.errors import StoreError
from toolgap.store.hits import ends_with
from toolgap.store.hostpages import HostPages
from toolgap.store.identity import key_suffix, namespace
from toolgap.store.metrics import LABELS, StoreMetrics
from toolgap.store.store import Page, Store, memory

logger = logging.getLogger(__name__)

GIB = 1 << 30


class ToolgapStore(HiCacheStorage):  # type: ignore[misc]  # untyped there
    """One rank's view of a store.

    Nothing here raises for what the disk does: what cannot be read is a miss, what cannot be written is told as not
    written. What cannot be right, such as a store of other weights, raises while SGLang attaches the backend.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _keywords: dict[str, Any]) -> None:
        self.path, self._config = configuration.read(storage_config.extra_config or {})
        self._storage = storage_config
        self._store: Store | None = None
        self._pools: dict[str, HostPages] = {}
        self._suffixes: dict[str, str] = {}
        self._closed_for = ""
        """Why no page is read or written any more; empty while they are."""
        # SGLang takes them only where it exports metrics.
        self._rates = _Rates() if storage_config.enable_storage_metrics else None
        self._metrics = _metrics_of(storage_config)

    # ---- what SGLang tells ----

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store: the pool says what its pages are.

        Raises:
            StoreError: the store is of another namespace, or cannot be used.
        """
        super().register_mem_pool_host(mem_pool_host)
        # Compiled now, if it is the first time, and not while a request waits.
        native.load()
        pool = HostPages(mem_pool_host)
        stages = self._storage.pp_size > 1
        self._store = Store.open(
            self.path,
            namespace(
                self._storage,
                # What a stage holds differs by rank: then it is part of the keys alone.
                layout=pool.describe() if not stages else str(mem_pool_host.layout),
                dtype=str(mem_pool_host.dtype),
                page_tokens=pool.page_tokens,
                weights=self._config.weights,
                salt=self._config.salt,
            ),
            self._config.options(),
        )
        self._add_pool(PoolName.KV, pool)
        logger.info(
            "toolgap store: %s, %s, pages of %d tokens %s",
            self.path,
            "without a limit"
            if self._config.limit_bytes is None
            else f"{self._config.limit_bytes / GIB:.1f} GiB",
            pool.page_tokens,
            "read in place"
            if pool.in_place
            else f"copied, since the layout {mem_pool_host.layout} is read so",
        )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Know one more pool, such as a hybrid model's."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add_pool(host_pool_name, HostPages(host_pool))

    def weights_changed(self) -> None:
        """The server's weights are not those of the namespace any more: read and write nothing from now on."""
        if not self._closed_for:
            self._closed_for = "the server's weights were updated"
            logger.warning(
                "toolgap store: %s: it is out of use until the server starts anew", self._closed_for
            )

    # ---- pages of the KV pool ----

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many pages from the first on are there."""
        store = self._usable()
        return 0 if store is None else store.leading(self._keys(PoolName.KV, keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Read pages into the host pool; which of them are there and right."""
        return self._read(PoolName.KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Write pages from the host pool; which of them the store holds now."""
        return self._write(PoolName.KV, keys, host_indices)

    # ---- pages of several pools ----

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """How many pages from the first on can be restored, with what each pool needs for that."""
        store = self._usable()
        if store is None:
            return PoolTransferResult.empty()
        kv_pages = store.leading(self._keys(PoolName.KV, keys))
        hits: dict[str, int] = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            held = store.exists(self._keys(transfer.name, keys[:kv_pages]))
            ends = ends_with(transfer.hit_policy, held, len(transfer.keys or ()))
            if ends:
                hits[transfer.name] = max(ends)
            restorable = [pages for pages in restorable if pages in ends]
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages of several pools."""
        return {
            transfer.name: self._read(transfer.name, transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Write pages of several pools."""
        return {
            transfer.name: self._write(transfer.name, transfer.keys or [], transfer.host_indices)
            for transfer in transfers
        }

    # ---- pages in tensors, as SGLang asks without interface_v1 ----

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        return bool(self.batch_exists([key]))

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Read a page into a tensor."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any | None = None, target_sizes: Any | None = None
    ) -> list[torch.Tensor | None]:
        """Read pages into tensors."""
        store, tensors = self._usable(), list(target_locations or ())
        if store is None or len(tensors) != len(keys):
            return [None] * len(keys)
        found = store.read(self._tensor_pages(keys, tensors), stopping.current())
        return [tensor if there else None for tensor, there in zip(tensors, found, strict=True)]

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Write a page from a tensor."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: list[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Write pages from tensors."""
        store = self._usable()
        if store is None:
            return False
        tensors = [value.contiguous() for value in values or ()]
        return len(tensors) == len(keys) and all(store.write(self._tensor_pages(keys, tensors)))

    # ---- the whole store ----

    def clear(self) -> None:
        """Take every page out of the store, also those of other servers on the same folder."""
        if self._store is None:
            return
        try:
            self._store.gc(limit_bytes=0)
        except StoreError as error:
            # SGLang's scheduler calls this, and ends with what is raised here.
            logger.warning("toolgap store: not cleared: %s", error)

    def close(self) -> None:
        """End the store's threads and files."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def get_stats(self) -> Any:
        """What SGLang exports: pages and GB/s of the calls since it asked last; None where it exports nothing."""
        if self._rates is None:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        return StorageMetrics(*self._rates.taken())

    # ---- inside ----

    def _add_pool(self, name: Any, pool: HostPages) -> None:
        self._pools[str(name)] = pool
        replicated = self._storage.is_mla_model and name != PoolName.MAMBA
        self._suffixes[str(name)] = key_suffix(
            self._storage, str(name), pool.describe(), replicated=replicated
        )

    def _usable(self) -> Store | None:
        return None if self._closed_for else self._store

    def _keys(self, pool: Any, keys: Sequence[str]) -> list[str]:
        suffix = self._suffixes[str(pool)]
        return [key + suffix for key in keys]

    def _tensor_pages(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[Page]:
        return [
            Page(key, [memory(tensor.data_ptr(), tensor.numel() * tensor.element_size())])
            for key, tensor in zip(self._keys(PoolName.KV, keys), tensors, strict=True)
        ]

    def _read(self, name: Any, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        store, pool = self._usable(), self._pools[str(name)]
        if store is None or indices is None or len(indices) != len(keys) * pool.page_tokens:
            return [False] * len(keys)
        borrowed = pool.to_read(self._keys(name, keys), indices)
        began_s = time.perf_counter()
        found = store.read(borrowed.pages, stopping.current())
        for page, there in enumerate(found):
            if there:
                borrowed.landed(page)
        if self._rates is not None:
            self._rates.read(borrowed.pages, found, time.perf_counter() - began_s)
        self._show(store)
        return found

    def _write(self, name: Any, keys: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        store, pool = self._usable(), self._pools[str(name)]
        if store is None or indices is None or len(indices) != len(keys) * pool.page_tokens:
            return [False] * len(keys)
        pages = pool.to_write(self._keys(name, keys), indices)
        began_s = time.perf_counter()
        written = store.write(pages)
        if self._rates is not None:
            self._rates.wrote(pages, written, time.perf_counter() - began_s)
        self._show(store)
        return written

    def _show(self, store: Store) -> None:
        if self._metrics is not None:
            self._metrics.show(store.stats)


@functools.cache
def _registered(labels: tuple[tuple[str, str], ...]) -> StoreMetrics:
    """One a process: a backend that is attached anew goes on counting there."""
    return StoreMetrics(dict(labels))


def _metrics_of(storage: HiCacheStorageConfig) -> StoreMetrics | None:
    if not storage.enable_storage_metrics:
        return None
    metrics = _registered(tuple((name, str(getattr(storage, name))) for name in LABELS))
    metrics.anew()
    return metrics


class _Rates:
    """Pages and GB/s of each call, until SGLang takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fresh()

    def _fresh(self) -> None:
        self._read_pages: list[int] = []
        self._written_pages: list[int] = []
        self._read_gbps: list[float] = []
        self._write_gbps: list[float] = []

    def read(self, pages: Sequence[Page], found: Sequence[bool], took_s: float) -> None:
        """A call has read these."""
        with self._lock:
            self._note(self._read_pages, self._read_gbps, pages, found, took_s)

    def wrote(self, pages: Sequence[Page], written: Sequence[bool], took_s: float) -> None:
        """A call has written these."""
        with self._lock:
            self._note(self._written_pages, self._write_gbps, pages, written, took_s)

    @staticmethod
    def _note(
        counts: list[int], rates: list[float], pages: Sequence[Page], done: Sequence[bool], took_s: float
    ) -> None:
        moved = [page for page, there in zip(pages, done, strict=True) if there]
        if moved and took_s > 0:
            counts.append(len(moved))
            rates.append(sum(len(piece) for page in moved for piece in page.buffers) / took_s / 1e9)

    def taken(self) -> tuple[list[int], list[int], list[float], list[float]]:
        """Pages read, pages written, GB/s read, GB/s written; each told once."""
        with self._lock:
            found = self._read_pages, self._written_pages, self._read_gbps, self._write_gbps
            self._fresh()
            return found
