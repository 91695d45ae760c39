"""What the admission rule would have decided in a run of the matrix: its trials, replayed in their order.

The rates come from the trials before each one, by the code that a server measures them with, so that the run
judges the rule as it would have judged the server.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from toolgap.admission import Rates, Wanted, estimate
from toolgap.bench import decisions, gateway_evidence, tables
from toolgap.bench.arms import Arm
from toolgap.bench.evidence import MANIFEST, Evidence, read_manifest
from toolgap.bench.records import Asked, Trial
from toolgap.rates import Meter


class Clock:
    """The time of the trial that is replayed."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Unix time."""
        return self.now_s


def with_decisions(trials: Sequence[Trial]) -> list[Trial]:
    """The trials in their order, those of arm C with what would have been decided."""
    clock = Clock()
    meter, rates = Meter(clock, clock), Rates()
    replayed = []
    for trial in sorted(trials, key=lambda trial: trial.began_ts):
        clock.now_s = trial.began_ts
        if trial.cell.arm == Arm.AHEAD and trial.operation is not None:
            replayed.append(msgspec.structs.replace(trial, asked=_decide(trial, rates)))
        else:
            replayed.append(trial)
        _measure(meter, trial)
        clock.now_s = trial.sent_ts + trial.total_ms / 1e3
        rates = meter.news(rates) or rates
    return replayed


def _decide(trial: Trial, rates: Rates) -> Asked:
    """What a submit at the trial's beginning would have been told."""
    assert trial.operation is not None
    resident = trial.operation.resident_tokens
    missing = trial.operation.aligned_tokens - resident
    found = estimate(
        rates,
        Wanted(resident_tokens=resident, missing_tokens=missing, read_tokens=missing, queued_tokens=0),
        gap_s=trial.cell.gap_ms / 1e3,
        now_ts=trial.began_ts,
        batch_tokens=None,
    )
    admitted = found is None or found.worthwhile
    return Asked(admitted=admitted, code=None if admitted else "not_worthwhile", estimate=found)


def _measure(meter: Meter, trial: Trial) -> None:
    """What the server has seen of storage and prefill by the trial's end."""
    operation = trial.operation
    if operation is not None and operation.read_s is not None and operation.queried_s is not None:
        tokens = operation.read_tokens
        meter.storage_asked(operation.queried_s)
        meter.storage_read(tokens, lambda: tokens, operation.queried_s, operation.read_s)
    cached = trial.device_tokens + trial.host_tokens + trial.storage_tokens
    computed = trial.cell.prompt_tokens - cached
    begun, done = trial.times.get("forward_entry_time"), trial.times.get("prefill_finished_time")
    if begun is not None and done is not None and computed > 0:
        meter.prefilled(computed, computed * (cached + computed / 2), begun, done)


def page(evidence: Path) -> str:
    """What the rule would have decided in every run there that has arms A and C, and whether it was right.

    Args:
        evidence: A folder of runs.
    """
    parts = [
        "# Would the admission rule have been right?",
        "Made by `scripts/evidence.py --write` from the raw trials beside it, and compared by `make verify-evidence`. "
        "No server decided here: every restore was played. The trials of each run are replayed in their order, "
        "through the code that measures storage and prefill in a server and the rule that it decides by, with what was "
        f"known before each trial. {decisions.RULE}",
    ]
    for folder in sorted(manifest.parent for manifest in evidence.glob(f"*/{MANIFEST}")):
        if gateway_evidence.is_one(folder):
            continue
        manifest = read_manifest(folder)
        plan = manifest.plan
        if plan.recipe != "matrix" or not {Arm.RECOMPUTE, Arm.AHEAD} <= set(plan.arms):
            continue
        trials = with_decisions(Evidence.load(folder, Trial).trials)
        heading = f"## {folder.name}: {tables.hardware(manifest)}, {manifest.model}"
        for tokens in plan.prompt_tokens:
            own = [trial for trial in trials if trial.cell.prompt_tokens == tokens and not trial.invalid]
            parts += [
                f"{heading}, {tokens:,} tokens",
                decisions.confusion(own),
                decisions.by_gap(plan, own),
            ]
    return "\n\n".join(parts) + "\n"
