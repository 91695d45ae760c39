"""What a trial measured, and what must hold for its figures to mean what they say. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from toolgap.engineclient import Generation
from toolgap.protocol import OperationStatus, State


class Arm(StrEnum):
    """One way of serving the continuation."""

    RECOMPUTE = "A"
    ON_REQUEST = "B"
    AHEAD = "C"


ARMS: dict[Arm, str] = {
    Arm.RECOMPUTE: "recompute",
    Arm.ON_REQUEST: "restore on request",
    Arm.AHEAD: "restore ahead",
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One continuation, served one way. Times are in seconds."""

    number: int
    arm: Arm
    aligned_tokens: int
    """Whole pages of the prefix: all of it that a cache can hold."""
    tool_s: float
    gap_s: float
    """From the tool call to the continuation being sent."""
    generation: Generation
    restore: OperationStatus | None = None
    """Arm C: the operation, as it stood when the continuation was sent."""


class Invariant(StrEnum):
    """What must hold in every trial."""

    NOTHING_CACHED = "recompute_finds_nothing"
    EVICTED = "prefix_left_l1_and_l2"
    FROM_STORAGE = "restore_on_request_reads_l3"
    RESTORED = "restored_before_continuation"
    FROM_HOST = "continuation_served_from_l2"
    SAME_OUTPUT = "same_output"


INVARIANTS: dict[Invariant, str] = {
    Invariant.NOTHING_CACHED: "In arm A no tier holds anything of the prompt.",
    Invariant.EVICTED: "In arms B and C nothing of the prefix is in L1 or L2 when the tool is called.",
    Invariant.FROM_STORAGE: "In arm B every whole page of the prefix is read from L3, by the continuation itself.",
    Invariant.RESTORED: "In arm C the operation has restored the whole prefix when the continuation is sent.",
    Invariant.FROM_HOST: "In arm C every whole page of the prefix comes from L2, and none from L1 or L3.",
    Invariant.SAME_OUTPUT: "The greedy output tokens of a trial are the same in all arms.",
}


class Failure(NamedTuple):
    """An invariant that did not hold."""

    invariant: Invariant
    trial: int
    seen: str

    def __str__(self) -> str:
        return f"{self.invariant} (trial {self.trial}): {self.seen}"


def check(trials: Sequence[Trial]) -> list[Failure]:
    """The invariants that do not hold, in the order of the trials."""
    failures = [failure for trial in trials for failure in _check_tiers(trial)]
    outputs: dict[int, Trial] = {}
    for trial in trials:
        first = outputs.setdefault(trial.number, trial)
        if trial.generation.output_ids != first.generation.output_ids:
            seen = (
                f"arm {first.arm} gave {first.generation.output_ids}, "
                f"arm {trial.arm} gave {trial.generation.output_ids}"
            )
            failures.append(Failure(Invariant.SAME_OUTPUT, trial.number, seen))
    return failures


def _check_tiers(trial: Trial) -> list[Failure]:
    answer, aligned = trial.generation, trial.aligned_tokens
    cached = f"device {answer.device_tokens}, host {answer.host_tokens}, storage {answer.storage_tokens}"
    seen = f"{cached} of {aligned} tokens"
    resident = answer.device_tokens + answer.host_tokens
    failed: list[tuple[Invariant, str]] = []
    match trial.arm:
        case Arm.RECOMPUTE:
            if resident or answer.storage_tokens:
                failed.append((Invariant.NOTHING_CACHED, cached))
        case Arm.ON_REQUEST:
            if resident:
                failed.append((Invariant.EVICTED, seen))
            if answer.storage_tokens != aligned:
                failed.append((Invariant.FROM_STORAGE, seen))
        case Arm.AHEAD:
            restore = trial.restore
            if restore is None:
                failed.append((Invariant.RESTORED, "nothing was restored"))
            else:
                if restore.resident_tokens:
                    failed.append((Invariant.EVICTED, f"{restore.resident_tokens} tokens were resident"))
                if restore.state is not State.RESTORED:
                    why = restore.state if restore.reason is None else f"{restore.state}: {restore.reason}"
                    failed.append((Invariant.RESTORED, f"the operation is {why}"))
            if (answer.device_tokens, answer.host_tokens, answer.storage_tokens) != (0, aligned, 0):
                failed.append((Invariant.FROM_HOST, seen))
    return [Failure(invariant, trial.number, what) for invariant, what in failed]


class Spread(NamedTuple):
    """Median and range of a few values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(median(values), min(values), max(values))


class Summary(NamedTuple):
    """An arm over its trials. Token counts are the least and the most that a trial saw."""

    arm: Arm
    trials: int
    ttft_s: Spread
    device_tokens: tuple[int, int]
    host_tokens: tuple[int, int]
    storage_tokens: tuple[int, int]
    restore_s: Spread | None
    same_output: bool
    """Whether every trial's output equals that of arm A in the same trial."""


def summarize(trials: Sequence[Trial]) -> list[Summary]:
    """One summary for each arm that has a trial."""
    reference = {t.number: t.generation.output_ids for t in trials if t.arm is Arm.RECOMPUTE}
    summaries = []
    for arm in Arm:
        own = [trial for trial in trials if trial.arm is arm]
        if not own:
            continue
        answers = [trial.generation for trial in own]
        restores = [trial.restore.elapsed_s for trial in own if trial.restore is not None]
        summaries.append(
            Summary(
                arm=arm,
                trials=len(own),
                ttft_s=Spread.of([answer.ttft_s for answer in answers]),
                device_tokens=_range([answer.device_tokens for answer in answers]),
                host_tokens=_range([answer.host_tokens for answer in answers]),
                storage_tokens=_range([answer.storage_tokens for answer in answers]),
                restore_s=Spread.of(restores) if restores else None,
                same_output=all(t.generation.output_ids == reference.get(t.number) for t in own),
            )
        )
    return summaries


def _range(values: Sequence[int]) -> tuple[int, int]:
    return min(values), max(values)


def order(number: int) -> list[Arm]:
    """The arms in the order in which a trial plays them: rotated, so that none is always first."""
    arms = list(Arm)
    start = (number - 1) % len(arms)
    return arms[start:] + arms[:start]
