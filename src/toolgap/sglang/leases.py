"""Leases: restored host memory that is held until a request uses it, or for a time.

They give way before an ordinary request would lack room, and end with a flush or new weights.
"""

from collections.abc import Iterator
from typing import NamedTuple

from toolgap.operations import Operation
from toolgap.protocol import Code, Refused
from toolgap.sglang.internals.engine import Engine, Hold
from toolgap.sglang.internals.requests import Prefix


class Lease(NamedTuple):
    """One operation's."""

    operation: Operation
    prefix: Prefix
    hold: Hold
    until_s: float
    """By the clock of this rank; only the deciding rank's is looked at."""


class Leases:
    """The leases of one scheduler, by operation id."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    @property
    def tokens(self) -> int:
        """Host memory that leases hold; a prefix that two of them share counts twice."""
        return sum(lease.operation.leased_tokens for lease in self._leases.values())

    def check(self, wanted_tokens: int, promised_tokens: int, limit_tokens: int, now: float) -> None:
        """Raise Refused (429) unless one more lease fits.

        Args:
            wanted_tokens: It would hold.
            promised_tokens: Active operations will hold, once they end.
            limit_tokens: All of them may hold.
            now: By the clock of :attr:`Lease.until_s`.
        """
        if wanted_tokens > limit_tokens:
            raise Refused(
                Code.PREFIX_TOO_LARGE,
                f"a lease of {wanted_tokens} tokens was asked for, and leases may hold {limit_tokens} "
                "(TOOLGAP_LEASE_SHARE): submit it without lease_s",
                field="lease_s",
            )
        if self.tokens + promised_tokens + wanted_tokens > limit_tokens:
            ends = [lease.until_s - now for lease in self._leases.values()]
            raise Refused(
                Code.LEASE_BUDGET,
                f"leases hold or were promised {self.tokens + promised_tokens} of {limit_tokens} tokens "
                f"(TOOLGAP_LEASE_SHARE), and this one needs {wanted_tokens}",
                retry_after_s=round(min(max(min(ends, default=1.0), 0.1), 10.0), 3),
                field="lease_s",
            )

    def grant(self, lease: Lease, tokens: int) -> None:
        """Begin one; the operation has ended."""
        lease.operation.leased_tokens = tokens
        self._leases[lease.operation.operation_id] = lease

    def end(self, operation_id: str) -> None:
        """End one, if it is still there."""
        lease = self._leases.pop(operation_id, None)
        if lease is not None:
            lease.operation.leased_tokens = 0
            self._engine.release(lease.hold)

    def end_all(self) -> None:
        """End every one."""
        for operation_id in list(self._leases):
            self.end(operation_id)

    def give_way(self) -> bool:
        """End the oldest; False if there is none."""
        if not self._leases:
            return False
        self.end(next(iter(self._leases)))
        return True

    def used_by(self, prefix: Prefix) -> None:
        """End those whose whole prefix a request has used."""
        for lease in self:
            if prefix.shared_tokens(lease.prefix) >= lease.operation.leased_tokens:
                self.end(lease.operation.operation_id)

    def due(self, now: float) -> list[str]:
        """Ids of leases whose time is over."""
        return [operation_id for operation_id, lease in self._leases.items() if now >= lease.until_s]

    def forget_all(self) -> None:
        """The cache was dropped, and the locks with it."""
        for lease in self._leases.values():
            lease.operation.leased_tokens = 0
        self._leases.clear()
