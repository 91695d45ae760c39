"""A restore whose continuation never comes: what it wastes, and that nothing of it is left."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import msgspec

from toolgap.bench import tables
from toolgap.bench.evidence import Manifest
from toolgap.bench.plan import Cell, Plan
from toolgap.bench.recipe import Recipe, Step
from toolgap.bench.server import Setup
from toolgap.bench.spread import Spread
from toolgap.bench.stage import RESTORE_DEADLINE_S, Stage
from toolgap.bench.validity import LOADED_BACK, PREFETCHED
from toolgap.protocol import OperationStatus, State

ENDINGS: dict[str, tuple[State, ...]] = {
    "left alone": (State.RESTORED,),
    # Where it stops depends on the disk: a read that was faster than the stop is whole.
    "cancelled": (State.CANCELLED, State.RESTORED),
    "expired": (State.EXPIRED, State.RESTORED),
}
"""What becomes of the operation, and the states that this may end in."""

EXPIRES_AFTER_S = 0.01


class Waste(msgspec.Struct, kw_only=True):
    """One restore without a continuation. Counts are of tokens."""

    trial_id: str
    round: int
    cell: Cell
    """Its arm is the ending."""
    prefix_tokens: int
    began_ts: float
    page_cache: str
    page_cache_share: float | None
    operation: OperationStatus
    bytes_per_token: float | None
    """Of L3, from the sizes of the page files; None where they are not known."""
    counters: dict[str, float]
    host_free_tokens_before: int
    """With L1 and L2 empty."""
    host_free_tokens_landed: int
    """After the operation's end, once what it had not filled is released; at most a second later."""
    host_free_tokens_flushed: int
    """After a flush."""
    invalid: list[str] = []


def judge(trial: Waste) -> list[str]:
    """The rules that did not hold."""
    operation, found = trial.operation, []
    if operation.state not in ENDINGS[trial.cell.arm]:
        found.append(f"ending: {operation.state}: {operation.reason}")
    landed = trial.host_free_tokens_before - trial.host_free_tokens_landed
    if landed != operation.inserted_tokens:
        found.append(f"landed: {landed} tokens of host memory for {operation.inserted_tokens} inserted")
    if trial.host_free_tokens_flushed != trial.host_free_tokens_before:
        found.append(
            f"baseline: {trial.host_free_tokens_flushed} tokens free after the flush and not "
            f"{trial.host_free_tokens_before}"
        )
    if trial.counters.get(PREFETCHED) != operation.read_tokens:
        found.append(
            f"reads: the engine counted {trial.counters.get(PREFETCHED)} and not {operation.read_tokens}"
        )
    if trial.counters.get(LOADED_BACK):
        found.append(f"unmoved: {trial.counters[LOADED_BACK]} tokens were loaded to the device")
    return found


RULES = (
    "the operation ended as the cell says; within a second of its end host memory holds exactly what it reports as "
    "inserted; a flush "
    "returns the count of free host tokens exactly to what it was; SGLang's counter of tokens read from "
    "storage grew by what the operation reports; nothing was loaded to the device"
)


class NoContinuation(Recipe[Waste]):
    """Restores that are left alone, cancelled or expire."""

    name = "no-continuation"
    says = "restores whose continuation never comes: wasted bytes, and what is left of them"
    trial_type = Waste
    defaults: ClassVar[dict[str, Any]] = {"gaps_ms": (0.0,), "arms": tuple(ENDINGS)}

    def steps(
        self, plan: Plan, stage: Stage | None, setup: Setup | None, done: set[str], say: Callable[[str], None]
    ) -> Iterator[Step]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        assert stage is not None
        for trial_id, cell, number in self.left(plan, done):
            yield Step(trial_id, partial(play, stage, cell, number))

    def judge(self, trial: Waste) -> list[str]:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        return judge(trial)

    def report(self, manifest: Manifest, trials: Sequence[Waste]) -> str:
        """See :class:`~toolgap.bench.recipe.Recipe`."""
        rows = []
        for cell in self.cells(manifest.plan):
            own = [trial for trial in trials if trial.cell == cell and not trial.invalid]
            wasted = [t.operation.inserted_tokens for t in own]
            megabytes = [t.operation.read_tokens * t.bytes_per_token / 1e6 for t in own if t.bytes_per_token]
            states = sorted({str(t.operation.state) for t in own})
            back = sum(t.host_free_tokens_flushed == t.host_free_tokens_before for t in own)
            rows.append(
                [
                    f"{cell.prompt_tokens:,} tokens, {cell.arm}",
                    ", ".join(states) or "-",
                    tables.spread(Spread.of(float(value) for value in wasted)),
                    tables.spread(Spread.of(megabytes)),
                    tables.spread(Spread.of(t.operation.elapsed_s * 1e3 for t in own)),
                    f"{back} of {len(own)}",
                ]
            )
        head = ["restore", "ended as", "tokens landed", "MB read", "took, ms", "exact baseline after a flush"]
        table = tables.table(head, rows)
        return f"Median [least, most] (trials).\n\n{table}\n\n## Validity\n\nA trial counts only if {RULES}."


def play(stage: Stage, cell: Cell, round_number: int) -> Waste:
    """Restore, let it end as the cell says, and look at what is left."""
    prompt = stage.prompt(round_number, cell.prompt_tokens)
    page_cache_share = stage.prepare_page_cache(prompt.pages)
    sizes = [path.stat().st_size for path in prompt.pages]
    names = (PREFETCHED, LOADED_BACK)
    before, counters = stage.host_free_tokens(), stage.counters(names)
    began_ts = time.time()
    ttl_s = EXPIRES_AFTER_S if cell.arm == "expired" else None
    operation_id = stage.toolgap.submit(input_ids=prompt.prefix_ids, ttl_s=ttl_s, force=True).operation_id
    if cell.arm == "cancelled":
        stage.toolgap.cancel(operation_id)
    operation = stage.toolgap.wait(operation_id, RESTORE_DEADLINE_S)
    after = stage.settled_counters(names, PREFETCHED, counters[PREFETCHED] + operation.read_tokens)
    landed = stage.settled_host_free_tokens(before - operation.inserted_tokens)
    stage.settle()
    trial = Waste(
        trial_id=cell.trial_id(round_number),
        round=round_number,
        cell=cell,
        prefix_tokens=len(prompt.prefix_ids),
        began_ts=round(began_ts, 6),
        page_cache=stage.plan.page_cache,
        page_cache_share=page_cache_share,
        operation=operation,
        bytes_per_token=sum(sizes) / len(sizes) / stage.plan.page_tokens if sizes else None,
        counters={name: after[name] - counters[name] for name in names},
        host_free_tokens_before=before,
        host_free_tokens_landed=landed,
        host_free_tokens_flushed=stage.host_free_tokens(),
    )
    trial.invalid = judge(trial)
    return trial
