#!/usr/bin/env python3
"""Tries to make a store lose or forge pages; prints what it did as JSON, and ends with 1 if it succeeded.

    scripts/store_fuzz.py kill --times 1000     two writers on one path, killed with SIGKILL in the middle of it
    scripts/store_fuzz.py fuzz --seconds 3600   random work, and random bytes of random files changed, cut and removed
    scripts/store_fuzz.py open --pages 1000000  how long a store of so many pages takes to open, and the memory

Everything follows from --seed but the moment of a kill and the threads' turns. Failures say their round's seed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import mmap
import os
import platform
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import shake_128
from pathlib import Path
from typing import Any
from unittest import mock

from toolgap.store import native
from toolgap.store.errors import StoreError
from toolgap.store.index import Entry, Kind
from toolgap.store.log import Log
from toolgap.store.namespace import Namespace
from toolgap.store.options import Fsync, Options, ReadPath
from toolgap.store.page import Page
from toolgap.store.record import Place, identity
from toolgap.store.store import Store

NAMESPACE = Namespace(model="fuzz", weights="1", dtype="bf16", layout="page_first", page_size_tokens=16)
KEYS = 64
LARGEST_BYTES = 40_000


class FoundError(Exception):
    """What must not be."""


def size_of(key: str) -> int:
    return int.from_bytes(shake_128(b"size" + key.encode()).digest(3), "little") % LARGEST_BYTES


def payload(key: str) -> bytes:
    return shake_128(key.encode()).digest(size_of(key))


def to_write(keys: Sequence[str]) -> list[Page]:
    return [Page(key, [memoryview(bytearray(payload(key)))]) for key in keys]


def read(store: Store, keys: Sequence[str], cancel: threading.Event | None = None) -> list[bool]:
    """Which of them are there.

    Raises:
        FoundError: one has wrong bytes.
    """
    pages = [Page(key, [memoryview(mmap.mmap(-1, size_of(key) or 1))[: size_of(key)]]) for key in keys]
    there = store.read(pages, cancel)
    for page, is_there in zip(pages, there, strict=True):
        if is_there and bytes(page.buffers[0]) != payload(page.key):
            raise FoundError(f"wrong bytes of {page.key}")
    return there


# --- Kills -----------------------------------------------------------------------------------------


def write_on(path: Path, seed: int, options: Options, acknowledged: int) -> None:
    """Write, read and evict until killed; tell of every page that was written."""
    chance = random.Random(seed)
    with Store.open(path, NAMESPACE, options) as store:
        while True:
            keys = [f"{seed}-{chance.randrange(10_000)}" for _ in range(chance.randint(1, 6))]
            for key, is_written in zip(keys, store.write(to_write(keys)), strict=True):
                if is_written:
                    os.write(acknowledged, f"{key}\n".encode())
            if chance.random() < 0.2:
                read(store, keys)
            if chance.random() < 0.05:
                store.gc()


def killed_writer(path: Path, seed: int, options: Options) -> tuple[int, int]:
    """Start one; returns its process id, and where it tells."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    status = 1
    try:
        os.close(reading)
        write_on(path, seed, options, writing)
    except BrokenPipeError:
        status = 0
    finally:
        # Not the parent's way out: its exits are the parent's.
        os._exit(status)


def run_kills(folder: Path, seed: int, times: int, tell: Callable[[int], None]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    chance = random.Random(seed)
    for number in range(times):
        limited = number % 2 == 1
        path = folder / ("limited" if limited else "unlimited")
        options = Options(
            limit_bytes=2_000_000 if limited else None,
            segment_bytes=chance.choice([100_000, 10_000_000]),
            fsync=Fsync.BATCH if number % 10 == 0 else Fsync.NONE,
        )
        if number % 8 < 2:
            shutil.rmtree(path, ignore_errors=True)
        writers = [killed_writer(path, seed * 1_000_000 + number * 2 + which, options) for which in range(2)]
        # Not before one of them has written something.
        select.select([reading for _, reading in writers], [], [], 10)
        threading.Event().wait(chance.uniform(0.0, 0.06))
        acknowledged: list[str] = []
        for child, _ in writers:
            os.kill(child, signal.SIGKILL)
        for child, reading in writers:
            _, status = os.waitpid(child, 0)
            if not os.WIFSIGNALED(status):
                raise FoundError(
                    f"kill {number}: the writer ended by itself, with {os.waitstatus_to_exitcode(status)}"
                )
            with os.fdopen(reading, "rb") as told:
                # The last line may be torn: pipes keep what they got, the process wrote whole lines.
                acknowledged += told.read().decode().split()
        counts["acknowledged_pages"] += len(acknowledged)
        with Store.open(path, NAMESPACE, options) as store:
            there = read(store, acknowledged)
            if not limited and not all(there):
                raise FoundError(
                    f"kill {number}: {there.count(False)} of {len(there)} written pages are lost"
                )
            verified = store.verify()
            # Damage would be a torn page that the index names.
            if verified.damaged_pages:
                raise FoundError(f"kill {number}: {verified.damaged_pages} torn pages were in the index")
            collected = store.gc()
            counts["checked_pages"] += verified.checked_pages
            counts["adopted_pages"] += collected.adopted_pages
            store.verify()
            store.check_integrity()
            if limited and store.stats().used_bytes > 2_000_000 + 2 * 6 * (LARGEST_BYTES + 8192):
                raise FoundError(f"kill {number}: {store.stats().used_bytes} bytes in use")
        counts["kills"] += len(writers)
        tell(number + 1)
    return dict(counts)


# --- Random work and random damage ---------------------------------------------------------------------


def damage(path: Path, chance: random.Random) -> str:
    """Do a random file harm; returns what."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    if not files:
        return "nothing to harm"
    file = chance.choice(files)
    what = chance.choices(
        ["flip", "zero", "garbage", "cut", "grow", "remove", "swap"], [12, 3, 3, 3, 1, 1, 1]
    )[0]
    with contextlib.suppress(FileNotFoundError):
        size = file.stat().st_size
        if what == "remove":
            file.unlink()
        elif what == "swap":
            shutil.copyfile(file, file.with_suffix(".swap"))
            chance.choice(files).replace(file.with_suffix(".swap2"))
            file.with_suffix(".swap").replace(chance.choice(files))
        elif size:
            start = chance.randrange(size)
            with file.open("r+b") as opened:
                opened.seek(start)
                if what == "flip":
                    right = opened.read(1)
                    opened.seek(start)
                    opened.write(bytes([right[0] ^ 1 << chance.randrange(8)]))
                elif what == "cut":
                    opened.truncate(start)
                elif what == "grow":
                    opened.seek(size)
                    opened.write(chance.randbytes(chance.randint(1, 9000)))
                else:
                    length = chance.randint(1, 9000)
                    opened.write(bytes(length) if what == "zero" else chance.randbytes(length))
    return f"{what} {file.suffix or file.name}"


def fuzz_round(path: Path, seed: int, counts: Counter[str]) -> None:
    """One store's life, with the compiled part or as where there is no compiler."""
    chance = random.Random(seed)
    way = chance.choice(["compiled", "python"])
    counts[f"rounds read by the {way} part"] += 1
    loaded = native.load() if way == "compiled" else None
    if way == "compiled" and loaded is None:
        raise SystemExit("a C compiler is needed: half of the rounds are to read with what it makes")
    with mock.patch.object(native, "load", return_value=loaded):
        life(path, chance, f"{seed}", counts)


def life(path: Path, chance: random.Random, name: str, counts: Counter[str]) -> None:
    """What one store goes through."""
    keys = [f"{name}-{number}" for number in range(KEYS)]

    def options() -> Options:
        return Options(
            limit_bytes=chance.choice([None, 300_000, 1_000_000]),
            fsync=chance.choices([Fsync.NONE, Fsync.BATCH], [9, 1])[0],
            read_path=chance.choice(list(ReadPath)),
            readers=chance.randint(1, 4),
            strip_bytes=chance.choice([10_000, 100_000, 4_000_000]),
            segment_bytes=chance.choice([50_000, 500_000, 50_000_000]),
        )

    def some() -> list[str]:
        return chance.sample(keys, chance.randint(1, 12))

    def reopened(which: int) -> None:
        stats = stores[which].stats()
        counts["pages read right"] += stats.read_pages
        counts["pages set aside"] += stats.damaged_pages
        for reason, pages in stats.failures.items():
            counts[f"not read or written: {reason}"] += pages
        stores[which].close()
        try:
            stores[which] = Store.open(path, NAMESPACE, options())
        except StoreError:
            # Where the label and every segment's first block are damaged, or the label's version is.
            counts["refused"] += 1
            shutil.rmtree(path, ignore_errors=True)
            stores[which] = Store.open(path, NAMESPACE, options())

    stores = [Store.open(path, NAMESPACE, options()) for _ in range(2)]
    try:
        for _ in range(chance.randint(5, 60)):
            what = chance.choices(
                ["write", "read", "together", "damage", "reopen", "gc", "verify", "cancel", "remove"],
                [30, 25, 15, 20, 8, 3, 2, 3, 0.5],
            )[0]
            counts[what] += 1
            which = chance.randrange(2)
            store = stores[which]
            if what == "write":
                store.write(to_write(some()))
            elif what == "read":
                read(store, some())
            elif what == "together":
                run_together(
                    [one_of_many(one, some(), chance.random()) for one in chance.choices(stores, k=6)]
                )
            elif what == "damage":
                counts[damage(path, chance)] += 1
            elif what == "reopen":
                reopened(which)
            elif what == "gc":
                with contextlib.suppress(StoreError):
                    store.gc(chance.choice([None, 100_000]))
            elif what == "verify":
                store.verify()
            elif what == "cancel":
                cancel = threading.Event()
                threading.Timer(chance.uniform(0, 0.002), cancel.set).start()
                read(store, keys, cancel)
            else:
                shutil.rmtree(path, ignore_errors=True)
                if chance.random() < 0.5:
                    reopened(which)
        for which in range(2):
            reopened(which)
            store = stores[which]
            # Whatever was damaged, it works again.
            store.verify()
            written = store.write(to_write(keys[:4]))
            if not all(written) or not all(read(store, keys[:4])):
                # What the index took for pages was found out by the read: the second time there is none left.
                written = store.write(to_write(keys[:4]))
                if not all(written) or not all(read(store, keys[:4])):
                    raise FoundError(f"it takes no pages any more: {store.stats()}")
    finally:
        for store in stores:
            store.close()


def one_of_many(store: Store, keys: Sequence[str], chance: float) -> Callable[[], object]:
    return (lambda: read(store, keys)) if chance < 0.5 else (lambda: store.write(to_write(keys)))


def run_together(work: Sequence[Callable[[], object]]) -> None:
    failures: list[BaseException] = []

    def do(item: Callable[[], object]) -> None:
        try:
            item()
        except BaseException as error:  # noqa: BLE001 - told by the caller
            failures.append(error)

    threads = [threading.Thread(target=do, args=(item,)) for item in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def run_fuzz(
    folder: Path, seed: int, seconds: float, rounds: int | None, tell: Callable[[int], None]
) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    until = time.monotonic() + seconds
    number = 0
    while number != rounds and time.monotonic() < until:
        path = folder / f"round-{number}"
        try:
            fuzz_round(path, seed + number, counts)
        except Exception as error:
            raise FoundError(f"round of seed {seed + number}: {type(error).__name__}: {error}") from error
        shutil.rmtree(path, ignore_errors=True)
        number += 1
        tell(number)
    files = len(list(Path("/proc/self/fd").iterdir()))
    if files > 40:
        raise FoundError(f"{files} files are open")
    return {"rounds": number, **dict(sorted(counts.items()))}


# --- Many pages ------------------------------------------------------------------------------------


def run_open(folder: Path, pages: int) -> dict[str, Any]:
    """Opens an index of so many pages; their segments are not there, and nobody reads."""
    path = folder / "many"
    with Store.open(path, NAMESPACE):
        pass
    digest = NAMESPACE.digest()
    page_bytes = 458_752
    log = Log(path, digest, writable=True)
    with log.locked():
        log.replace(
            Entry(
                Kind.PUT,
                identity(digest, str(number).encode()),
                Place(number // 500 + 1, number % 500 * page_bytes, 450_000),
            )
            for number in range(pages)
        )
    log.close()
    before = resident_bytes()
    started, busy = time.perf_counter(), time.process_time()
    store = Store.open(path, NAMESPACE)
    open_s, open_cpu_s = time.perf_counter() - started, time.process_time() - busy
    taken = resident_bytes() - before
    keys = [str(number) for number in range(4096)]
    exists_s, exists_cpu_s = [], []
    for _ in range(20):
        started, busy = time.perf_counter(), time.process_time()
        if not all(store.exists(keys)):
            raise FoundError("the index lost pages")
        exists_s.append(time.perf_counter() - started)
        exists_cpu_s.append(time.process_time() - busy)
    store.close()
    return {
        "pages": pages,
        "index_bytes": (path / "index.log").stat().st_size,
        "open_s": round(open_s, 3),
        "open_cpu_s": round(open_cpu_s, 3),
        "memory_bytes_a_page": round(taken / pages),
        "exists_4096_ms": sorted(round(seconds * 1e3, 3) for seconds in exists_s),
        "exists_4096_cpu_ms": sorted(round(seconds * 1e3, 3) for seconds in exists_cpu_s),
    }


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# --- Command line ----------------------------------------------------------------------------------


def without_folders(arguments: Sequence[str]) -> list[str]:
    """Less those that name paths of this machine."""
    kept: list[str] = []
    left = iter(arguments)
    for argument in left:
        if argument in ("--folder", "--output"):
            next(left, None)
        else:
            kept.append(argument)
    return kept


def file_system(folder: Path) -> str:
    """What kind it is, such as ext4."""
    told = subprocess.run(
        ["stat", "-f", "-c", "%T", str(folder)], capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or "unknown"


def revision() -> str:
    """The commit that is tried, with a plus if files differ from it."""
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            ["git", "diff", "--quiet", "HEAD", "--", "../src", "."], cwd=here, check=False
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if changed.returncode else "")


@contextlib.contextmanager
def folder_of(given: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="toolgap-store-fuzz-", dir=given) as name:
        yield Path(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["kill", "fuzz", "open"])
    parser.add_argument("--times", type=int, default=1000, help="rounds of two kills")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--rounds", type=int, help="end after so many, if the seconds have not passed")
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, help="on the disk to test; the system's temporary folder otherwise"
    )
    parser.add_argument("--revision", help="the commit that is tried, where git cannot tell")
    parser.add_argument("--output", type=Path, help="write the summary there too")
    options = parser.parse_args()
    logging.getLogger("toolgap.store").setLevel(logging.ERROR)

    def tell(number: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{number} rounds", end="", file=sys.stderr, flush=True)

    started, tried = time.monotonic(), options.revision or revision()
    found = None
    result: dict[str, Any] = {}
    with folder_of(options.folder) as folder:
        kind = file_system(folder)
        try:
            if options.what == "kill":
                result = run_kills(folder, options.seed, options.times, tell)
            elif options.what == "fuzz":
                result = run_fuzz(folder, options.seed, options.seconds, options.rounds, tell)
            else:
                result = run_open(folder, options.pages)
        except FoundError as error:
            found = str(error)
    summary = {
        "revision": tried,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "command": " ".join(["scripts/store_fuzz.py", *without_folders(sys.argv[1:])]),
        "file_system": kind,
        "seed": options.seed,
        "took_s": round(time.monotonic() - started, 1),
        "found": found,
        **result,
    }
    text = json.dumps(summary, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if found is None else 1


if __name__ == "__main__":
    sys.exit(main())
