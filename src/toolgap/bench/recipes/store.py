"""What Toolgap's store brings, apart from restoring ahead: arms B and C over it and over SGLang's file backend."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import msgspec

from toolgap.bench import tables
from toolgap.bench.arms import ARMS, Arm
from toolgap.bench.evidence import Manifest
from toolgap.bench.plan import Cell, Plan
from toolgap.bench.play import play
from toolgap.bench.recipe import Recipe, Step
from toolgap.bench.records import Trial
from toolgap.bench.server import Setup
from toolgap.bench.spread import Spread
from toolgap.bench.stage import Stage
from toolgap.bench.validity import RULES, disagreements, judge

FILE, STORE = "file", "store"
BACKENDS = {
    FILE: "SGLang's file backend",
    STORE: "Toolgap's store, every page of which is checked as it is read",
}


class StoreBeside(Recipe[Trial]):
    """Two servers that differ in nothing but their L3, in turn. An arm here is ``ARM/BACKEND``."""

    name = "store"
    says = "arms over Toolgap's store beside the same over SGLang's file backend"
    trial_type = Trial
    defaults: ClassVar[dict[str, Any]] = {
        "gaps_ms": (0.0, 3000.0),
        "arms": (Arm.ON_REQUEST, Arm.AHEAD),
    }
    own_servers = True

    def cells(self, plan: Plan) -> list[Cell]:
        """Every arm over both, at every gap; what no gap changes is measured at one of them alone."""
        return [
            Cell(prompt_tokens=tokens, arm=f"{arm}/{backend}", gap_ms=gap_ms)
            for tokens in plan.prompt_tokens
            for arm in plan.arms
            for gap_ms in (
                plan.gaps_ms if arm in (Arm.AHEAD, Arm.AHEAD_DEVICE, Arm.WARM_UP) else plan.gaps_ms[:1]
            )
            for backend in BACKENDS
        ]

    def steps(
        self, plan: Plan, stage: Stage | None, setup: Setup | None, done: set[str], say: Callable[[str], None]
    ) -> Iterator[Step]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        assert setup is not None
        with ExitStack() as servers:
            stages: dict[str, Stage] = {}
            for backend in BACKENDS:
                say(f"starting SGLang over {BACKENDS[backend]}")
                log = setup.log.with_name(f"{setup.log.stem}-{backend}{setup.log.suffix}")
                # SGLang's default on a GPU, and what both backends read into without many small pieces.
                arguments = ("--hicache-mem-layout", "page_first", *setup.arguments)
                own = replace(setup, store=backend == STORE, log=log, arguments=arguments)
                stages[backend] = servers.enter_context(own.running())
            for cell in {(cell.prompt_tokens, cell.arm): cell for cell in self.cells(plan)}.values():
                say(f"warming up: {cell.prompt_tokens:,} tokens, {cell.arm}")
                arm, backend = cell.arm.split("/")
                play(stages[backend], Cell(prompt_tokens=cell.prompt_tokens, arm=arm, gap_ms=0.0), 1_000_000)
            for trial_id, cell, number in self.left(plan, done):
                yield Step(trial_id, partial(_played, stages, cell, number))

    def ttft_ms(self, trial: Trial) -> Sequence[float]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        return (trial.ttft_ms,)

    def judge(self, trial: Trial) -> list[str]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        arm, _, _ = trial.cell.arm.partition("/")
        return judge(msgspec.structs.replace(trial, cell=msgspec.structs.replace(trial.cell, arm=arm)))

    def report(self, manifest: Manifest, trials: Sequence[Trial]) -> str:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        plan = manifest.plan
        parts = [
            "Two servers run side by side and differ in nothing but their L3: "
            + "; ".join(f"*{name}* is {says}" for name, says in BACKENDS.items())
            + ". Both get the same prompts, and their trials alternate in random order. What restoring ahead brings "
            "is C against B over the same backend; what the store brings is a row against the one below it."
        ]
        for tokens in plan.prompt_tokens:
            own = [t for t in trials if t.cell.prompt_tokens == tokens and not t.invalid]
            if own:
                parts += [
                    f"## {tokens:,} prompt tokens, {own[0].prefix_tokens:,} of them the prefix",
                    _times(plan, own),
                    _ratios(plan, own),
                    _restores(own),
                ]
        parts += [
            "## Arms",
            "\n".join(f"- **{arm}** {ARMS[Arm(arm)]}" for arm in plan.arms),
            "## Validity",
            "A trial counts only if every rule holds, by the engine's own counters. The store's pages share files, so "
            "that its page cache is that of the whole store:",
            "\n".join(f"- *{rule}*: {says}" for rule, says in RULES.items()),
            tables.outputs(trials),
            tables.listed("Prompts whose reference differs between trials", disagreements(trials)),
        ]
        return "\n\n".join(part for part in parts if part)


def _played(stages: dict[str, Stage], cell: Cell, round_number: int) -> Trial:
    arm, _, backend = cell.arm.partition("/")
    trial = play(stages[backend], msgspec.structs.replace(cell, arm=arm), round_number)
    return msgspec.structs.replace(trial, cell=cell, trial_id=cell.trial_id(round_number))


def _of(trials: Sequence[Trial], arm: str, backend: str, gap_ms: float) -> Spread | None:
    return Spread.of(t.ttft_ms for t in trials if (t.cell.arm, t.cell.gap_ms) == (f"{arm}/{backend}", gap_ms))


def _times(plan: Plan, trials: Sequence[Trial]) -> str:
    rows = [
        [
            f"**{arm}** {backend}",
            *(tables.spread(_of(trials, arm, backend, gap_ms)) for gap_ms in plan.gaps_ms),
        ]
        for arm in plan.arms
        for backend in (STORE, FILE)
    ]
    head = ["TTFT, ms", *(f"gap {gap_ms:g} ms" for gap_ms in plan.gaps_ms)]
    return f"Median [least, most] of the valid trials (their number).\n\n{tables.table(head, rows)}"


def _ratios(plan: Plan, trials: Sequence[Trial]) -> str:
    first = plan.gaps_ms[0]
    rows = []
    for gap_ms in plan.gaps_ms:
        row = [f"{gap_ms:g} ms"]
        row += [
            # What no gap changes was measured at the first one.
            tables.ratio(_of(trials, Arm.ON_REQUEST, backend, first), _of(trials, Arm.AHEAD, backend, gap_ms))
            for backend in (STORE, FILE)
        ]
        row.append(
            tables.ratio(_of(trials, Arm.ON_REQUEST, FILE, first), _of(trials, Arm.ON_REQUEST, STORE, first))
        )
        row.append(tables.ratio(_of(trials, Arm.AHEAD, FILE, gap_ms), _of(trials, Arm.AHEAD, STORE, gap_ms)))
        rows.append(row)
    head = ["gap", "B / C over the store", "B / C over file", "file / store in B", "file / store in C"]
    return "Ratios of medians.\n\n" + tables.table(head, rows)


def _restores(trials: Sequence[Trial]) -> str:
    """How long the reads of arm C took, from storage's answer to the last page."""
    rows = []
    for backend in (STORE, FILE):
        reads = [
            (t.operation.read_s - t.operation.queried_s) * 1e3
            for t in trials
            if t.cell.arm.endswith(f"/{backend}")
            and t.operation is not None
            and t.operation.read_s is not None
            and t.operation.queried_s is not None
        ]
        asked = [
            t.operation.queried_s * 1e3
            for t in trials
            if t.cell.arm.endswith(f"/{backend}")
            and t.operation is not None
            and t.operation.queried_s is not None
        ]
        rows.append([backend, tables.spread(Spread.of(asked)), tables.spread(Spread.of(reads))])
    return "The restores of arm C, in ms.\n\n" + tables.table(["", "storage asked", "read"], rows)
