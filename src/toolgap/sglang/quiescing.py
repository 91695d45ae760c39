"""Before the engine is changed: operations end, and the storage calls that they leave behind return.

Every rank gets to each of these at the same step.
"""

import logging
import time

from toolgap.operations import Stop
from toolgap.protocol import Code, Reason, Refused, State
from toolgap.sglang.restorer import Restorer

logger = logging.getLogger(__name__)

_DRAIN_PASSES = 5000
_DRAIN_PAUSE_S = 0.001
"""How long the batch in flight is waited for, in passes: a count is the same on every rank."""


def is_busy(restorer: Restorer) -> bool:
    """Whether a rank's storage threads cannot be stopped. Asked on every rank at the same step."""
    engine = restorer.engine
    if engine.may_ask:
        return engine.any_rank([not _is_quiet(restorer)])[0]
    return bool(restorer.work or restorer.stalls or engine.reads_in_flight)


def operations_alone_hinder_a_flush(restorer: Restorer) -> bool:
    """Whether a flush would fail for operations alone: SGLang refuses it anyhow while there are requests."""
    engine = restorer.engine
    if not engine.may_ask:
        return is_busy(restorer)
    has_requests, busy = engine.any_rank([not engine.free_of_requests, not _is_quiet(restorer)])
    return busy and not has_requests


def quiesce(restorer: Restorer, reason: Reason) -> None:
    """End every operation, waiting shortly for the batch in flight, before the engine is changed.

    An operation whose storage call hangs stays: SGLang then sees that it is not idle, and refuses
    the change as it would for an ordinary request's read.
    """
    restorer.stop_all(Stop(State.CANCELLED, reason))
    if reason is not Reason.STORAGE_REPLACED:
        restorer.leases.end_all()
    if not restorer.engine.may_ask:
        return
    for _ in range(_DRAIN_PASSES):
        if not is_busy(restorer):
            return
        restorer.engine.drain()
        time.sleep(_DRAIN_PAUSE_S)
    logger.warning("toolgap: a storage call does not return")


def quiesce_for_release(restorer: Restorer) -> None:
    """End every operation before memory goes.

    Raises:
        Refused: 503 if a storage call hangs.
    """
    quiesce(restorer, Reason.MEMORY_RELEASED)
    if is_busy(restorer):
        raise Refused(
            Code.STORAGE_STALLED,
            "a storage call of a restore has not returned, and memory cannot be released under it",
            retry_after_s=5.0,
        )


def _is_quiet(restorer: Restorer) -> bool:
    """Whether SGLang can stop this rank's storage threads: no operation is active, and no call is running."""
    return not restorer.work and not restorer.calls
