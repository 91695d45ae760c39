"""A run of ``toolgap bench gateway`` as a folder: what it was measured on, its trials, and its report."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec

from toolgap.bench import gateway_figures, machine
from toolgap.bench.errors import BenchError
from toolgap.bench.evidence import MANIFEST, REPORT, TRIALS, write
from toolgap.bench.gateway import QUIET_CORES, STEP_US, Plan, Trial
from toolgap.bench.tables import table

PACKAGES = ("uvicorn", "uvloop", "httptools", "starlette", "anyio", "httpx", "msgspec")
DIGESTED = ("toolgap/gateway/", "toolgap/bench/gateway")


class Manifest(msgspec.Struct, kw_only=True, tag_field="bench", tag="gateway"):
    """What a run was measured on, and what it was to do."""

    schema: Literal[1] = 1
    run: str
    """The folder's name."""
    began: str
    """ISO 8601, UTC."""
    plan: Plan
    hardware: dict[str, Any]
    scheduling: str
    """How the system chose between these processes and others."""
    software: dict[str, str]
    toolgap_sha256: dict[str, str]


class Recording:
    """A run's folder, new, to which trials are added.

    Raises:
        BenchError: it holds a run already, or cannot be written.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder = folder
        if (folder / MANIFEST).exists() or (folder / TRIALS).exists():
            raise BenchError(f"{folder} holds a run already: choose another folder")
        versions = machine.software()
        for package in PACKAGES:
            with suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(package)
        made = Manifest(
            run=folder.resolve().name,
            began=datetime.now(UTC).isoformat(timespec="seconds"),
            plan=plan,
            hardware=machine.hardware(),
            scheduling=_scheduling(),
            software={name: versions[name] for name in ("python", "toolgap", *PACKAGES) if name in versions},
            toolgap_sha256={
                name: digest
                for name, digest in machine.toolgap_digests().items()
                if name.startswith(DIGESTED)
            },
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
        except OSError as error:
            raise BenchError(f"cannot write to {folder}: {error.strerror}") from error

    def append(self, trials: Sequence[Trial]) -> None:
        """Add a round's trials, and write the report of all."""
        with (self.folder / TRIALS).open("ab") as file:
            file.writelines(msgspec.json.encode(trial) + b"\n" for trial in trials)
        make(self.folder)


def is_one(folder: Path) -> bool:
    """Whether a folder holds a run of this bench, as far as its manifest says."""
    try:
        found = msgspec.json.decode((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("bench") == "gateway"


def read(folder: Path) -> tuple[Manifest, list[Trial]]:
    """A run.

    Raises:
        BenchError: the folder holds none, or a file in it cannot be read.
    """
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        lines = (folder / TRIALS).read_bytes().splitlines()
        return manifest, [msgspec.json.decode(line, type=Trial) for line in lines]
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{folder}: {error}") from None


def make(folder: Path) -> Path:
    """Write a run's report from its manifest and trials.

    Raises:
        BenchError: as :func:`read`.
    """
    path = folder / REPORT
    write(path, report(*read(folder)).encode())
    return path


def problems(folder: Path) -> list[str]:
    """What does not agree with the trials; empty if everything does."""
    try:
        manifest, trials = read(folder)
        written = (folder / REPORT).read_text(encoding="utf-8")
    except (BenchError, OSError, UnicodeDecodeError) as error:
        return [str(error)]
    found = list(_strange(manifest, trials))
    if manifest.run != folder.resolve().name:
        found.append(f"the manifest is that of the run {manifest.run!r}")
    if report(manifest, trials) != written:
        found.append(f"{REPORT} is not what the trials give")
    return found


def _strange(manifest: Manifest, trials: Sequence[Trial]) -> Iterator[str]:
    plan = manifest.plan
    planned = [(number, arm) for number in range(plan.rounds) for arm in plan.arms]
    played = [(trial.round, trial.arm) for trial in trials]
    if sorted(planned) != sorted(played):
        yield f"{len(played)} trials are there, and {len(planned)} different ones were planned"
    for trial in trials:
        values = sum(count for _, count in trial.first_byte_us)
        if trial.unwatched:
            yield f"trial {trial.trial_id}: the observer missed {trial.unwatched} answers"
        if trial.asked != plan.streams * plan.requests or not trial.equal <= trial.whole == values:
            yield f"trial {trial.trial_id}: its counts do not agree"


def report(manifest: Manifest, trials: Sequence[Trial]) -> str:
    """The report, whole: the same bytes for the same manifest and trials."""
    plan = manifest.plan
    facts = [
        ["hardware", f"{manifest.hardware['cpu']}, {manifest.hardware['cores']} cores"],
        ["scheduling", manifest.scheduling],
        ["streams at once", str(plan.streams)],
        ["answers of each stream", str(plan.requests)],
        ["events of each answer", str(plan.events)],
        ["events a second and stream", f"{plan.events_per_s:g}"],
        ["rounds", str(plan.rounds)],
        ["began", manifest.began],
    ]
    others = sorted(trial.other_cores for trial in trials)
    beside = (
        f"Beside the trials other processes computed {others[0]:.2f} to {others[-1]:.2f} cores; a round in which it "
        f"was more than {QUIET_CORES} is a busy one, and is counted in the figures all the same."
        if others
        else "No trial was played."
    )
    parts = [
        f"# {manifest.run}",
        "Made by `toolgap bench gateway` from `manifest.json` and `trials.jsonl` alone; `toolgap bench verify` makes "
        "it again and compares. Client, gateway and upstream are processes of their own on one machine. The upstream "
        "is no engine: it streams chat chunks of SGLang's form and size at a model's pace, each answer with a tool "
        "call. By default the gateway reads every answer and asks for a restore, which this upstream refuses.",
        table(["", ""], facts),
        "## What the gateway adds",
        gateway_figures.text(gateway_figures.figures(plan, trials)),
        "Each figure is the median over the rounds, with the range and the number of rounds; within a round it is "
        "the quantile of the arm less that of the direct arm, over all requests or all events. *First byte* is "
        "from sending a request to the first byte of the answer's body, less the time that the upstream took for "
        "itself; *event* from the upstream's write of an event to its last byte at the client. Times are kept in steps "
        f"of {STEP_US} us. A stream is *equal* if its body has, byte for byte, what the direct one to the same "
        "request has.",
        beside,
        "## Trials",
        table(
            ["trial", "whole", "equal", "events", "gateway CPU, s", "others, cores"],
            [
                [
                    trial.trial_id,
                    f"{trial.whole} of {trial.asked}",
                    str(trial.equal),
                    str(trial.events),
                    f"{trial.cpu_s['gateway']:.2f}" if "gateway" in trial.cpu_s else "-",
                    f"{trial.other_cores:.2f}",
                ]
                for trial in trials
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _scheduling() -> str:
    names = {os.SCHED_OTHER: "as usual", os.SCHED_RR: "real time (SCHED_RR): before all usual processes"}
    policy = os.sched_getscheduler(0)
    return names.get(policy, f"policy {policy}")
