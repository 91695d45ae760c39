"""Trials as the demo measures them."""

from typing import Any

from toolgap.demo.trials import Arm, Trial
from toolgap.engineclient import Generation
from toolgap.protocol import OperationStatus, Reason, State

ALIGNED = 4096
TTFT_S = {Arm.RECOMPUTE: 9.0, Arm.ON_REQUEST: 0.4, Arm.AHEAD: 0.2}
CACHED = {Arm.RECOMPUTE: (0, 0, 0), Arm.ON_REQUEST: (0, 0, ALIGNED), Arm.AHEAD: (0, ALIGNED, 0)}


def restore(**changes: Any) -> OperationStatus:
    fields: dict[str, Any] = {
        "operation_id": "x",
        "state": State.RESTORED,
        "reason": Reason.COMPLETE,
        "requested_tokens": ALIGNED + 9,
        "aligned_tokens": ALIGNED,
        "resident_tokens": 0,
        "read_tokens": ALIGNED,
        "ttl_s": 60.0,
        "elapsed_s": 0.18,
        "namespace": "n",
    }
    return OperationStatus(**(fields | changes))


def trial(
    arm: Arm,
    number: int = 1,
    *,
    ttft_s: float | None = None,
    output_ids: list[int] | None = None,
    cached: tuple[int, int, int] | None = None,
    operation: OperationStatus | None = None,
) -> Trial:
    device, host, storage = CACHED[arm] if cached is None else cached
    generation = Generation(
        ttft_s=TTFT_S[arm] if ttft_s is None else ttft_s,
        total_s=10.0,
        prompt_tokens=ALIGNED + 100,
        output_ids=[1, 2, 3] if output_ids is None else output_ids,
        text="The tests pass.",
        device_tokens=device,
        host_tokens=host,
        storage_tokens=storage,
    )
    if operation is None and arm is Arm.AHEAD:
        operation = restore()
    return Trial(
        number=number,
        arm=arm,
        aligned_tokens=ALIGNED,
        tool_s=0.2,
        gap_s=1.0,
        generation=generation,
        restore=operation,
    )


def good_trials(count: int = 3) -> list[Trial]:
    return [trial(arm, number) for number in range(1, count + 1) for arm in Arm]
