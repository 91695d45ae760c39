"""Whether a restore may start: how many at once, and how much of host memory they may fill.

Pure: no I/O and no SGLang. The budget is the operations' own; SGLang's prefetch limit is left to
ordinary requests.
"""

from collections.abc import Iterable
from typing import NamedTuple

from toolgap.protocol import Code, Refused


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
