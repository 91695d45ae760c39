"""One line of ``trials.jsonl``: everything that a trial of the matrix measured. No I/O."""

from typing import Any

import msgspec

from toolgap.bench.plan import Cell
from toolgap.protocol import Estimate, OperationStatus


class Asked(msgspec.Struct, kw_only=True):
    """What the server said to a submit that named the gap and forced nothing."""

    admitted: bool
    code: str | None = None
    """Why not."""
    estimate: Estimate | None = None
    """What it expected; None if it had measured too little."""


class Trial(msgspec.Struct, kw_only=True):
    """One continuation. Times are in milliseconds unless named otherwise; counts are of tokens."""

    trial_id: str
    round: int
    cell: Cell
    prefix_tokens: int
    """Whole pages of the prompt, all that a cache can serve."""
    began_ts: float
    """Unix time."""
    policy: str
    page_cache: str
    page_cache_share: float | None
    """Of the prompt's L3 files, before the trial: how much the page cache held. None if not known."""
    gap_ms: float
    """From the tool call leaving to the continuation being sent, as it came out."""
    late_ms: float
    """By how much that was later than the cell asks for: a submit's own reply, mostly."""
    ttft_ms: float
    """From sending the continuation to its first token, at the client."""
    total_ms: float
    sent_ts: float
    output_ids: list[int]
    reference_ids: list[int]
    """What the engine answered when the prompt was computed the first time."""
    device_tokens: int
    host_tokens: int
    storage_tokens: int
    counters: dict[str, float]
    """Changes of the engine's own Prometheus counters, from the tool call to the trial's end."""
    host_free_tokens: tuple[int, int]
    """Free host memory when the tool call leaves and at the trial's end."""
    sentinel_tokens: int
    sentinel_resident_tokens: int
    """Of an unrelated prefix that was in L2 at the start: what is resident at the end."""
    times: dict[str, float]
    """The engine's own times of the continuation."""
    submit_ms: float | None = None
    operation: OperationStatus | None = None
    """The restore, as it ended."""
    warm_up: dict[str, Any] | None = None
    """The warm-up request: its TTFT, what it found where, and whether it had ended."""
    restore_estimate_ms: float | None = None
    """Recipe ``early-return``: the time of a restore, measured before the trials."""
    asked: Asked | None = None
    """Recipe ``admission``: what the server decided, before the restore was forced if it declined."""
    invalid: list[str] = []
    """Which validity rules did not hold. Such a trial is in no median."""

    @property
    def joined(self) -> bool:
        """Whether the continuation waited for the restore."""
        return self.operation is not None and self.operation.joined_requests > 0
