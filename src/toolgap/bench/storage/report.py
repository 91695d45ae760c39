"""``report.md`` of a comparison, from its setup and trials alone."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from toolgap.bench import tables
from toolgap.bench.spread import Spread
from toolgap.bench.storage.records import (
    OURS,
    REPORT,
    SETUP,
    TRIALS,
    UNCHECKED,
    Hashing,
    Lookup,
    Reading,
    Setup,
    Trial,
    Writing,
)

RAW, STOCK = "raw sequential read", "SGLang's file backend"

T = TypeVar("T")

COLUMNS = ["", "GB/s", f"x {RAW}", f"x {STOCK}", "CPU s a GB"]


def load(folder: Path) -> tuple[Setup, list[Trial]]:
    """A run's setup and trials.

    Raises:
        OSError: a file is not there.
        msgspec.DecodeError: a file is not what it should be.
    """
    setup = msgspec.json.decode((folder / SETUP).read_bytes(), type=Setup)
    decoder = msgspec.json.Decoder(Trial)
    return setup, [decoder.decode(line) for line in (folder / TRIALS).read_bytes().splitlines()]


def text(folder: Path) -> str:
    """The report, whole: the same bytes for the same files."""
    setup, trials = load(folder)
    parts = [
        f"# {setup.run}",
        f"Made by `scripts/store_parts.py report` from `{SETUP}` and `{TRIALS}` alone; "
        "`scripts/evidence.py` makes it again and compares.",
        tables.table(["", ""], _facts(setup, trials)),
        HOW,
    ]
    readings = _of(Reading, trials)
    for page_bytes in sorted({reading.page_bytes for reading in readings}):
        own = [reading for reading in readings if reading.page_bytes == page_bytes]
        count = own[0].pages
        parts.append(f"## {count} pages of {page_bytes / 1e6:.2f} MB ({page_bytes * count / 1e6:,.0f} MB)")
        for cache in ("cold", "warm"):
            rows = _rows(setup, [reading for reading in own if reading.cache == cache])
            if rows:
                parts += [f"### {cache}", tables.table(COLUMNS, rows)]
    if shares := _check_shares(readings):
        parts += ["## What the checksums take of a read", CHECKS, tables.table(["", "cold", "warm"], shares)]
    if hashings := _of(Hashing, trials):
        parts += ["## Checksums", HASHES, _hashes(hashings)]
    if lookups := _of(Lookup, trials):
        parts += ["## `batch_exists`", _lookups(lookups)]
    if writings := _of(Writing, trials):
        parts += ["## Writing, once a size", "Until the bytes are on the device.", _writes(writings)]
    invalid = [reading for reading in readings if reading.error]
    parts += [
        "## Left out",
        "\n".join(
            [
                *(f"- {name}: not measured: {why}" for name, why in setup.left_out.items()),
                *(
                    f"- round {one.round}, {one.page_bytes} B, {one.cache}, {one.contender}: {one.error}"
                    for one in invalid
                ),
            ]
        )
        or "Nothing.",
        "## Digests",
        "\n".join(
            f"- `{name}`: SHA-256 `{hashlib.sha256((folder / name).read_bytes()).hexdigest()}`"
            for name in (SETUP, TRIALS)
        ),
    ]
    return "\n\n".join(parts) + "\n"


HOW = (
    "Every reading reads all pages of a size into SGLang's own host pool (`page_first`: the keys and the values of a "
    "page are two blocks far apart), into slots in random order, and every byte is compared afterwards, outside of "
    "the measured time. *Cold*: the files were dropped from the page cache, and the share that stayed was checked; "
    "the host of a virtual machine may hold them all the same. *Warm*: they were read once before. The raw "
    "sequential read is of the same bytes, from one file into one buffer by one thread, 8 MiB at a time, around the "
    "page cache (`O_DIRECT`) in the cold tables and through it in the warm ones. All contenders take turns in each "
    "round, in random order; ratios are paired by round. Median [least, most] (rounds). Others worked on the "
    "machine meanwhile: each trial notes its load. torch has one thread: with more, its threads wait "
    "for each other on a busy machine, and the file backend, which copies pages with it, is several times slower."
)

CHECKS = (
    f"Of the time of *{OURS}*, the part by which it exceeds that of *{UNCHECKED}*: paired by round, "
    "median [least, most] (rounds); below 0 where it was faster with them."
)

HASHES = (
    "Over 256 MiB of memory, piece by piece, by one thread. *Another thread* is what a counting thread gets done "
    "during one call, of what it does alone: near 0 if the interpreter lock is held. google-crc32c takes "
    "nothing but `bytes` objects, so the host pool would be copied first: it is not measured."
)


def problems(folder: Path) -> list[str]:
    """What does not agree with the trials; empty if everything does."""
    try:
        expected = text(folder)
        written = (folder / REPORT).read_text(encoding="utf-8")
    except (OSError, msgspec.DecodeError) as error:
        return [f"{folder}: {error}"]
    return [] if expected == written else [f"{folder / REPORT} is not what the trials give"]


def _of(kind: type[T], trials: Iterable[object]) -> list[T]:
    return [trial for trial in trials if isinstance(trial, kind)]


def _facts(setup: Setup, trials: Sequence[Trial]) -> list[list[str]]:
    hardware, loads = setup.hardware, [reading.load for reading in _of(Reading, trials)]
    storage = hardware.get("storage") or {}
    load = Spread.of(loads)
    return [
        ["hardware", f"{hardware.get('cpu')}, {hardware.get('cores')} cores"],
        ["GPUs", ", ".join(str(gpu["name"]) for gpu in hardware.get("gpus") or []) or "none"],
        ["host pool", "pinned, as on a GPU" if setup.pinned else "pageable memory, written before"],
        ["storage", f"{storage.get('filesystem')} on {storage.get('device')}"],
        ["kernel", str(hardware.get("kernel"))],
        ["software", ", ".join(f"{name} {version}" for name, version in sorted(setup.software.items()))],
        ["rounds", str(setup.rounds)],
        ["seed", str(setup.seed)],
        ["began", setup.began],
        ["load of the machine", tables.spread(load)],
    ]


def _rows(setup: Setup, readings: Sequence[Reading]) -> list[list[str]]:
    valid = [reading for reading in readings if not reading.error]
    speed = {(one.contender, one.round): one.page_bytes * one.pages / one.read_s / 1e9 for one in valid}
    rows: list[tuple[float, list[str]]] = []
    for name in setup.contenders:
        own = {round_number: value for (who, round_number), value in speed.items() if who == name}
        spread = Spread.of(own.values())
        if spread is None:
            continue
        cpu = Spread.of(
            one.cpu_s / (one.page_bytes * one.pages / 1e9) for one in valid if one.contender == name
        )
        ratios = [
            tables.spread(
                Spread.of(
                    value / speed[of, round_number]
                    for round_number, value in own.items()
                    if (of, round_number) in speed
                )
            )
            for of in (RAW, STOCK)
        ]
        rows.append(
            (spread.p50, [name, tables.spread(spread), *ratios, tables.number(cpu.p50) if cpu else "-"])
        )
    return [row for _, row in sorted(rows, key=lambda row: -row[0])]


def _check_shares(readings: Sequence[Reading]) -> list[list[str]]:
    took = {
        (one.contender, one.page_bytes, one.cache, one.round): one.read_s for one in readings if not one.error
    }
    rows = []
    for page_bytes in sorted({one.page_bytes for one in readings}):
        row = [f"{page_bytes / 1e6:.2f} MB"]
        for cache in ("cold", "warm"):
            shares = [
                1 - took[UNCHECKED, page_bytes, cache, number] / read_s
                for (name, size, state, number), read_s in took.items()
                if (name, size, state) == (OURS, page_bytes, cache)
                and (UNCHECKED, page_bytes, cache, number) in took
            ]
            row.append(tables.spread(Spread.of(shares)))
        rows.append(row)
    return rows if any(set(row[1:]) != {"-"} for row in rows) else []


def _hashes(hashings: Sequence[Hashing]) -> str:
    rows = []
    for name in dict.fromkeys(one.checksum for one in hashings):
        own = [one for one in hashings if one.checksum == name]
        rows.append(
            [
                name,
                tables.spread(Spread.of(one.total_bytes / one.hash_s / 1e9 for one in own)),
                tables.spread(Spread.of(one.other_thread_share for one in own)),
            ]
        )
    return tables.table(["", "GB/s", "another thread"], rows)


def _lookups(lookups: Sequence[Lookup]) -> str:
    rows = []
    for name, count in dict.fromkeys((one.contender, one.pages) for one in lookups):
        own = [one.lookup_s * 1e3 for one in lookups if (one.contender, one.pages) == (name, count)]
        rows.append([name, f"{count:,}", tables.spread(Spread.of(own))])
    return tables.table(["", "pages", "ms"], rows)


def _writes(writings: Sequence[Writing]) -> str:
    sizes = sorted({one.page_bytes for one in writings})
    rows = []
    for name in dict.fromkeys(one.contender for one in writings):
        speed = {
            one.page_bytes: one.page_bytes * one.pages / one.write_s / 1e9
            for one in writings
            if one.contender == name
        }
        rows.append([name, *(tables.number(speed[size]) if size in speed else "-" for size in sizes)])
    return tables.table(["GB/s", *(f"{size / 1e6:.2f} MB" for size in sizes)], rows)
