"""One answer from the replies of all data-parallel replicas, each of which has operations of its own."""

from collections.abc import Sequence

import msgspec

from toolgap.protocol import Code, OperationStatus, Overview, Refused
from toolgap.sglang.messages import HicachePrefetchReqOutput

Reply = HicachePrefetchReqOutput


def check_replica(routed_dp_rank: int | None, replicas: int) -> int | None:
    """The replica that a submit means; None where there is one only.

    Raises:
        Refused: ``invalid_field``, unless it names one that there is.
    """
    if replicas == 1:
        if routed_dp_rank:
            raise _wrong_replica(f"this server has one replica, not a replica {routed_dp_rank}: leave it out")
        return None
    advice = (
        f"this server has {replicas} replicas, and each has a cache of its own: name the one (0 to "
        f"{replicas - 1}) that will serve the continuation, and send the same routed_dp_rank with /generate"
    )
    if routed_dp_rank is None:
        raise _wrong_replica(advice)
    if routed_dp_rank >= replicas:
        raise _wrong_replica(f"there is no replica {routed_dp_rank}: {advice}")
    return routed_dp_rank


def _wrong_replica(message: str) -> Refused:
    return Refused(Code.INVALID_FIELD, f"routed_dp_rank: {message}", field="routed_dp_rank")


def that_knows(replies: Sequence[Reply]) -> Reply:
    """Of the replies about one operation, that of the replica which has it.

    Ids are a replica's own: of two that have it, the one where it is active answers, then the newer.
    """
    knowing = [reply for reply in replies if reply.status == 200]
    if not knowing:
        return next((reply for reply in replies if reply.status != 404), replies[0])
    if len(knowing) == 1:
        return knowing[0]

    def rank(reply: Reply) -> tuple[bool, float]:
        status = msgspec.json.decode(reply.body, type=OperationStatus)
        return not reply.ended, status.submitted_ts

    return max(knowing, key=rank)


def first_success(replies: Sequence[Reply]) -> Reply:
    """Of the replies about something that one replica at most knows, that replica's; otherwise any."""
    return next((reply for reply in replies if reply.status == 200), replies[0])


def first_refusal(replies: Sequence[Reply]) -> Reply:
    """A refusal if any replica refused; otherwise any of the replies, which say the same."""
    return next((reply for reply in replies if reply.status != 200), replies[0])


def overview(replies: Sequence[Reply]) -> Reply:
    """The operations of all replicas, and every replica's engine. A refusal of one is the answer."""
    first = first_refusal(replies)
    if first.status != 200 or len(replies) == 1:
        return first
    parts = [msgspec.json.decode(reply.body, type=Overview) for reply in replies]
    parts.sort(key=lambda part: part.engine.dp_rank or 0)
    recent = [status for part in parts for status in part.recent]
    recent.sort(key=lambda status: status.submitted_ts, reverse=True)
    merged = Overview(
        active=[status for part in parts for status in part.active],
        recent=recent,
        engine=parts[0].engine,
        replicas=[part.engine for part in parts],
    )
    return Reply(status=200, body=msgspec.json.encode(merged))
