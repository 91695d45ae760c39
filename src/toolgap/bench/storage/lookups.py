"""How long a backend takes to say that pages are there."""

import hashlib
import time
from pathlib import Path

from toolgap.bench.storage.log import Log
from toolgap.bench.storage.ours import ToolgapContender, backend
from toolgap.bench.storage.pages import host_pool
from toolgap.bench.storage.records import Lookup
from toolgap.bench.storage.stock import StockFile, config

PAGES = 4096
"""57 thousand tokens at 16 a page; 262 thousand at 64."""


def measure_lookups(log: Log, work: Path, rounds: int) -> None:
    """Ask both backends for pages that they all hold, warm, in turns."""
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile

    keys = [hashlib.sha256(f"lookup/{page}".encode()).hexdigest() for page in range(PAGES)]
    pool, slots = host_pool(1, 64), 64
    for name in ("files", "store"):
        (work / name).mkdir(parents=True)
    files = HiCacheFile(config({}), str(work / "files"))
    # Its answer is whether there is a file: one byte says so as well as a page.
    files.batch_set(keys, [torch.zeros(1, dtype=torch.uint8)] * PAGES)
    with backend(work / "store", pool) as store:
        for at in range(0, PAGES, slots):
            store.batch_set_v1(keys[at : at + slots], torch.arange(slots))
        for number in range(rounds + 1):
            for name, asked in ((StockFile.name, files), (ToolgapContender().name, store)):
                began = time.perf_counter()
                found = asked.batch_exists(keys)
                lookup_s = time.perf_counter() - began
                if found != PAGES:
                    raise OSError(f"{name}: {found} of {PAGES} pages are there")
                if number:
                    # Not the first, which warms.
                    log.add(
                        Lookup(round=number - 1, contender=name, pages=PAGES, lookup_s=round(lookup_s, 6))
                    )
