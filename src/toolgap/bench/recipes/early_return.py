"""The continuation comes back before its restore is done: at 10 to 90 % of it."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, ClassVar

from toolgap.bench import charts, tables
from toolgap.bench.arms import Arm
from toolgap.bench.evidence import Manifest
from toolgap.bench.plan import Cell, Plan
from toolgap.bench.play import play
from toolgap.bench.recipe import Step
from toolgap.bench.recipes.matrix import Matrix, warm_up
from toolgap.bench.records import Trial
from toolgap.bench.server import Setup
from toolgap.bench.spread import Spread
from toolgap.bench.stage import Stage

PERCENTS = (10, 30, 50, 70, 90)
CALIBRATIONS = 5


class EarlyReturn(Matrix):
    """Arm C with gaps in per cent of a restore's time, beside B and L2."""

    name = "early-return"
    says = "the continuation comes at 10 to 90 % of the restore"
    defaults: ClassVar[dict[str, Any]] = {"gaps_ms": (0.0,), "arms": (Arm.AHEAD, Arm.ON_REQUEST, Arm.HOST)}

    def cells(self, plan: Plan) -> list[Cell]:
        """See :class:`Matrix`."""
        return [
            Cell(prompt_tokens=tokens, arm=arm, gap_ms=0.0, percent=percent)
            for tokens in plan.prompt_tokens
            for arm in plan.arms
            for percent in (PERCENTS if arm == Arm.AHEAD else (0,))
        ]

    def steps(
        self, plan: Plan, stage: Stage | None, setup: Setup | None, done: set[str], say: Callable[[str], None]
    ) -> Iterator[Step]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        assert stage is not None
        warm_up(stage, self.cells(plan), say)
        estimates = {}
        for tokens in plan.prompt_tokens:
            say(f"measuring how long a restore of {tokens:,} tokens takes")
            prompt = stage.stored(f"calibration/{tokens}", tokens)
            times_ms = []
            for _ in range(CALIBRATIONS):
                times_ms.append(stage.restored(prompt.prefix_ids).elapsed_s * 1e3)
                stage.settle()
            stage.drop(prompt)
            estimates[tokens] = round(median(times_ms), 3)
        for trial_id, cell, number in self.left(plan, done):
            yield Step(trial_id, partial(play, stage, cell, number, estimates[cell.prompt_tokens]))

    def report(self, manifest: Manifest, trials: Sequence[Trial]) -> str:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        parts = []
        for tokens in manifest.plan.prompt_tokens:
            own = [t for t in trials if t.cell.prompt_tokens == tokens and not t.invalid]
            if not own:
                continue
            on_request = Spread.of(t.ttft_ms for t in own if t.cell.arm == Arm.ON_REQUEST)
            bound = Spread.of(t.ttft_ms for t in own if t.cell.arm == Arm.HOST)
            rows = []
            for percent in PERCENTS:
                ahead = [t for t in own if t.cell.arm == Arm.AHEAD and t.cell.percent == percent]
                ttft_ms = Spread.of(t.ttft_ms for t in ahead)
                rows.append(
                    [
                        f"{percent} %",
                        tables.p50([t.gap_ms for t in ahead]),
                        tables.spread(ttft_ms),
                        tables.ratio(ttft_ms, on_request),
                        f"{sum(t.joined for t in ahead)} of {len(ahead)}",
                    ]
                )
            parts += [
                f"## {tokens:,} prompt tokens",
                f"A restore takes {tables.p50([t.restore_estimate_ms for t in own if t.restore_estimate_ms])} ms. "
                f"TTFT of B, where the continuation reads by itself: {tables.spread(on_request)} ms; "
                f"of L2, the bound: {tables.spread(bound)} ms.",
                tables.table(["comes at", "gap, ms", "TTFT of C, ms", "C / B", "joined"], rows),
            ]
        parts.append(tables.outputs(trials))
        return "\n\n".join(parts)

    def charts(self, manifest: Manifest, trials: Sequence[Trial]) -> dict[str, Any]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        drawn = {}
        for tokens in manifest.plan.prompt_tokens:
            own = [t for t in trials if t.cell.prompt_tokens == tokens and not t.invalid]
            series: dict[str, dict[float, Spread]] = {}
            for arm in manifest.plan.arms:
                of_arm = [t for t in own if t.cell.arm == arm]
                series[arm] = {
                    float(percent): spread
                    for percent in PERCENTS
                    if (
                        spread := Spread.of(
                            t.ttft_ms for t in of_arm if arm != Arm.AHEAD or t.cell.percent == percent
                        )
                    )
                }
            figure, axes = charts.figure(
                f"{manifest.model}, {tokens:,} prompt tokens: the continuation joins the running restore",
                "the continuation comes at this share of the restore, %",
                "time to first token, ms",
            )
            charts.lines(axes, series, {float(percent): float(percent) for percent in PERCENTS})
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False)
            drawn[f"early-return-{tokens}"] = figure
        return drawn
