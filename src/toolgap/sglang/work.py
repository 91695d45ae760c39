"""What the restorer keeps of an active operation beside its record."""

from typing import Any

from toolgap.operations import Operation
from toolgap.protocol import Reason
from toolgap.sglang.internals.engine import Hold, Match, Read
from toolgap.sglang.internals.requests import Prefix
from toolgap.sglang.messages import HicachePrefetchReqInput


class Work:
    """An active operation: at any time it waits for one thing at most, named by one of the first fields.

    With all of them None it is ready to read its next piece, and waits for its turn.
    """

    def __init__(
        self, operation: Operation, prefix: Prefix, request: HicachePrefetchReqInput, arrival: int
    ) -> None:
        self.read: Read | None = None
        """A piece of its own."""
        self.leader: Work | None = None
        """Another operation that reads its pages."""
        self.leading_request: Any = None
        """An ordinary request that does, by its handle."""
        self.promotion: Match | None = None
        """A load to the device: waits for other loads to end, then for its own."""

        self.operation = operation
        self.prefix = prefix
        self.request = request
        """Kept for its return address."""
        self.arrival = arrival
        self.reads = 0
        """Pieces issued so far."""
        self.attempts = 0
        """Pieces and leaders in a row that brought nothing."""
        self.landed_tokens = 0
        """Resident part of the prefix when it was last looked at."""
        self.shared_tokens = 0
        """What its leader brings."""
        self.reason = Reason.COMPLETE
        self.known_end_tokens: int | None = None
        """What it will end with, once promotion is over."""
        self.is_loading = False
        """Whether its promotion has been started."""
        self.hold: Hold | None = None
        """Keeps what has landed from being evicted before the rest has."""
        self.joined: set[Any] = set()
        """Handles of requests that wait for this operation."""
        self.declined: set[Any] = set()
        """Handles of requests whose wait ran out: they go on without, and read nothing of it twice."""

    @property
    def is_ready(self) -> bool:
        """Whether it could read its next piece."""
        return self.operation.queued

    @property
    def budget_tokens(self) -> int:
        """What it may still read into host memory."""
        if self.leader is not None or self.leading_request is not None:
            return max(0, self.operation.aligned_tokens - max(self.shared_tokens, self.landed_tokens))
        return max(0, self.operation.aligned_tokens - self.landed_tokens)

    def check_integrity(self) -> None:
        """Raise AssertionError unless exactly one thing is waited for."""
        waits = [self.read, self.leader, self.leading_request, self.promotion]
        assert waits.count(None) == (4 if self.operation.queued else 3)
        assert self.operation.following == (self.leader is not None or self.leading_request is not None)
        assert self.operation.waiting_requests == len(self.joined)
