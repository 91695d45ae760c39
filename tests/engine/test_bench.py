"""The benchmark's command on a real server: it measures, is interrupted, goes on, and is verified."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import until

from toolgap.bench.evidence import MANIFEST, TRIALS
from toolgap.bench.verify import problems

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ARMS = ("A", "B", "B-wait", "C", "L2", "L1", "W")


def command(folder: Path, model: Path, *more: str) -> list[str]:
    arms = [part for arm in ARMS for part in ("--arm", arm)]
    return [
        *(sys.executable, "-m", "toolgap", "bench", "run", "--cpu", "-o", str(folder), "--model", str(model)),
        *("--model-name", "tiny", "--prompt-tokens", "1024", "--gap-ms", "0", "--gap-ms", "300"),
        *("--trials", "2", *arms, *more),
    ]


def lines(folder: Path) -> list[bytes]:
    path = folder / TRIALS
    return path.read_bytes().splitlines() if path.exists() else []


def descendants(pid: int) -> set[int]:
    """Processes that a process has started, and those that they have."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


def test_a_run_is_interrupted_goes_on_and_is_verified(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    environment = os.environ | {"TOOLGAP_CPU_FORK": "1"}
    output = (tmp_path / "output").open("w+")
    first = subprocess.Popen(command(folder, model), env=environment, stdout=output, stderr=output)
    try:
        until(
            "five trials were played",
            lambda: len(lines(folder)) >= 5 or first.poll() is not None,
            deadline_s=400.0,
        )
        started = descendants(first.pid)
        first.send_signal(signal.SIGINT)
        status = first.wait(120)
    finally:
        first.kill()
    output.seek(0)
    assert status == 130, output.read()
    assert started
    assert not [pid for pid in started if Path(f"/proc/{pid}/cmdline").exists()]
    played = lines(folder)
    assert 5 <= len(played) < 28

    # As if it had been killed while it wrote a line.
    with (folder / TRIALS).open("ab") as file:
        file.write(b'{"trial_id":"r1-1024-A')
    done = subprocess.run(
        command(folder, model), env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    all_lines = lines(folder)
    trials = [json.loads(line) for line in all_lines]
    assert all_lines[: len(played)] == played
    assert len({trial["trial_id"] for trial in trials}) == len(trials) == 28
    assert problems(folder) == []
    # Real servers, idle machines or not: what a trial found where does not depend on time.
    assert {trial["trial_id"]: trial["invalid"] for trial in trials if trial["invalid"]} == {}
    manifest = json.loads((folder / MANIFEST).read_bytes())
    assert manifest["sglang_files_changed"] == []
    assert str(tmp_path) not in (folder / MANIFEST).read_text()

    other = subprocess.run(
        command(folder, model, "--seed", "2"), env=environment, capture_output=True, text=True, timeout=120
    )
    assert other.returncode == 1
    assert "plan.seed" in other.stderr
    assert lines(folder) == all_lines
