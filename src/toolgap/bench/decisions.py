"""Whether decisions to restore were right: each beside what both ways took to the first token."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from toolgap.bench import tables
from toolgap.bench.arms import Arm
from toolgap.bench.plan import Plan
from toolgap.bench.records import Trial
from toolgap.bench.spread import Spread

EVEN = 0.05
"""Share of a recompute's time to first token by which two ways must differ at least to be told apart."""

RIGHT, WRONG, NO_MATTER = "right", "wrong", "no matter"

RULE = (
    "A decision is *right* if the way it chose was the faster one to the continuation's first token, by the "
    "recompute (A) of the same prompt; it did *no matter* if both differ by less than A itself does over its "
    f"trials, or by less than {EVEN:.0%}."
)


def confusion(trials: Sequence[Trial]) -> str:
    """Counts of decisions by what became of them, and what the wrong ones cost."""
    counts: Counter[tuple[bool, str]] = Counter()
    lost_ms = 0.0
    unjudged = 0
    for trial in _asked(trials):
        verdict = judge(trial, trials)
        if verdict is None:
            unjudged += 1
            continue
        assert trial.asked is not None
        counts[trial.asked.admitted, verdict] += 1
        if verdict == WRONG:
            lost_ms += abs(trial.ttft_ms - (_recompute_ms(trial, trials) or 0.0))
    verdicts = (RIGHT, NO_MATTER, WRONG)
    rows = [
        [name, *(str(counts[admitted, verdict]) for verdict in verdicts)]
        for name, admitted in (("admitted", True), ("declined", False))
    ]
    text = tables.table(["decision", *verdicts], rows)
    text += f"\n\nWrong decisions cost {tables.number(lost_ms)} ms of time to first token, all together."
    return text + (f" {unjudged} have no recompute to compare with." if unjudged else "")


def by_gap(plan: Plan, trials: Sequence[Trial]) -> str:
    """What was expected, decided and measured at each gap, of trials of one prompt size."""
    of_arm = {arm: [t for t in trials if t.cell.arm == arm] for arm in plan.arms}
    rows = []
    for gap_ms in plan.gaps_ms:
        own = [t for t in of_arm.get(Arm.AHEAD, []) if t.cell.gap_ms == gap_ms]
        if not own:
            continue
        asked = [t.asked for t in own if t.asked is not None]
        estimates = [one.estimate for one in asked if one.estimate is not None]
        decided = Counter(
            "admitted" if one.admitted else "declined" if one.code == "not_worthwhile" else str(one.code)
            for one in asked
        )
        verdicts = Counter(judge(t, trials) or "not judged" for t in own)
        rows.append(
            [
                f"{gap_ms:g} ms",
                tables.spread(Spread.of(t.ttft_ms for t in own)),
                tables.p50([one.restore_s * 1e3 for one in estimates]),
                tables.p50([t.operation.elapsed_s * 1e3 for t in own if t.operation is not None]),
                tables.p50([one.recompute_s * 1e3 for one in estimates]),
                tables.counted(decided),
                tables.counted(verdicts),
            ]
        )
    head = ["gap", "TTFT of C, ms", "restore, expected", "restore, as it was", "recompute, expected"]
    others = " ".join(
        f"TTFT of {arm}: {tables.spread(Spread.of(t.ttft_ms for t in of_arm[arm]))} ms."
        for arm in plan.arms
        if arm != Arm.AHEAD and of_arm.get(arm)
    )
    return (
        f"{others} Medians in ms; what is expected is the server's estimate at submission.\n\n"
        + tables.table([*head, "decision", "it was"], rows)
    )


def _asked(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.asked is not None and not trial.invalid]


def _recomputes(trial: Trial, trials: Sequence[Trial]) -> list[Trial]:
    """Of the same size."""
    return [
        other
        for other in trials
        if other.cell.arm == Arm.RECOMPUTE
        and other.cell.prompt_tokens == trial.cell.prompt_tokens
        and not other.invalid
    ]


def _recompute_ms(trial: Trial, trials: Sequence[Trial]) -> float | None:
    """The recompute of the same prompt."""
    own = [other.ttft_ms for other in _recomputes(trial, trials) if other.round == trial.round]
    return median(own) if own else None


def judge(trial: Trial, trials: Sequence[Trial]) -> str | None:
    """Whether the server decided right on a trial of arm C; None if its recompute was not measured.

    Args:
        trial: One that was asked for.
        trials: All of the run.
    """
    recompute_ms = _recompute_ms(trial, trials)
    if recompute_ms is None or trial.asked is None:
        return None
    all_ms = [other.ttft_ms for other in _recomputes(trial, trials)]
    margin_ms = max((max(all_ms) - min(all_ms)) / 2, EVEN * recompute_ms)
    gain_ms = recompute_ms - trial.ttft_ms
    if abs(gain_ms) <= margin_ms:
        return NO_MATTER
    return RIGHT if trial.asked.admitted == (gain_ms > 0) else WRONG
