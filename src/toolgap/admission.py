"""Whether a restore may start: how many at once, how much of host memory they may fill, and is it worth it.

Pure: no I/O and no SGLang. The budget is the operations' own; SGLang's prefetch limit is left to
ordinary requests.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from toolgap.protocol import Code, Estimate, Refused


class Budget(NamedTuple):
    """What operations may use."""

    max_operations: int
    operation_tokens: int
    """Longest span that one operation may read."""
    host_tokens: int
    """Tokens of host memory that all active operations together may read into."""


def check_budget(
    budget: Budget,
    *,
    active_operations: int,
    active_tokens: int,
    wanted_tokens: int,
    retry_after_s: float,
) -> None:
    """Raise Refused (429) unless one more operation fits.

    Args:
        budget: The limits.
        active_operations: Operations that have not ended.
        active_tokens: Spans that they have still to read.
        wanted_tokens: Span that the new one would read; 0 if it would read nothing itself.
        retry_after_s: When room is expected.
    """
    if wanted_tokens > min(budget.operation_tokens, budget.host_tokens):
        limit = (
            f"one operation may read {budget.operation_tokens} (TOOLGAP_MAX_OPERATION_TOKENS): submit a shorter "
            "prefix, or raise it"
            if budget.operation_tokens < budget.host_tokens
            else f"operations may fill {budget.host_tokens} tokens of host memory: submit a shorter prefix, or "
            "raise TOOLGAP_HOST_SHARE or --hicache-size"
        )
        raise Refused(Code.PREFIX_TOO_LARGE, f"{wanted_tokens} tokens are missing, and {limit}")
    if active_operations >= budget.max_operations:
        raise Refused(
            Code.TOO_MANY_OPERATIONS,
            f"{active_operations} operations are active, the limit (TOOLGAP_MAX_OPERATIONS)",
            retry_after_s=retry_after_s,
        )
    if active_tokens + wanted_tokens > budget.host_tokens:
        raise Refused(
            Code.HOST_BUDGET,
            f"active operations have {active_tokens} of {budget.host_tokens} tokens of host memory to fill, and "
            f"this one needs {wanted_tokens}",
            retry_after_s=retry_after_s,
        )


def retry_after_s(elapsed_s: Iterable[float], default_s: float = 1.0) -> float:
    """When an active operation can be expected to end: the mean of recent ones, 0.1 to 10 seconds."""
    recent = list(elapsed_s)
    mean_s = sum(recent) / len(recent) if recent else default_s
    return round(min(max(mean_s, 0.1), 10.0), 3)


def piece_tokens(missing_tokens: int, limit_tokens: int, page_tokens: int, threshold_tokens: int) -> int:
    """How much of a span to read at once.

    Args:
        missing_tokens: The span; whole pages, at least the threshold.
        limit_tokens: A piece's length if it could be freely chosen.
        page_tokens: Pieces are whole pages.
        threshold_tokens: SGLang reads nothing shorter, so that neither a piece nor the rest may be.
    """
    least = -(-max(threshold_tokens, 1) // page_tokens) * page_tokens
    piece = max(limit_tokens - limit_tokens % page_tokens, least)
    return piece if missing_tokens - piece >= least else missing_tokens


# ---- is it worth it ----

OPTIMISM_HALF_LIFE_S = 60.0
"""Without a new measurement, storage is taken to be twice as fast after each such time.

A storage that was slow once, and that nobody reads since its restores are declined, is so tried again.
"""

_LEAST_S = 1e-6
"""No recompute is free: what the gap hides wholly is worth restoring."""

_EXTRAPOLATION = 8
"""A recompute whose batches hold so many times more tokens than any that was measured is not estimated."""


class PrefillCost(msgspec.Struct, frozen=True, kw_only=True):
    """How long a prefill batch takes, as it was measured: a part of its own, one by tokens, one by attention."""

    batch_s: float
    """Whatever it holds."""
    token_s: float
    """For each new token."""
    pair_s: float
    """For each pair of a new token and one that it attends to."""
    longest_tokens: int
    """New tokens of the largest batch that was measured."""

    def added_s(self, new_tokens: int, behind_tokens: int, batch_tokens: int | None) -> float | None:
        """What a prefill takes longer if it computes more tokens; None if it is too far from what was measured.

        Args:
            new_tokens: The additional tokens.
            behind_tokens: What is resident before them.
            batch_tokens: SGLang cuts prefills into chunks of so many tokens; None if it does not.
        """
        if min(new_tokens, batch_tokens or new_tokens) > _EXTRAPOLATION * self.longest_tokens:
            return None
        batches = new_tokens // batch_tokens if batch_tokens else 0
        pairs = new_tokens * (behind_tokens + new_tokens / 2)
        return max(self.batch_s * batches + self.token_s * new_tokens + self.pair_s * pairs, _LEAST_S)


class RestoreCost(msgspec.Struct, frozen=True, kw_only=True):
    """How long storage takes to answer and to be read, as it was measured."""

    latency_s: float
    """For being asked what it holds."""
    token_s: float
    """For each token read."""
    measured_ts: float
    """Unix time of the last measurement."""

    def at(self, now_ts: float) -> float:
        """Seconds a token, the more hopeful the longer ago it was measured."""
        age_s = max(now_ts - self.measured_ts, 0.0)
        return max(self.token_s * math.exp2(-min(age_s / OPTIMISM_HALF_LIFE_S, 60.0)), 1e-12)


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured so far: equal on all ranks."""

    restore: RestoreCost | None = None
    prefill: PrefillCost | None = None

    @property
    def restore_tokens_per_s(self) -> float | None:
        """How fast storage was when it was last read."""
        return None if self.restore is None else round(1 / self.restore.token_s, 1)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """How fast a batch as large as the largest so far is computed."""
        if self.prefill is None:
            return None
        tokens = self.prefill.longest_tokens
        return round(
            tokens / max(self.prefill.batch_s + (self.prefill.added_s(tokens, 0, None) or 0.0), _LEAST_S), 1
        )


class Wanted(NamedTuple):
    """What an operation asks for, in tokens."""

    resident_tokens: int
    missing_tokens: int
    """What its continuation would recompute."""
    read_tokens: int
    """What it reads itself: less than what is missing if another read brings a part."""
    queued_tokens: int
    """What is read before that."""


def estimate(
    rates: Rates, wanted: Wanted, *, gap_s: float, now_ts: float, batch_tokens: int | None
) -> Estimate | None:
    """What a restore and a recompute will cost; None unless both were measured.

    The rule: a restore is worthwhile if what is left of it once the gap has passed, for which its
    continuation would wait, is less than the recompute.

    Args:
        rates: What was measured.
        wanted: What the operation asks for.
        gap_s: Until its continuation.
        now_ts: Unix time of the submit, equal on all ranks.
        batch_tokens: Chunks of SGLang's prefill; None if it does not cut them.
    """
    if rates.restore is None or rates.prefill is None or wanted.missing_tokens <= 0:
        return None
    recompute_s = rates.prefill.added_s(wanted.missing_tokens, wanted.resident_tokens, batch_tokens)
    if recompute_s is None:
        return None
    token_s = rates.restore.at(now_ts)
    restore_s = rates.restore.latency_s + (wanted.queued_tokens + wanted.read_tokens) * token_s
    return Estimate(
        missing_tokens=wanted.missing_tokens,
        restore_s=round(restore_s, 6),
        recompute_s=round(recompute_s, 6),
        gap_s=round(gap_s, 6),
        queued_tokens=wanted.queued_tokens,
        restore_tokens_per_s=round(1 / token_s, 1),
        prefill_tokens_per_s=round(wanted.missing_tokens / recompute_s, 1),
        worthwhile=max(0.0, restore_s - gap_s) < recompute_s,
    )


def check_worthwhile(estimate: Estimate | None) -> None:
    """Raise Refused (409), with the estimate, if a restore is not worthwhile. What was not measured is."""
    if estimate is None or estimate.worthwhile:
        return
    ahead = f", {estimate.queued_tokens} more ahead of them" if estimate.queued_tokens else ""
    refusal = Refused(
        Code.NOT_WORTHWHILE,
        f"restoring {estimate.missing_tokens} tokens would take {estimate.restore_s:.3g} s ("
        f"{estimate.restore_tokens_per_s:,.0f} tokens/s{ahead}), {estimate.restore_s - estimate.gap_s:.3g} s of it "
        f"after the continuation is expected, and recomputing them takes {estimate.recompute_s:.3g} s: submit "
        "earlier, say expected_gap_s if the continuation comes later, or force it",
    )
    refusal.error.estimate = estimate
    raise refusal


class Awaited(NamedTuple):
    """Restored KV that no request has used yet."""

    tokens: int
    deadline_ts: float
    """Unix time at which its continuation is expected."""


def check_awaited(
    awaited: Sequence[Awaited],
    *,
    host_tokens: int,
    held_tokens: int,
    wanted_tokens: int,
    deadline_ts: float,
    now_ts: float,
) -> None:
    """Raise Refused (429) if a restore would evict KV whose continuation is expected before its own.

    Args:
        awaited: Restored KV that is not used yet and not held otherwise.
        host_tokens: Host memory.
        held_tokens: Its part that leases hold and that active operations may still fill.
        wanted_tokens: What the restore would read.
        deadline_ts: When its own continuation is expected.
        now_ts: Unix time of the submit, equal on all ranks.
    """
    earlier = [other for other in awaited if now_ts < other.deadline_ts <= deadline_ts]
    awaited_tokens = sum(other.tokens for other in earlier)
    if not (awaited_tokens and wanted_tokens) or wanted_tokens <= host_tokens - held_tokens - awaited_tokens:
        return
    first_s = min(other.deadline_ts for other in earlier) - now_ts
    raise Refused(
        Code.AWAITED_KV,
        f"host memory has {host_tokens} tokens: restored KV whose continuations are expected before this one's "
        f"fills {awaited_tokens} of them, leases and active operations {held_tokens}, and this restore needs "
        f"{wanted_tokens}",
        retry_after_s=round(min(max(first_s, 0.1), 10.0), 3),
    )
