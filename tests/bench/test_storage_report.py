"""The comparison of stores: its report comes from its trials alone, and says which of them it leaves out."""

from pathlib import Path

import msgspec
import pytest

from toolgap.bench.storage import report
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
    Writing,
)
from toolgap.bench.storage.segments import together

PAGE, PAGES = 1_000_000, 100


def reading(number: int, cache: str, contender: str, read_s: float, error: str | None = None) -> Reading:
    return Reading(
        round=number,
        page_bytes=PAGE,
        pages=PAGES,
        cache=cache,
        contender=contender,
        read_s=read_s,
        cpu_s=0.01,
        resident_share=0.0,
        load=1.0,
        error=error,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    setup = Setup(
        run=tmp_path.name,
        began="2026-01-01T00:00:00+00:00",
        seed=1,
        rounds=2,
        page_tokens=[16],
        total_bytes=PAGE * PAGES,
        pinned=False,
        contenders=[report.RAW, report.STOCK, "ours", "theirs"],
        left_out={"nobody's": "it is not installed"},
        hardware={"cpu": "a CPU", "cores": 2, "gpus": [], "storage": {"filesystem": "ext4", "device": "vda"}},
        software={"python": "3.11"},
    )
    trials = [
        reading(0, "cold", report.RAW, 0.1),
        reading(1, "cold", report.RAW, 0.2),
        reading(0, "cold", "ours", 0.2),
        reading(1, "cold", "ours", 0.2),
        reading(0, "cold", report.STOCK, 0.8),
        reading(0, "cold", "theirs", 0.1, error="short read"),
        reading(0, "warm", OURS, 0.10),
        reading(0, "warm", UNCHECKED, 0.09),
        reading(1, "warm", OURS, 0.10),
        reading(1, "warm", UNCHECKED, 0.07),
        reading(2, "warm", OURS, 0.10),
        Writing(page_bytes=PAGE, pages=PAGES, contender="ours", write_s=0.5),
        Hashing(
            round=0,
            checksum="xxh3_128 (xxhash)",
            piece_bytes=1000,
            total_bytes=10**9,
            hash_s=0.2,
            other_thread_share=1.0,
        ),
        Lookup(round=0, contender="ours", pages=4096, lookup_s=0.0015),
    ]
    (tmp_path / SETUP).write_bytes(msgspec.json.encode(setup))
    (tmp_path / TRIALS).write_bytes(b"".join(msgspec.json.encode(trial) + b"\n" for trial in trials))
    (tmp_path / REPORT).write_text(report.text(tmp_path))
    return tmp_path


def test_ratios_are_paired_by_round(folder: Path) -> None:
    lines = (folder / REPORT).read_text().splitlines()
    (ours,) = [line for line in lines if line.startswith("| ours | 0.50")]
    _, _, speed, of_raw, of_stock, cpu, _ = (cell.strip() for cell in ours.split("|"))
    assert speed == "0.50 [0.50, 0.50] (2)"
    assert of_raw == "0.75 [0.50, 1.00] (2)"
    # Only one round has both.
    assert of_stock == "4.00 [4.00, 4.00] (1)"
    assert cpu == "0.10"
    assert "| ours | 4,096 | 1.50 [1.50, 1.50] (1) |" in lines


def test_what_does_not_count_is_named_and_in_no_median(folder: Path) -> None:
    text = (folder / REPORT).read_text()
    assert "- nobody's: not measured: it is not installed" in text
    assert "- round 0, 1000000 B, cold, theirs: short read" in text
    assert "| theirs |" not in text


def test_a_changed_figure_is_found(folder: Path) -> None:
    assert report.problems(folder) == []
    written = (folder / REPORT).read_text()
    (folder / REPORT).write_text(written.replace("0.75", "0.85"))
    assert len(report.problems(folder)) == 1
    (folder / REPORT).unlink()
    assert len(report.problems(folder)) == 1


def test_neighbours_are_read_together() -> None:
    groups = together(10, 1 << 20)
    assert [len(group) for group in groups] == [4, 4, 2]
    assert [page for group in groups for page in group] == list(range(10))
    assert [len(group) for group in together(3, 5 << 20)] == [1, 1, 1]


def test_what_the_checksums_take_is_paired_by_round(folder: Path) -> None:
    assert "| 1.00 MB | - | 0.20 [0.10, 0.30] (2) |" in (folder / REPORT).read_text().splitlines()
