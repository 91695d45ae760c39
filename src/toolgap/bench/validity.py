"""What must hold in a trial for its time to mean what its arm says. No I/O."""

from collections.abc import Iterator, Sequence

from toolgap.bench.arms import Arm
from toolgap.bench.records import Trial
from toolgap.protocol import State

RULES: dict[str, str] = {
    "output": "the greedy output ids equal those of the first computation of the same prompt",
    "tiers": "the continuation found exactly what its arm says, where its arm says: nothing in A; the whole "
    "prefix in storage in B and B-wait, in host memory in C and L2, on the device in L1 and, unless it joined, D",
    "reads": "SGLang's counter of tokens read from storage grew by the prefix exactly once in B, B-wait, C and D, "
    "and not at all in A, L2 and L1 (in W it is reported, not required)",
    "evictions": "an unrelated prefix that was in L2 before is still wholly resident",
    "restored": "in C and D the operation ended as restored, had found nothing resident, and read the prefix once",
    "unmoved": "in C and D nothing was loaded to the device beyond the prefix, once",
    "page_cache": "the page cache held the prefix's files as the run says: 99 % or more, or 1 % or less",
}

PREFETCHED = "sglang:prefetched_tokens_total"
LOADED_BACK = "sglang:load_back_tokens_total"
LOAD_BACK_S = "sglang:load_back_duration_seconds_sum"
COUNTERS = (
    PREFETCHED,
    LOADED_BACK,
    LOAD_BACK_S,
    "sglang:backuped_tokens_total",
    "sglang:evicted_tokens_total",
    "sglang:hicache_dropped_tokens_total",
)
"""Which of the engine's counters a trial keeps."""


def judge(trial: Trial) -> list[str]:
    """The rules that did not hold, each with what was seen; empty for a valid trial."""
    return [f"{rule}: {seen}" for rule, seen in _broken(trial)]


def _broken(trial: Trial) -> Iterator[tuple[str, str]]:
    arm, whole = Arm(trial.cell.arm), trial.prefix_tokens
    if trial.output_ids != trial.reference_ids:
        yield "output", f"{trial.output_ids} and not {trial.reference_ids}"
    found = (trial.device_tokens, trial.host_tokens, trial.storage_tokens)
    expected = {
        Arm.RECOMPUTE: (0, 0, 0),
        Arm.ON_REQUEST: (0, 0, whole),
        Arm.ON_REQUEST_WAIT: (0, 0, whole),
        Arm.AHEAD: (0, whole, 0),
        Arm.HOST: (0, whole, 0),
        Arm.DEVICE: (whole, 0, 0),
        Arm.AHEAD_DEVICE: (0, whole, 0) if trial.joined and not trial.device_tokens else (whole, 0, 0),
    }.get(arm)
    if expected is not None and found != expected:
        yield "tiers", f"device, host, storage gave {found} and not {expected}"
    read = trial.counters.get(PREFETCHED)
    once = {
        Arm.ON_REQUEST: whole,
        Arm.ON_REQUEST_WAIT: whole,
        Arm.AHEAD: whole,
        Arm.AHEAD_DEVICE: whole,
        Arm.WARM_UP: read,
    }.get(arm, 0)
    if read is None or read != once:
        yield "reads", f"{read} tokens were read from storage and not {once}"
    if trial.sentinel_resident_tokens != trial.sentinel_tokens:
        yield "evictions", f"{trial.sentinel_resident_tokens} of {trial.sentinel_tokens} tokens are resident"
    if arm in (Arm.AHEAD, Arm.AHEAD_DEVICE):
        operation = trial.operation
        if operation is None:
            yield "restored", "nothing was submitted"
        elif (operation.state, operation.resident_tokens, operation.read_tokens) != (
            State.RESTORED,
            0,
            whole,
        ):
            yield (
                "restored",
                f"{operation.state}: {operation.reason}, {operation.resident_tokens} resident before, "
                f"{operation.read_tokens} read",
            )
        if (loaded := trial.counters.get(LOADED_BACK)) != whole:
            yield "unmoved", f"{loaded} tokens were loaded to the device and not {whole}"
    if seen := page_cache_seen(trial.page_cache, trial.page_cache_share):
        yield "page_cache", seen


def page_cache_seen(wanted: str, share: float | None) -> str | None:
    """How much of a trial's L3 files the page cache held, if that is not what the run says."""
    held = {"warm": share is not None and share >= 0.99, "cold": share is not None and share <= 0.01}
    return None if held.get(wanted, True) else f"{share} of it was in the page cache"


def disagreements(trials: Sequence[Trial]) -> list[str]:
    """Trials whose reference differs from that of another trial with the same prompt."""
    first: dict[tuple[int, int], Trial] = {}
    found = []
    for trial in trials:
        other = first.setdefault((trial.round, trial.cell.prompt_tokens), trial)
        if other.reference_ids != trial.reference_ids:
            found.append(f"{trial.trial_id} has another reference than {other.trial_id}")
    return found
