"""The figures that the default policy follows from: evidence/policy-simulation/."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import msgspec

from toolgap.bench.tables import number, table
from toolgap.bench.workload import load
from toolgap.gateway.simulate import DEFAULT, NOTHING, POLICIES, Machine, Played, play

FOLDER = "policy-simulation"
TURNS, FIGURES, REPORT = "turns.csv", "figures.json", "report.md"

Gap = Literal["raw", "corrected"]
AGAIN = (NOTHING, DEFAULT, f"{DEFAULT}, a hint at half the gap")
"""What is simulated again to verify."""

GAPS: tuple[Gap, ...] = ("raw", "corrected")
AGENTS = (32, 48)
SEEDS = (0, 1)

MACHINE = Machine(
    agents=0,
    host_tokens=3_700_000,
    read_tokens_per_s=25_000,
    timeout_s=(1.0, 0.25),
    piece_tokens=8192,
    prefill_tokens_per_s=16_000,
    output_tokens_per_s=50,
    lease_share=0.25,
)
"""An H200 with a model of 7 billion parameters: rates as in evidence/h200-7b-30000, SGLang's default of twice
the device's tokens in host memory, and its timeout for reads."""


class Run(NamedTuple):
    """One simulation."""

    gap: Gap
    agents: int
    policy: str
    seed: int
    played: Played


def runs(
    folder: Path, *, policies: Sequence[str], agents: Sequence[int], seeds: Sequence[int]
) -> Iterator[Run]:
    """Simulate these, with the turns of a folder."""
    for gap in GAPS:
        sessions = load(folder / TURNS, gap)
        for count in agents:
            machine = MACHINE._replace(agents=count)
            for policy in policies:
                for seed in seeds:
                    yield Run(gap, count, policy, seed, play(sessions, machine, POLICIES[policy], seed=seed))


def write(folder: Path) -> None:
    """Simulate everything and write figures and report: some minutes."""
    made = list(runs(folder, policies=list(POLICIES), agents=AGENTS, seeds=SEEDS))
    rows = [{**run._asdict(), "played": run.played._asdict()} for run in made]
    lines = ",\n".join(json.dumps(row) for row in rows)
    (folder / FIGURES).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    (folder / REPORT).write_text(report(made), encoding="utf-8")


def read(folder: Path) -> list[Run]:
    """The runs of a folder.

    Raises:
        OSError, msgspec.MsgspecError: there are none, or they are malformed.
    """
    rows = msgspec.json.decode((folder / FIGURES).read_bytes())
    return [Run(**{**row, "played": Played(**row["played"])}) for row in rows]


def problems(folder: Path) -> list[str]:
    """What is wrong with a folder: its report, or one of a few runs that are made again."""
    found = read(folder)
    wrong = []
    if (folder / REPORT).read_text(encoding="utf-8") != report(found):
        wrong.append(f"{REPORT} does not say what {FIGURES} does")
    again = runs(folder, policies=AGAIN, agents=AGENTS[:1], seeds=SEEDS[:1])
    wrong += [
        f"{run.policy}, {run.gap} gaps, {run.agents} agents: not what comes of it today"
        for run in again
        if run not in found
    ]
    return wrong


def report(made: Sequence[Run]) -> str:
    """The tables, as Markdown."""
    parts = [
        "# When to restore: policies in simulation",
        "Made from `figures.json` by `toolgap.gateway.policy_evidence`; README.md says how. Every figure is the mean "
        f"of {len(SEEDS)} simulations; *saved* is the share of the oracle's gain, who has every prefix in host memory "
        "in time and so saves all of the time that continuations wait for storage or recomputation; in brackets, "
        "of each simulation. Below 0 the policy makes continuations slower. Tokens are in millions: read "
        "ahead, of that evicted again before it was used or never used (*wasted*), and of other conversations "
        "evicted for it.",
    ]
    head = ["policy", "stalled", "waited, s", "p99, s", "saved", "read ahead", "wasted", "evicted", "submits"]
    for gap in GAPS:
        for agents in AGENTS:
            own = [run for run in made if (run.gap, run.agents) == (gap, agents)]
            base = {run.seed: run.played.stall_s for run in own if run.policy == NOTHING}
            rows = []
            for policy in POLICIES:
                mine = [run for run in own if run.policy == policy]
                saved = [1 - run.played.stall_s / base[run.seed] for run in mine]
                each = ", ".join(f"{share:.0%}" for share in saved)
                rows.append(
                    [
                        policy,
                        number(fmean(run.played.stalled / run.played.continuations for run in mine) * 100)
                        + " %",
                        number(fmean(run.played.stall_s for run in mine)),
                        number(fmean(run.played.stall_p99_s for run in mine)),
                        f"{fmean(saved):.0%} [{each}]",
                        number(fmean(run.played.restored_tokens for run in mine) / 1e6),
                        number(fmean(run.played.wasted_tokens for run in mine) / 1e6),
                        number(fmean(run.played.evicted_tokens for run in mine) / 1e6),
                        number(fmean(run.played.submits for run in mine)),
                    ]
                )
            count = own[0].played.continuations
            parts += [f"## {agents} agents at once, {gap} gaps, {count:,} continuations", table(head, rows)]
    return "\n\n".join(parts) + "\n"
