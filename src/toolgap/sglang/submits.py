"""Whether a scheduler accepts a submit: what it supports, has room for, and is worth it.

All ranks decide alike: what is asked here is equal on all of them, but for when to try again.
"""

import hashlib
import time
from array import array

import msgspec

from toolgap.admission import (
    Awaited,
    Budget,
    Wanted,
    check_awaited,
    check_budget,
    check_worthwhile,
    estimate,
    retry_after_s,
)
from toolgap.operations import Operation
from toolgap.protocol import Code, OperationStatus, Refused, Target
from toolgap.settings import Admission
from toolgap.sglang.internals.engine import Match
from toolgap.sglang.internals.requests import Prefix
from toolgap.sglang.leaders import Leader
from toolgap.sglang.messages import HicachePrefetchReqInput, Restore
from toolgap.sglang.restorer import Restorer


def submit(restorer: Restorer, order: Restore, request: HicachePrefetchReqInput) -> OperationStatus:
    """Accept an operation and start it; one that was accepted before is told again.

    Args:
        restorer: Of this scheduler.
        order: The submit.
        request: The message that carried it, with the prefix's token ids.

    Raises:
        Refused: 409, 429, 501 or 503, with the reason.
    """
    token_ids = array("q")
    token_ids.frombytes(request.token_ids)
    prefix = Prefix(token_ids, order.extra_key, order.cache_salt or None)
    fingerprint = _fingerprint(prefix)
    known = restorer.log.find(order.operation_id)
    if known is not None:
        if known.fingerprint != fingerprint:
            raise Refused(
                Code.OPERATION_CONFLICT,
                f"operation {order.operation_id!r} is one of another prefix: choose another id",
                field="operation_id",
            )
        return known.status(restorer.clock())
    _check_gates(restorer, order)
    operation = Operation(
        operation_id=order.operation_id,
        fingerprint=fingerprint,
        namespace=restorer.validity.namespace,
        requested_tokens=len(token_ids),
        aligned_tokens=restorer.engine.align(len(token_ids)),
        ttl_s=order.ttl_s,
        submitted_ts=time.time(),
        deadline_ts=order.deadline_ts,
        target=order.target,
        lease_s=None if order.lease_s is None else min(order.lease_s, restorer.settings.max_lease_s),
        dp_rank=order.dp_rank,
        stable_tokens=order.stable_tokens,
    )
    match = restorer.engine.match(prefix)
    operation.resident_tokens = min(match.resident_tokens, operation.aligned_tokens)
    _check_room(restorer, operation, prefix, match, order)
    # Its return address. SGLang still has to pass the message itself on to the next stage.
    address = msgspec.structs.replace(request, token_ids=b"")
    restorer.accept(operation, prefix, address, match)
    return operation.status(restorer.clock())


def _check_gates(restorer: Restorer, order: Restore) -> None:
    """Raise Refused if this server, or the state that it is in, allows no such restore."""
    engine = restorer.engine
    if obstacle := engine.obstacle():
        raise Refused(Code.NOT_SUPPORTED, obstacle)
    restorer.validity.check_namespace(order.namespace)
    if order.target is Target.DEVICE and (obstacle := engine.promotion_obstacle()):
        raise Refused(Code.NOT_SUPPORTED, obstacle, field="target")
    if order.lease_s is not None and restorer.host.max_leased_tokens == 0:
        raise Refused(
            Code.NOT_SUPPORTED, "this server grants no leases (TOOLGAP_LEASE_SHARE is 0)", field="lease_s"
        )
    restorer.validity.check_storage()
    if engine.paused:
        raise Refused(Code.PAUSED, "the engine is paused", retry_after_s=1.0)
    if engine.flush_pending:
        raise Refused(Code.FLUSH_PENDING, "a flush waits for the engine to be idle", retry_after_s=1.0)
    if restorer.stalls.hanging:
        raise Refused(
            Code.STORAGE_STALLED,
            "a storage call that was given up has not returned yet",
            retry_after_s=5.0,
        )


def _check_room(
    restorer: Restorer, operation: Operation, prefix: Prefix, match: Match, order: Restore
) -> None:
    """Raise Refused unless what the operation has to read could be read, fits, and is worth it."""
    engine = restorer.engine
    missing_tokens = wanted_tokens = operation.aligned_tokens - operation.resident_tokens
    leader = None
    if wanted_tokens < engine.shortest_read_tokens(match):
        missing_tokens = wanted_tokens = 0
    elif leader := restorer.leaders.find(prefix, operation.aligned_tokens, operation.resident_tokens):
        wanted_tokens = operation.aligned_tokens - leader.shared_tokens
    elif not engine.can_anchor(match):
        raise Refused(
            Code.ANCHOR_NOT_BACKED_UP,
            f"the first {operation.resident_tokens} tokens are on the device only, and pages cannot be "
            "attached behind them before SGLang has backed them up",
            retry_after_s=1.0,
        )
    elif engine.declines_reads:
        raise Refused(
            Code.RATE_LIMITED,
            "ordinary requests' reads occupy SGLang's prefetch capacity",
            retry_after_s=1.0,
        )
    check_budget(
        Budget(
            restorer.settings.max_operations, restorer.host.max_operation_tokens, restorer.host.budget_tokens
        ),
        active_operations=len(restorer.work),
        active_tokens=restorer.budget_used_tokens,
        wanted_tokens=wanted_tokens,
        retry_after_s=retry_after_s(
            operation.ended_at - operation.accepted_at
            for operation in restorer.log.outcomes.values()
            if operation.ended_at is not None
        ),
    )
    if operation.lease_s is not None:
        restorer.leases.check(
            operation.aligned_tokens,
            sum(
                w.operation.aligned_tokens for w in restorer.work.values() if w.operation.lease_s is not None
            ),
            restorer.host.max_leased_tokens,
            restorer.clock(),
        )
    operation.estimate = estimate(
        restorer.rates,
        Wanted(
            operation.resident_tokens,
            missing_tokens,
            wanted_tokens,
            _queued_tokens(restorer, operation, leader),
        ),
        gap_s=order.gap_s,
        now_ts=order.deadline_ts - order.gap_s,
        batch_tokens=engine.prefill_chunk_tokens,
    )
    if restorer.settings.admission is Admission.DECLINE:
        if not order.force:
            _check_worthwhile(restorer, operation, prefix)
        _check_awaited(restorer, operation, wanted_tokens, order)


def _check_worthwhile(restorer: Restorer, operation: Operation, prefix: Prefix) -> None:
    """Raise Refused if a recompute is as fast, and let the continuation do that."""
    try:
        check_worthwhile(operation.estimate)
    except Refused:
        if restorer.settings.recompute_declined:
            restorer.declined.add(prefix)
        raise


def _queued_tokens(restorer: Restorer, operation: Operation, leader: Leader | None) -> int:
    """What is read before an operation that is not accepted yet gets its turn: equal on all ranks."""
    tokens = restorer.engine.ordinary_reads_tokens
    for other in restorer.work.values():
        if leader is not None and other is leader.work:
            tokens += max(0, leader.shared_tokens - other.landed_tokens)
        elif other.joined or other.operation.deadline_ts <= operation.deadline_ts:
            tokens += other.budget_tokens
        elif other.read is not None:
            tokens += min(other.read.span_tokens, other.budget_tokens)
    return tokens


def _check_awaited(restorer: Restorer, operation: Operation, wanted_tokens: int, order: Restore) -> None:
    """Raise Refused if host memory has room only where restored KV waits that is needed earlier."""
    check_awaited(
        [
            Awaited(span.end_tokens - span.start_tokens, span.operation.deadline_ts)
            for span in restorer.usage
            if span.operation.is_awaited
        ],
        host_tokens=restorer.engine.host_total_tokens,
        held_tokens=restorer.leases.tokens + restorer.budget_used_tokens,
        wanted_tokens=wanted_tokens,
        deadline_ts=operation.deadline_ts,
        now_ts=order.deadline_ts - order.gap_s,
    )


def _fingerprint(prefix: Prefix) -> bytes:
    digest = hashlib.blake2b(prefix.token_ids.tobytes(), digest_size=16)
    digest.update(repr((prefix.extra_key, prefix.cache_salt)).encode())
    return digest.digest()
