"""What the HTTP process asks of a scheduler's restorer, and what it is told."""

import logging

import msgspec

from toolgap.protocol import (
    Code,
    EngineStatus,
    ErrorReply,
    OperationStatus,
    Overview,
    Refused,
)
from toolgap.sglang.messages import (
    CancelOperation,
    Decide,
    Describe,
    HicachePrefetchReqInput,
    HicachePrefetchReqOutput,
    Quiesce,
    Recall,
    Recalled,
    Restore,
    decode_order,
)
from toolgap.sglang.quiescing import quiesce_for_release
from toolgap.sglang.restorer import Restorer
from toolgap.sglang.submits import submit

logger = logging.getLogger(__name__)

_to_json = msgspec.json.Encoder().encode


def carry_out(restorer: Restorer, message: HicachePrefetchReqInput) -> HicachePrefetchReqOutput | None:
    """Carry out one order; None if it has no answer, or is one for another replica. Never raises.

    Every rank gets every order, and so does every replica of data parallelism.
    """
    try:
        order = decode_order(message)
        dp_rank = restorer.engine.dp_rank
        if dp_rank is not None and isinstance(order, Restore) and order.dp_rank != dp_rank:
            return None
        match order:
            case Restore():
                return _reply(message, _submit(restorer, order, message))
            case Describe(operation_id=None):
                return _reply(message, overview(restorer))
            case Describe(operation_id=str(operation_id)):
                return _reply(message, restorer.find(operation_id).status(restorer.clock()))
            case Recall(request_id=request_id):
                body = msgspec.msgpack.encode(_recall(restorer, request_id))
                return HicachePrefetchReqOutput(rid=message.rid, status=200, body=body)
            case CancelOperation(operation_id=operation_id):
                return _reply(message, restorer.cancel(operation_id))
            case Quiesce():
                quiesce_for_release(restorer)
                return HicachePrefetchReqOutput(rid=message.rid, status=200, body=b"{}")
            case Decide():
                restorer.apply(order)
                return None
    except Refused as refusal:
        error = refusal
    except Exception:
        logger.exception("toolgap: a request failed")
        error = Refused(Code.INTERNAL_ERROR, "a fault in toolgap; see the server's log")
    return HicachePrefetchReqOutput(
        rid=message.rid,
        status=error.status,
        body=_to_json(ErrorReply(error=error.error)),
        retry_after_s=error.error.retry_after_s,
    )


def _submit(restorer: Restorer, order: Restore, message: HicachePrefetchReqInput) -> OperationStatus:
    try:
        return submit(restorer, order, message)
    except Refused as refusal:
        restorer.metrics.refused(refusal.error.code)
        raise


def _recall(restorer: Restorer, request_id: str) -> Recalled:
    """The tokens of a recent request.

    Raises:
        Refused: 404 if it is not known.
    """
    request = restorer.record.find(request_id)
    if request is None:
        raise Refused(
            Code.UNKNOWN_REQUEST,
            f"no finished request {request_id!r} is known: {len(restorer.record)} recent ones are "
            "(TOOLGAP_RECORDED_TOKENS)",
            field="request_id",
        )
    return Recalled(
        token_ids=request.token_ids.tobytes(),
        prompt_tokens=request.prompt_tokens,
        extra_key=request.extra_key,
        cache_salt=request.cache_salt,
        dp_rank=restorer.engine.dp_rank,
    )


def _reply(message: HicachePrefetchReqInput, body: OperationStatus | Overview) -> HicachePrefetchReqOutput:
    output = HicachePrefetchReqOutput(rid=message.rid, status=200, body=_to_json(body))
    if isinstance(body, OperationStatus):
        output.operation_id, output.ended = body.operation_id, body.state.terminal
    return output


def overview(restorer: Restorer) -> Overview:
    """All active operations, recent outcomes and the engine.

    Raises:
        Refused: 501 where there is nothing to report on.
    """
    engine = restorer.engine
    if obstacle := engine.obstacle():
        raise Refused(Code.NOT_SUPPORTED, obstacle)
    now = restorer.clock()
    return Overview(
        active=[operation.status(now) for operation in restorer.log],
        recent=[operation.status(now) for operation in reversed(restorer.log.outcomes.values())],
        engine=EngineStatus(
            namespace=restorer.validity.namespace,
            storage_backend=engine.storage_backend,
            prefetch_policy=engine.prefetch_policy,
            prefetch_threshold_tokens=engine.prefetch_threshold_tokens,
            page_tokens=engine.page_tokens,
            host_total_tokens=engine.host_total_tokens,
            host_free_tokens=engine.host_free_tokens,
            prefetch_capacity_tokens=engine.prefetch_capacity_tokens,
            prefetch_occupied_tokens=engine.prefetch_occupied_tokens,
            prefetch_retries_pending=engine.prefetch_retries_pending,
            reads_in_flight=engine.reads_in_flight,
            max_operations=restorer.settings.max_operations,
            max_operation_tokens=restorer.host.max_operation_tokens,
            waiting_joins=len(restorer.joins),
            stalled_reads=restorer.stalls.given_up,
            paused=engine.paused,
            budget_tokens=restorer.host.budget_tokens,
            budget_used_tokens=restorer.budget_used_tokens,
            quarantined_tokens=restorer.stalls.quarantined_tokens,
            leased_tokens=restorer.leases.tokens,
            max_leased_tokens=restorer.host.max_leased_tokens,
            dp_rank=engine.dp_rank,
            restore_tokens_per_s=restorer.rates.restore_tokens_per_s,
            prefill_tokens_per_s=restorer.rates.prefill_tokens_per_s,
        ),
    )
