#!/usr/bin/env python3
"""Compares ways to keep pages of KV on a disk: what Toolgap's store could be built on, and what it is.

usage: store_parts.py run OUT [--with rivals] [--rivals FOLDER] [--rounds N] [--megabytes N] ...
       store_parts.py report OUT

The rivals are no dependencies of Toolgap. Install them into a virtual environment of their own
(`pip install crc32c blake3 isal lmdb rocksdict liburing nixl-cu12`), and name its site-packages
with --rivals: what is missing there is left out and named in the report.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from toolgap.bench import machine
from toolgap.bench.storage import checksums, report
from toolgap.bench.storage.contenders import Contender
from toolgap.bench.storage.log import Log
from toolgap.bench.storage.lookups import measure_lookups
from toolgap.bench.storage.ours import ToolgapContender
from toolgap.bench.storage.records import REPORT, Setup
from toolgap.bench.storage.rivals import IoUring, Lmdb, Nixl, RocksDb
from toolgap.bench.storage.segments import Segments, Sequential
from toolgap.bench.storage.stock import StockFile

CPU = "TOOLGAP_STORE_PARTS_CPU"
"""Set in the process that has the environment of the cpu profile."""

PACKAGES = ("lmdb", "rocksdict", "nixl-cu12", "liburing", "xxhash", "crc32c", "blake3", "isal")

HASHED_BYTES, PIECE_BYTES = 256 << 20, 229_376

Made = tuple[str, Callable[[], Contender]]

ALWAYS: tuple[Made, ...] = (
    ("", Sequential),
    ("", StockFile),
    ("", ToolgapContender),
    ("", lambda: ToolgapContender(checked=False)),
    ("", lambda: ToolgapContender(compiled=False)),
)

RIVALS: tuple[Made, ...] = (
    ("", lambda: Segments(1)),
    ("", lambda: Segments(2)),
    ("", lambda: Segments(4)),
    ("", lambda: Segments(1, direct=True)),
    ("", lambda: Segments(2, direct=True)),
    ("", lambda: Segments(4, direct=True)),
    ("xxhash", lambda: Segments(4, checksum=True)),
    ("xxhash", lambda: Segments(4, direct=True, checksum=True)),
    ("lmdb", lambda: Lmdb(1)),
    ("lmdb", lambda: Lmdb(4)),
    ("rocksdict", lambda: RocksDb(1)),
    ("rocksdict", lambda: RocksDb(4)),
    ("nixl-cu12", lambda: Nixl("uring")),
    ("nixl-cu12", lambda: Nixl("uring", direct=True)),
    ("nixl-cu12", lambda: Nixl("aio")),
    ("nixl-cu12", lambda: Nixl("aio", direct=True)),
    ("liburing", lambda: IoUring()),
    ("liburing", lambda: IoUring(direct=True)),
)
"""The package that each needs."""


def main() -> int:
    options = _options()
    if options.action == "report":
        (options.out / REPORT).write_text(report.text(options.out), encoding="utf-8")
        return 0
    if not options.gpu and CPU not in os.environ:
        from toolgap.cpu.launch import cpu_environment

        environment = cpu_environment(os.environ) | {CPU: "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    if options.gpu:
        from sglang.srt.plugins import load_plugins

        # What makes SGLang's kernels load on this machine may be a plugin.
        load_plugins()
    if options.rivals:
        sys.path.append(str(options.rivals))
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    import torch

    from toolgap.bench.storage.run import play

    # SGLang's file backend copies pages with torch, whose threads would wait for each other on a busy machine.
    torch.set_num_threads(1)
    ends = time.monotonic() + options.deadline
    versions = {name: found for name in PACKAGES if (found := _version(name))}
    contenders: list[Contender] = []
    left_out: dict[str, str] = {}
    for package, make in (*ALWAYS, *(RIVALS if "rivals" in options.parts else ())):
        contender = make()
        if package and package not in versions:
            left_out[contender.name] = f"{package} is not installed"
        else:
            contenders.append(contender)
    work = options.work / f"store-parts-{os.getpid()}"
    setup = Setup(
        run=options.out.resolve().name,
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        seed=options.seed,
        rounds=options.rounds,
        page_tokens=options.page_tokens,
        total_bytes=options.megabytes * 1_000_000,
        pinned=options.gpu,
        contenders=[contender.name for contender in contenders],
        left_out=left_out,
        hardware=machine.hardware(options.work),
        software=machine.software() | versions,
    )
    log = Log(options.out, setup)
    try:
        if "rivals" in options.parts:
            _hash(log, options.rounds)
        measure_lookups(log, work, options.rounds)
        play(setup, contenders, work, log, deadline_s=ends, say=lambda line: print(line, flush=True))
    finally:
        log.close()
        shutil.rmtree(work, ignore_errors=True)
    (options.out / REPORT).write_text(report.text(options.out), encoding="utf-8")
    return 0


def _hash(log: Log, rounds: int) -> None:
    memory = memoryview(os.urandom(1 << 20) * (HASHED_BYTES >> 20))
    for number in range(rounds):
        for name in checksums.CANDIDATES:
            try:
                log.add(checksums.measure(name, memory, PIECE_BYTES, number))
            except ImportError as error:
                print(f"{name}: {error}", flush=True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--with", dest="parts", action="append", choices=("rivals",), default=[])
    parser.add_argument("--rivals", type=Path, help="site-packages that hold them")
    parser.add_argument("--gpu", action="store_true", help="SGLang as it is, without the cpu profile")
    parser.add_argument("--work", type=Path, default=Path.cwd(), help="folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=256, help="of pages a size")
    parser.add_argument("--page-tokens", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=540.0, help="seconds after which no trial begins")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
