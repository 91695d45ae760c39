"""Does the server rightly decline: each of its decisions beside what both ways then took."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from toolgap.bench import decisions, tables
from toolgap.bench.arms import Arm
from toolgap.bench.evidence import Manifest
from toolgap.bench.plan import Plan
from toolgap.bench.play import play
from toolgap.bench.recipe import Step
from toolgap.bench.recipes.matrix import Matrix, warm_up
from toolgap.bench.records import Trial
from toolgap.bench.server import Setup
from toolgap.bench.stage import Stage


class Admission(Matrix):
    """Arm C, asked for as an agent would, and forced if it is declined; beside A and B."""

    name = "admission"
    says = "what the server admits and declines, and whether that was right"
    defaults: ClassVar[dict[str, Any]] = {
        "gaps_ms": (0.0, 100.0, 250.0, 500.0, 1000.0),
        "arms": (Arm.RECOMPUTE, Arm.ON_REQUEST, Arm.AHEAD),
        "prompt_tokens": (1024, 2048, 4096),
        "options": {"only_gaps_ms": {Arm.RECOMPUTE.value: [0.0], Arm.ON_REQUEST.value: [0.0]}},
    }

    def steps(
        self, plan: Plan, stage: Stage | None, setup: Setup | None, done: set[str], say: Callable[[str], None]
    ) -> Iterator[Step]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        assert stage is not None
        warm_up(stage, self.cells(plan), say)
        for trial_id, cell, number in self.left(plan, done):
            yield Step(trial_id, partial(play, stage, cell, number, ask=True))

    def report(self, manifest: Manifest, trials: Sequence[Trial]) -> str:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        plan = manifest.plan
        parts = [
            "Each restore is submitted as an agent would, with the gap and without force. One that the server "
            f"declines is then forced, so that its continuation shows what it would have been worth. {decisions.RULE}",
            decisions.confusion(trials),
        ]
        for tokens in plan.prompt_tokens:
            own = [trial for trial in trials if trial.cell.prompt_tokens == tokens and not trial.invalid]
            if own:
                parts += [f"## {tokens:,} prompt tokens", decisions.by_gap(plan, own)]
        parts.append(tables.outputs(trials))
        return "\n\n".join(parts)

    def charts(self, manifest: Manifest, trials: Sequence[Trial]) -> dict[str, Any]:
        """None: the tables say it all."""
        return {}
