"""The benchmark's command on a real server: it measures, is interrupted, goes on, and is verified."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ADMIN_KEY, PAGE, Server, until

from toolgap.bench.evidence import MANIFEST, TRIALS
from toolgap.bench.verify import problems

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ARMS = ("A", "B", "B-wait", "C", "D", "L2", "L1", "W")


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


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended; one that waits to be reaped has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def test_a_run_is_interrupted_goes_on_and_is_verified(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    environment = os.environ | {"TOOLGAP_CPU_FORK": "1"}
    with (tmp_path / "output").open("w+") as output:
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
    assert not [pid for pid in started if runs(pid)]
    played = lines(folder)
    assert 5 <= len(played) < 32

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
    assert len({trial["trial_id"] for trial in trials}) == len(trials) == 32
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


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "toolgap", "bench", "run", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_running_server_is_measured_and_left_as_it_was(server: Server, tmp_path: Path) -> None:
    policy = server.toolgap.overview().engine.prefetch_policy
    there = ("--url", server.url, "--api-key", ADMIN_KEY, "--storage-dir", str(server.storage))
    what = ("--prompt-tokens", "1024", "--gap-ms", "0", "--trials", "1", "--page-tokens", str(PAGE))
    folder = tmp_path / "there"
    done = bench("-o", str(folder), "--page-cache", "warm", *there, *what)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = [json.loads(line) for line in lines(folder)]
    assert {trial["cell"]["arm"] for trial in trials} == set(ARMS)
    assert {trial["trial_id"]: trial["invalid"] for trial in trials if trial["invalid"]} == {}
    assert problems(folder) == []
    assert server.toolgap.overview().engine.prefetch_policy == policy
    assert str(server.storage) not in (folder / MANIFEST).read_text()
    assert server.url not in (folder / MANIFEST).read_text()


OPTIONS = {
    "no-continuation": (),
    "early-return": (),
    "bystanders": ("window_s=3", "rate_per_s=3", "bystander_output_tokens=4", "restored_prompts=4"),
    "many-agents": ("agents=3", "turns=2", "time_scale=0.02", "most_gap_s=0.5", "lead_s=0.1"),
}


@pytest.mark.parametrize("recipe", OPTIONS)
def test_other_recipes_on_a_running_server(server: Server, tmp_path: Path, recipe: str) -> None:
    there = ("--url", server.url, "--api-key", ADMIN_KEY, "--storage-dir", str(server.storage))
    folder = tmp_path / recipe
    options = [part for option in OPTIONS[recipe] for part in ("--option", option)]
    what = ("--recipe", recipe, "--prompt-tokens", "1024", "--trials", "1", *options)
    done = bench("-o", str(folder), *there, *what)
    assert done.returncode == 0, done.stdout + done.stderr
    invalid = {
        line["trial_id"]: line["invalid"] for line in map(json.loads, lines(folder)) if line["invalid"]
    }
    assert invalid == {}
    assert problems(folder) == []


def test_what_keeps_a_run_from_starting_is_said(server: Server, tmp_path: Path) -> None:
    there = ("--url", server.url, "--api-key", ADMIN_KEY)
    wrong_page = bench("-o", str(tmp_path / "a"), *there, "--page-tokens", "64")
    assert (wrong_page.returncode, "--page-tokens" in wrong_page.stderr) == (1, True)
    no_servers_of_its_own = bench("--recipe", "overhead", "-o", str(tmp_path / "b"), *there)
    assert (no_servers_of_its_own.returncode, "leave --url out" in no_servers_of_its_own.stderr) == (1, True)
    nobody = bench("-o", str(tmp_path / "c"), "--url", "http://127.0.0.1:9")
    assert nobody.returncode == 3
    assert "Traceback" not in wrong_page.stderr + no_servers_of_its_own.stderr + nobody.stderr
