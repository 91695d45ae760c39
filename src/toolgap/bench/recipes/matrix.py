"""Every arm at every gap and prompt size."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from toolgap.bench import charts, tables
from toolgap.bench.arms import ARMS, Arm
from toolgap.bench.evidence import Manifest
from toolgap.bench.plan import Cell, Plan
from toolgap.bench.play import play
from toolgap.bench.recipe import Recipe, Step
from toolgap.bench.records import Trial
from toolgap.bench.server import Setup
from toolgap.bench.spread import Spread
from toolgap.bench.stage import Stage
from toolgap.bench.validity import LOAD_BACK_S, PREFETCHED, RULES, disagreements, judge


class Matrix(Recipe[Trial]):
    """Arms by gaps by prompt sizes."""

    name = "matrix"
    says = "every arm at every gap and prompt size"
    trial_type = Trial

    def cells(self, plan: Plan) -> list[Cell]:
        """What is measured in every round; arms that no gap changes are measured at the gaps as well."""
        only: dict[str, list[float]] = plan.options.get("only_gaps_ms", {})
        return [
            Cell(prompt_tokens=tokens, arm=arm, gap_ms=gap_ms)
            for tokens in plan.prompt_tokens
            for arm in plan.arms
            for gap_ms in only.get(arm, plan.gaps_ms)
        ]

    def steps(
        self, plan: Plan, stage: Stage | None, setup: Setup | None, done: set[str], say: Callable[[str], None]
    ) -> Iterator[Step]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        assert stage is not None
        warm_up(stage, self.cells(plan), say)
        for trial_id, cell, number in self.left(plan, done):
            yield Step(trial_id, partial(play, stage, cell, number))

    def ttft_ms(self, trial: Trial) -> Sequence[float]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        return (trial.ttft_ms,)

    def judge(self, trial: Trial) -> list[str]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        return judge(trial)

    def report(self, manifest: Manifest, trials: Sequence[Trial]) -> str:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        plan = manifest.plan
        parts = []
        for tokens in plan.prompt_tokens:
            own = [trial for trial in trials if trial.cell.prompt_tokens == tokens]
            if own:
                parts += [
                    f"## {tokens:,} prompt tokens, {own[0].prefix_tokens:,} of them the prefix",
                    self._times(plan, own),
                    self._ratios(plan, own),
                    timeline(plan, own),
                    self._observations(own),
                ]
        parts += [
            "## Arms",
            "\n".join(f"- **{arm}** {ARMS[Arm(arm)]}" for arm in plan.arms),
            "## Validity",
            "A trial counts only if every rule holds, by the engine's own counters:",
            "\n".join(f"- *{rule}*: {says}" for rule, says in RULES.items()),
            tables.outputs(trials),
            tables.listed("Prompts whose reference differs between trials", disagreements(trials)),
        ]
        return "\n\n".join(part for part in parts if part)

    def _times(self, plan: Plan, trials: Sequence[Trial]) -> str:
        gaps = plan.gaps_ms
        rows = []
        for arm in plan.arms:
            row = [f"**{arm}**"]
            for gap_ms in gaps:
                valid = _valid(trials, arm, gap_ms)
                row.append(tables.spread(Spread.of(trial.ttft_ms for trial in valid)))
            rows.append(row)
        table = tables.table(["TTFT, ms", *(f"gap {gap_ms:g} ms" for gap_ms in gaps)], rows)
        return f"Median [least, most] of the valid trials (their number).\n\n{table}"

    def _ratios(self, plan: Plan, trials: Sequence[Trial]) -> str:
        rows = []
        for gap_ms in plan.gaps_ms:
            ahead = _valid(trials, Arm.AHEAD, gap_ms)
            c = Spread.of(trial.ttft_ms for trial in ahead)
            row = [f"{gap_ms:g} ms", tables.ratio(c, _ttft_ms(trials, Arm.HOST, gap_ms))]
            row += [
                tables.ratio(_ttft_ms(trials, arm, gap_ms), c)
                for arm in (Arm.ON_REQUEST, Arm.RECOMPUTE, Arm.WARM_UP)
            ]
            if Arm.AHEAD_DEVICE in plan.arms:
                promoted = Spread.of(t.ttft_ms for t in _valid(trials, Arm.AHEAD_DEVICE, gap_ms))
                row.append(tables.ratio(promoted, _ttft_ms(trials, Arm.DEVICE, gap_ms)))
            joined = sum(trial.joined for trial in ahead)
            row.append(f"{len(ahead) - joined} ahead, {joined} joined")
            row.append(tables.spread(Spread.of(trial.late_ms for trial in ahead)))
            rows.append(row)
        head = ["gap", "C / L2 bound", "B / C", "A / C", "W / C"]
        head += ["D / L1 bound"] if Arm.AHEAD_DEVICE in plan.arms else []
        head += ["restores in C", "sent late by, ms"]
        return (
            "Ratios of medians at the same gap; an arm that was not measured at a gap stands with its median "
            "over those at which it was. *Late* is by how much a submit's own reply delays the continuation.\n\n"
            + tables.table(head, rows)
        )

    def _observations(self, trials: Sequence[Trial]) -> str:
        lines = []
        for arm in (Arm.AHEAD, Arm.WARM_UP):
            own = [t for t in trials if t.cell.arm == arm and not t.invalid]
            if own:
                share = Spread.of(t.counters.get(PREFETCHED, 0.0) / t.prefix_tokens for t in own)
                assert share is not None
                lines.append(
                    f"- Arm {arm} read the prefix from storage {share.p50:g} times at the median "
                    f"(from {share.low:g} to {share.high:g})."
                )
        late = [
            t for t in trials if t.cell.arm == Arm.WARM_UP and t.warm_up and not t.warm_up["ended_before"]
        ]
        if late:
            lines.append(
                f"- In {len(late)} trials of W the warm-up request still ran when the continuation was sent."
            )
        return "\n".join(lines)

    def charts(self, manifest: Manifest, trials: Sequence[Trial]) -> dict[str, Any]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        valid = [trial for trial in trials if not trial.invalid]
        return {
            f"ttft-{tokens}": charts.ttft_by_gap(
                f"{manifest.model}, {tokens:,} prompt tokens, {tables.hardware(manifest)}",
                {
                    arm: {
                        gap_ms: spread
                        for gap_ms in manifest.plan.gaps_ms
                        if (spread := Spread.of(t.ttft_ms for t in _valid(own, arm, gap_ms)))
                    }
                    for arm in manifest.plan.arms
                },
            )
            for tokens in manifest.plan.prompt_tokens
            if (own := [trial for trial in valid if trial.cell.prompt_tokens == tokens])
        }


def _ttft_ms(trials: Sequence[Trial], arm: str, gap_ms: float) -> Spread | None:
    """At a gap, or over all gaps if the arm was not measured at this one."""
    own = _valid(trials, arm, gap_ms) or [t for t in trials if t.cell.arm == arm and not t.invalid]
    return Spread.of(trial.ttft_ms for trial in own)


def _valid(trials: Sequence[Trial], arm: str, gap_ms: float) -> list[Trial]:
    return [t for t in trials if t.cell.arm == arm and t.cell.gap_ms == gap_ms and not t.invalid]


def warm_up(stage: Stage, cells: Sequence[Cell], say: Callable[[str], None]) -> None:
    """Play each arm once at each size without a gap, for kernels that are compiled on first use."""
    seen = set()
    for cell in cells:
        if (key := (cell.prompt_tokens, cell.arm)) not in seen:
            seen.add(key)
            say(f"warming up: {cell.prompt_tokens:,} tokens, arm {cell.arm}")
            play(stage, Cell(prompt_tokens=cell.prompt_tokens, arm=cell.arm, gap_ms=0.0), 1_000_000)


STEPS = {
    "storage asked": "queried_s",
    "first page read": "first_read_s",
    "last page read": "read_s",
    "in L2": "elapsed_s",
}


def timeline(plan: Plan, trials: Sequence[Trial]) -> str:
    """Where the time goes in arm C: medians of each step, in milliseconds."""
    rows = []
    for gap_ms in plan.gaps_ms:
        own = [t for t in trials if t.cell.arm == Arm.AHEAD and t.cell.gap_ms == gap_ms and not t.invalid]
        if not own:
            continue
        row = [f"{gap_ms:g} ms"]
        for step in STEPS.values():
            known = [
                value * 1e3 for t in own if t.operation and (value := getattr(t.operation, step)) is not None
            ]
            row.append(tables.p50(known))
        for begin, end in (
            (None, "request_received_ts"),
            ("request_received_ts", "forward_entry_time"),
            ("forward_entry_time", "prefill_finished_time"),
        ):
            row.append(tables.p50([_between(t, begin, end) for t in own if end in t.times]))
        row.append(tables.p50([t.counters[LOAD_BACK_S] * 1e3 for t in own if LOAD_BACK_S in t.counters]))
        row.append(
            tables.p50(
                [
                    (t.sent_ts - t.times["prefill_finished_time"]) * 1e3 + t.ttft_ms
                    for t in own
                    if "prefill_finished_time" in t.times
                ]
            )
        )
        rows.append(row)
    if not rows:
        return ""
    head = ["gap", *STEPS]
    head += ["request seen", "scheduled", "prefill", "of it H2D", "first token"]
    return (
        "Where the time of arm C goes: medians in ms. The first four count from the submit's acceptance; "
        "the others are each one's own duration, from the continuation being sent.\n\n"
        + tables.table(head, rows)
    )


def _between(trial: Trial, begin: str | None, end: str) -> float:
    start = trial.sent_ts if begin is None else trial.times.get(begin, trial.sent_ts)
    return (trial.times[end] - start) * 1e3
