"""What follows from the trials of ``toolgap bench gateway``. Pure."""

from collections.abc import Callable, Sequence
from math import ceil

import msgspec

from toolgap.bench import tables
from toolgap.bench.gateway import QUIET_CORES, Arm, Counts, Plan, Trial
from toolgap.bench.spread import Spread

QUANTILES = (50, 99)


class Added(msgspec.Struct, kw_only=True):
    """What one arm adds. Times are in milliseconds: of each round the arm's quantile less the direct one's."""

    arm: Arm
    requests: int
    whole_streams: int
    equal_streams: int
    """Byte for byte what the direct stream is."""
    unwatched_streams: int
    """That the observer missed or failed at."""
    events: int
    first_byte_ms: dict[str, Spread]
    """By quantile, ``p50`` and ``p99``, over requests: until the first byte of the answer's body."""
    event_ms: dict[str, Spread]
    """Likewise over streamed events."""
    gateway_cpu_us_per_event: float
    busy_rounds: int
    """In which others computed more than a fourth of a core beside this arm or the direct one."""


class Figures(msgspec.Struct, kw_only=True):
    """Of a whole run."""

    plan: Plan
    direct_ms: dict[str, Spread]
    """The direct arm itself, for comparison."""
    added: list[Added]


def quantile_ms(values: Counts, percent: float) -> float:
    """The smallest value that at least so many percent do not exceed.

    Raises:
        ValueError: there are no values.
    """
    rank = max(1, ceil(percent / 100 * sum(count for _, count in values)))
    for value_us, count in values:
        rank -= count
        if rank <= 0:
            return value_us / 1000
    raise ValueError("no values")


def figures(plan: Plan, trials: Sequence[Trial]) -> Figures:
    """Medians and ranges over the rounds that were played in whole."""
    by_round = {(trial.round, trial.arm): trial for trial in trials}
    direct = [trial for trial in trials if trial.arm is Arm.DIRECT and trial.event_us]
    found = []
    for arm in plan.arms:
        pairs = [
            (own, base)
            for base in direct
            if (own := by_round.get((base.round, arm))) is not None and own.event_us
        ]
        own_trials = [trial for trial in trials if trial.arm is arm]
        events = sum(trial.events for trial in own_trials)
        cpu_s = sum(trial.cpu_s.get("gateway", 0.0) for trial in own_trials)
        if arm is Arm.DIRECT or not pairs:
            continue
        found.append(
            Added(
                arm=arm,
                requests=sum(trial.asked for trial in own_trials),
                whole_streams=sum(trial.whole for trial in own_trials),
                equal_streams=sum(trial.equal for trial in own_trials),
                unwatched_streams=sum(trial.unwatched for trial in own_trials),
                events=events,
                first_byte_ms=_added(pairs, _first_byte),
                event_ms=_added(pairs, _event),
                gateway_cpu_us_per_event=round(cpu_s * 1e6 / events, 1) if events else 0.0,
                busy_rounds=sum(max(own.other_cores, base.other_cores) > QUIET_CORES for own, base in pairs),
            )
        )
    direct_ms = {
        f"{name}_p{percent}": spread
        for name, of in (("first_byte", _first_byte), ("event", _event))
        for percent in QUANTILES
        if (spread := Spread.of(quantile_ms(of(trial), percent) for trial in direct)) is not None
    }
    return Figures(plan=plan, direct_ms=direct_ms, added=found)


def _first_byte(trial: Trial) -> Counts:
    return trial.first_byte_us


def _event(trial: Trial) -> Counts:
    return trial.event_us


def _added(pairs: Sequence[tuple[Trial, Trial]], of: Callable[[Trial], Counts]) -> dict[str, Spread]:
    found = {}
    for percent in QUANTILES:
        # Adding 0.0 makes of -0.0 a plain zero.
        each = [
            round(quantile_ms(of(own), percent) - quantile_ms(of(base), percent), 3) + 0.0
            for own, base in pairs
        ]
        if (spread := Spread.of(each)) is not None:
            found[f"p{percent}"] = spread
    return found


def text(found: Figures) -> str:
    """The figures as a table."""
    head = [
        *("added, ms", "first byte p50", "p99", "event p50", "p99"),
        *("equal streams", "gateway CPU, us an event", "busy rounds"),
    ]
    rows = [
        [
            LABELS[one.arm],
            *(tables.spread(one.first_byte_ms.get(f"p{percent}")) for percent in QUANTILES),
            *(tables.spread(one.event_ms.get(f"p{percent}")) for percent in QUANTILES),
            f"{one.equal_streams:,} of {one.requests:,}",
            tables.number(one.gateway_cpu_us_per_event),
            str(one.busy_rounds),
        ]
        for one in found.added
    ]
    direct = [
        "direct, itself",
        *(
            tables.spread(found.direct_ms.get(f"{name}_p{percent}"))
            for name in ("first_byte", "event")
            for percent in QUANTILES
        ),
        *("", "", ""),
    ]
    return tables.table(head, [*rows, direct])


LABELS = {Arm.DIRECT: "direct", Arm.GATEWAY: "gateway, no restores", Arm.RESTORING: "gateway, by default"}
