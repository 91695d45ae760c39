"""What a recipe is: one question about restores, and the trials that answer it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from toolgap.bench.evidence import Manifest
from toolgap.bench.plan import Plan
from toolgap.bench.server import Setup
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


T = TypeVar("T")


class Recipe(Protocol[T]):
    """One question. Stateless: everything is in its arguments."""

    name: str
    says: str
    trial_type: type[T]
    defaults: dict[str, Any]
    """Fields of :class:`Plan` that differ for it from the matrix's."""
    own_servers: bool
    """Whether it starts servers itself instead of using the one of the run."""

    def trial_id(self, trial: T) -> str:
        """Unique in a run."""
        ...

    def planned(self, plan: Plan) -> list[str]:
        """Ids of every trial that the plan asks for."""
        ...

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
        ...

    def judge(self, trial: T) -> list[str]:
        """Which validity rules a trial does not keep."""
        ...

    def recorded(self, trial: T) -> list[str]:
        """What of :meth:`judge` was written down with the trial."""
        ...

    def report(self, manifest: Manifest, trials: Sequence[T]) -> str:
        """The body of ``report.md``: Markdown, from nothing but its arguments."""
        ...

    def figures(self, manifest: Manifest, trials: Sequence[T]) -> list[Figure]:
        """Medians by cell."""
        ...

    def charts(self, manifest: Manifest, trials: Sequence[T]) -> dict[str, Any]:
        """Matplotlib figures by file name without its ending."""
        ...
