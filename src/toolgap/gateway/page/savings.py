"""What one restore came to: tokens that were used or read in vain, and an estimate of the time saved. Pure."""

import msgspec

from toolgap.protocol import OperationStatus


class Yield(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are of tokens; ``landed`` is the sum of ``used``, ``wasted`` and ``undecided``."""

    landed_tokens: int = 0
    """New in host memory by this restore."""
    used_tokens: int = 0
    """Of those, used by a request."""
    joined_tokens: int = 0
    """Of the used ones, those of a restore that a request waited for, having come before its end."""
    wasted_tokens: int = 0
    """Of the landed ones, those that the continuation did not use, or that had none."""
    undecided_tokens: int = 0
    """Of the landed ones, those of which it is not known, or not yet."""
    saved_s: float = 0.0
    """The estimate, see :func:`saved_s`."""
    unestimated: int = 0
    """1 if something was used and the server did not tell enough for an estimate."""


def yielded(status: OperationStatus, *, came_after_s: float | None, is_decided: bool) -> Yield:
    """What is known of a restore now.

    Args:
        status: The operation's newest.
        came_after_s: From its acceptance to the continuation's arrival, in seconds; None if none has come.
        is_decided: Whether what has landed and is not used by now counts as wasted.
    """
    landed = status.inserted_tokens
    used = min(status.used_tokens, landed)
    unused = landed - used
    saved = saved_s(status, came_after_s) if used else 0.0
    return Yield(
        landed_tokens=landed,
        used_tokens=used,
        joined_tokens=used if status.joined_requests else 0,
        wasted_tokens=unused if is_decided else 0,
        undecided_tokens=0 if is_decided else unused,
        saved_s=saved or 0.0,
        unestimated=int(saved is None),
    )


def saved_s(status: OperationStatus, came_after_s: float | None) -> float | None:
    """Estimate of the time that the continuation did not have to wait, in seconds.

    Without the restore SGLang would have read the same pages once the continuation had come. So it is the part
    of the restore's reading that lay before that moment, from storage's answer to the last page, as far as what
    was read was used. It is never more than computing the used tokens would have taken at the speed that the
    server has measured, where it has: a shorter way is not counted as a longer one. Loading to the device is the
    same either way, and so left out.

    Returns:
        None if the server did not tell when it read, or nothing tells when the continuation came.
    """
    came = [at for at in (came_after_s, status.used_after_s) if at is not None]
    if status.read_s is None or not came or not status.inserted_tokens:
        return None
    began_s = status.queried_s or 0.0
    before_s = max(0.0, min(status.read_s, *came) - began_s)
    saved = before_s * min(1.0, status.used_tokens / status.inserted_tokens)
    if status.estimate is not None and status.estimate.missing_tokens > 0:
        rate = status.estimate.recompute_s / status.estimate.missing_tokens
        saved = min(saved, rate * status.used_tokens)
    return saved
