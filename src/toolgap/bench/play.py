"""Plays one trial: the tool call leaves, the gap passes, the continuation is served one way."""

import time

from toolgap.bench.arms import Arm
from toolgap.bench.plan import OUTPUT_TOKENS, Cell
from toolgap.bench.records import Asked, Trial
from toolgap.bench.stage import RESTORE_DEADLINE_S, Background, Prompt, Stage, fresh_salt
from toolgap.bench.validity import COUNTERS, PREFETCHED, judge
from toolgap.client import ToolgapError
from toolgap.protocol import Target

NO_GAP_S = 1e-3
"""Stands for no gap in a submit, which takes none of 0."""


def play(
    stage: Stage,
    cell: Cell,
    round_number: int,
    restore_estimate_ms: float | None = None,
    *,
    ask: bool = False,
) -> Trial:
    """Play one trial, and leave the stage as it was.

    Args:
        stage: A running server.
        cell: What to play.
        round_number: Names the prompt.
        restore_estimate_ms: How long a restore takes, for cells that come at a share of it.
        ask: Whether the server is asked if it would restore, before it is made to.
    """
    arm = Arm(cell.arm)
    prompt = stage.prompt(round_number, cell.prompt_tokens)
    whole = len(prompt.prefix_ids)
    stage.set_policy(arm.policy)
    if arm is Arm.HOST:
        stage.store_fillers()
    stage.place_sentinel()
    page_cache_share = stage.prepare_page_cache(prompt.pages)
    if arm in (Arm.HOST, Arm.DEVICE):
        stage.engine.generate(prompt.prefix_ids, max_new_tokens=1)
    if arm is Arm.HOST:
        stage.fill_device()
    host_free = stage.host_free_tokens()
    counters = stage.counters(COUNTERS)
    gap_s = cell.gap_ms / 1e3
    if cell.percent is not None and restore_estimate_ms is not None:
        gap_s = cell.percent / 100 * restore_estimate_ms / 1e3

    began_ts, called_s = time.time(), time.perf_counter()
    operation_id = submit_ms = warm_up = asked = None
    if arm in (Arm.AHEAD, Arm.AHEAD_DEVICE):
        target = Target.DEVICE if arm is Arm.AHEAD_DEVICE else None
        operation_id, asked = _ask(stage, prompt, gap_s) if ask else (None, None)
        if operation_id is None:
            operation_id = stage.toolgap.submit(
                input_ids=prompt.prefix_ids, target=target, force=True
            ).operation_id
        submit_ms = (time.perf_counter() - called_s) * 1e3
    elif arm is Arm.WARM_UP:
        warm_up = Background(lambda: stage.engine.generate(prompt.prefix_ids, max_new_tokens=1))
    time.sleep(max(0.0, called_s + gap_s - time.perf_counter()))
    salt = fresh_salt() if arm is Arm.RECOMPUTE else None
    sent_ts, sent_s = time.time(), time.perf_counter()
    generation = stage.engine.generate(prompt.ids, max_new_tokens=OUTPUT_TOKENS, cache_salt=salt)

    operation = None if operation_id is None else stage.toolgap.wait(operation_id, RESTORE_DEADLINE_S)
    warmed = None
    if warm_up is not None:
        first = warm_up.result()
        assert warm_up.ended_s is not None
        warmed = {
            "ttft_ms": first.ttft_s * 1e3,
            "ended_before": warm_up.ended_s <= sent_s,
            "device_tokens": first.device_tokens,
            "host_tokens": first.host_tokens,
            "storage_tokens": first.storage_tokens,
        }
    reads = arm in (Arm.AHEAD, Arm.AHEAD_DEVICE, Arm.ON_REQUEST, Arm.ON_REQUEST_WAIT)
    after = stage.settled_counters(COUNTERS, PREFETCHED, counters[PREFETCHED] + (whole if reads else 0))
    sentinel_tokens, sentinel_resident_tokens = stage.sentinel_tokens()
    trial = Trial(
        trial_id=cell.trial_id(round_number),
        round=round_number,
        cell=cell,
        prefix_tokens=whole,
        began_ts=round(began_ts, 6),
        policy=arm.policy,
        page_cache=stage.plan.page_cache,
        page_cache_share=page_cache_share,
        gap_ms=_ms(sent_s - called_s),
        late_ms=_ms(sent_s - called_s - gap_s),
        ttft_ms=_ms(generation.ttft_s),
        total_ms=_ms(generation.total_s),
        sent_ts=round(sent_ts, 6),
        output_ids=generation.output_ids,
        reference_ids=prompt.reference_ids,
        device_tokens=generation.device_tokens,
        host_tokens=generation.host_tokens,
        storage_tokens=generation.storage_tokens,
        counters={name: round(after[name] - counters[name], 6) for name in COUNTERS},
        host_free_tokens=(host_free, stage.host_free_tokens()),
        sentinel_tokens=sentinel_tokens,
        sentinel_resident_tokens=sentinel_resident_tokens,
        times=generation.times,
        submit_ms=None if submit_ms is None else round(submit_ms, 3),
        operation=operation,
        warm_up=warmed,
        restore_estimate_ms=restore_estimate_ms,
        asked=asked,
    )
    trial.invalid = judge(trial)
    stage.settle()
    return trial


def _ask(stage: Stage, prompt: Prompt, gap_s: float) -> tuple[str | None, Asked]:
    """Submit as an agent would; the operation's id if it was admitted, and what the server said."""
    try:
        operation = stage.toolgap.submit(
            input_ids=prompt.prefix_ids, expected_gap_s=max(gap_s, NO_GAP_S), retry_for_s=0
        )
    except ToolgapError as refusal:
        error = refusal.error
        return None, Asked(admitted=False, code=error.code, estimate=error.estimate)
    return operation.operation_id, Asked(admitted=True, estimate=operation.estimate)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
