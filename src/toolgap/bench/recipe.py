"""What a recipe is: one question about restores, and the trials that answer it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from toolgap.bench import tables
from toolgap.bench.evidence import Manifest
from toolgap.bench.plan import Cell, Plan, shuffled
from toolgap.bench.server import Setup
from toolgap.bench.spread import Spread
from toolgap.bench.stage import Stage


class Figure(msgspec.Struct, kw_only=True):
    """The medians of one cell, as ``toolgap bench figures`` prints them."""

    run: str
    hardware: str
    model: str
    prompt_tokens: int
    gap_ms: float
    arm: str
    ttft_ms_p50: float | None
    """None if no trial was valid."""
    ttft_ms_min: float | None
    ttft_ms_max: float | None
    trials: int
    """Valid ones."""
    invalid: int


class Step(NamedTuple):
    """One trial to play."""

    trial_id: str
    play: Callable[[], Any]


class Measured(Protocol):
    """What every recipe's trials have in common."""

    trial_id: str
    round: int
    cell: Cell
    invalid: list[str]


T = TypeVar("T", bound=Measured)


class Recipe(ABC, Generic[T]):
    """One question. Stateless: everything is in its arguments."""

    name: ClassVar[str]
    says: ClassVar[str]
    trial_type: type[T]
    defaults: ClassVar[dict[str, Any]] = {}
    """Fields of :class:`Plan` that differ for it from the matrix's."""
    own_servers: ClassVar[bool] = False
    """Whether it starts servers itself instead of using the one of the run."""
    server_arguments: ClassVar[tuple[str, ...]] = ()
    """What its server needs of SGLang's arguments beside what every run has; a server at a URL has them or not."""

    def cells(self, plan: Plan) -> list[Cell]:
        """What is measured in every round."""
        return [
            Cell(prompt_tokens=tokens, arm=arm, gap_ms=0.0)
            for tokens in plan.prompt_tokens
            for arm in plan.arms
        ]

    def planned(self, plan: Plan) -> list[str]:
        """Ids of every trial that the plan asks for."""
        return [cell.trial_id(number) for number in range(plan.rounds) for cell in self.cells(plan)]

    def left(self, plan: Plan, done: set[str]) -> Iterator[tuple[str, Cell, int]]:
        """Id, cell and round of the trials that are not done, in the order in which they are played."""
        for number in range(plan.rounds):
            for cell in shuffled(self.cells(plan), plan.seed, number):
                if (trial_id := cell.trial_id(number)) not in done:
                    yield trial_id, cell, number

    def check(self, plan: Plan) -> None:
        """Look at the plan before a server is started for nothing.

        Raises:
            BenchError: it cannot be played.
        """

    @abstractmethod
    def steps(
        self, plan: Plan, stage: Stage | None, setup: Setup | None, done: set[str], say: Callable[[str], None]
    ) -> Iterator[Step]:
        """The trials that are not done, in their order.

        Closing the iterator ends whatever it has started.

        Args:
            plan: What to play.
            stage: A running server; None for a recipe with servers of its own.
            setup: How to start servers; None if somebody else runs the one that is used.
            done: Ids of trials to leave out.
            say: Told what is done between trials.
        """

    @abstractmethod
    def judge(self, trial: T) -> list[str]:
        """Which validity rules a trial does not keep."""

    @abstractmethod
    def report(self, manifest: Manifest, trials: Sequence[T]) -> str:
        """The body of ``report.md``: Markdown, from nothing but its arguments."""

    def ttft_ms(self, trial: T) -> Sequence[float]:
        """The times to first token that a trial measured; none where that is not the question."""
        return ()

    def label(self, cell: Cell) -> str:
        """A cell's arm, as figures name it."""
        return cell.arm

    def figures(self, manifest: Manifest, trials: Sequence[T]) -> list[Figure]:
        """Medians by cell; none where no time to first token is measured."""
        if not any(self.ttft_ms(trial) for trial in trials):
            return []
        found = []
        for cell in self.cells(manifest.plan):
            own = [trial for trial in trials if trial.cell == cell]
            valid = [trial for trial in own if not trial.invalid]
            ttft_ms = Spread.of(value for trial in valid for value in self.ttft_ms(trial))
            found.append(
                Figure(
                    run=manifest.run,
                    hardware=tables.hardware(manifest),
                    model=manifest.model,
                    prompt_tokens=cell.prompt_tokens,
                    gap_ms=cell.gap_ms,
                    arm=self.label(cell),
                    ttft_ms_p50=ttft_ms and ttft_ms.p50,
                    ttft_ms_min=ttft_ms and ttft_ms.low,
                    ttft_ms_max=ttft_ms and ttft_ms.high,
                    trials=len(valid),
                    invalid=len(own) - len(valid),
                )
            )
        return found

    def charts(self, manifest: Manifest, trials: Sequence[T]) -> dict[str, Any]:
        """Matplotlib figures by file name without its ending; none where a table says it all."""
        return {}
