"""Plays a comparison: every contender, page size and state of the page cache, interleaved, round by round."""

import os
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from toolgap.bench import pagecache
from toolgap.bench.storage.contenders import Contender, Read
from toolgap.bench.storage.log import Log
from toolgap.bench.storage.pages import TOKEN_BYTES, Pages, Target, host_pool
from toolgap.bench.storage.records import Reading, Setup, Writing
from toolgap.bench.storage.segments import Sequential


def play(
    setup: Setup,
    contenders: Sequence[Contender],
    work: Path,
    log: Log,
    *,
    deadline_s: float,
    say: Callable[[str], None],
) -> None:
    """Measure until the rounds are done or the deadline is near.

    Args:
        setup: The plan.
        contenders: Who takes part.
        work: A folder for their data; what they write there is removed.
        log: Where the trials go.
        deadline_s: By :func:`time.monotonic`; no trial begins after it.
        say: Told what goes on.
    """
    for position, page_tokens in enumerate(setup.page_tokens):
        # Sizes get equal shares of what time is left.
        now_s = time.monotonic()
        ends_s = now_s + (deadline_s - now_s) / (len(setup.page_tokens) - position)
        count = setup.total_bytes // (page_tokens * TOKEN_BYTES)
        pages = Pages.random(page_tokens, count, setup.seed)
        target = Target(host_pool(page_tokens, count, pinned=setup.pinned), page_tokens, count, setup.seed)
        folders: dict[str, Path] = {}
        for contender in contenders:
            if contender.data in folders:
                continue
            folders[contender.data] = folder = work / f"{page_tokens}-{len(folders)}"
            folder.mkdir(parents=True)
            target.fill(pages)
            began = time.perf_counter()
            contender.write(folder, pages, target)
            log.add(
                Writing(
                    page_bytes=pages.page_bytes,
                    pages=count,
                    contender=contender.data,
                    write_s=time.perf_counter() - began,
                )
            )
        for number in range(setup.rounds):
            order = [(contender, cache) for contender in contenders for cache in contender.caches]
            if time.monotonic() > ends_s:
                say(f"the time is up before round {number} of pages of {page_tokens} tokens")
                break
            random.Random(f"{setup.seed}/{page_tokens}/{number}").shuffle(order)  # noqa: S311 - to be repeatable
            for contender, cache in order:
                if time.monotonic() > ends_s:
                    break
                reading = measure(contender, cache, folders[contender.data], pages, target, number)
                log.add(reading)
                found = reading.error or f"{pages.total_bytes / reading.read_s / 1e9:.2f} GB/s"
                say(f"{pages.page_bytes / 1e6:.2f} MB, round {number}, {cache}: {contender.name}: {found}")
        for folder in folders.values():
            shutil.rmtree(folder)


def measure(
    contender: Contender, cache: str, folder: Path, pages: Pages, target: Target, round_number: int
) -> Reading:
    """One reading of all pages."""
    files = contender.files(folder)
    target.clear()
    error, read_s, cpu_s = None, 0.0, 0.0
    try:
        if cache == "cold":
            pagecache.drop(files)
        else:
            pagecache.warm(files)
        share = pagecache.resident_share(files)
        opened: AbstractContextManager[Read] = (
            contender.in_cache(folder, pages, cold=cache == "cold")
            if isinstance(contender, Sequential)
            else contender.opened(folder, pages, target)
        )
        with opened as read:
            cpu, began = time.process_time(), time.perf_counter()
            read()
            read_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    except (OSError, pagecache.PageCacheError) as failed:
        error, share = str(failed), 0.0
    # The raw read has a buffer of its own, and has looked at it.
    if error is None and not isinstance(contender, Sequential) and not target.holds(pages):
        error = "the pages in the host pool are not those that were written"
    return Reading(
        round=round_number,
        page_bytes=pages.page_bytes,
        pages=len(pages.keys),
        cache=cache,
        contender=contender.name,
        read_s=round(read_s, 6),
        cpu_s=round(cpu_s, 6),
        resident_share=round(share, 4),
        load=round(os.getloadavg()[0], 2),
        error=error,
    )
