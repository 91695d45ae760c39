"""Whose read is worth waiting for, so that no page is read twice.

Asked for an operation that has its pages still to read, and for an ordinary request.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from toolgap.sglang.internals.engine import Engine
from toolgap.sglang.internals.requests import Prefix
from toolgap.sglang.work import Work


class Leader(NamedTuple):
    """Whose read an operation waits for: that of one of the first two."""

    work: Work | None
    """Another operation."""
    request: Any
    """An ordinary request, by its handle."""
    shared_tokens: int
    """How much of the prefix is resident once it was read."""


class Leaders:
    """The operations that read in one scheduler, and the ordinary requests that do.

    Args:
        engine: It knows those of ordinary requests.
        piece_tokens: What an operation reads at once, where reads can be cut.
        work: Active operations by id.
    """

    def __init__(self, engine: Engine, piece_tokens: int, work: Mapping[str, Work]) -> None:
        self._engine = engine
        self._piece_tokens = piece_tokens
        self._work = work

    def find(
        self, prefix: Prefix, aligned_tokens: int, resident_tokens: int, *, but: Work | None = None
    ) -> Leader | None:
        """A read in flight that brings most of what an operation misses; operations' come first.

        Args:
            prefix: The operation's.
            aligned_tokens: Whole pages of it.
            resident_tokens: What of it is resident.
            but: The operation, if it was accepted already.
        """
        for other in self._work.values():
            if other is but or other.leader is not None:
                continue
            shared = self.brought_by(other, prefix, resident_tokens)
            if shared is not None:
                return Leader(other, None, shared)
        for read in self._engine.ordinary_reads():
            shared = self._engine.align(prefix.shared_tokens(read.prefix))
            end_tokens = max(self._engine.align(len(read.prefix.token_ids) - 1), shared)
            brought = min(shared, aligned_tokens)
            if self._worth_waiting(brought, resident_tokens, end_tokens - brought):
                return Leader(None, read.handle, brought)
        return None

    def brought_by(self, work: Work, prefix: Prefix, resident_tokens: int) -> int | None:
        """How much of a prefix is resident once an operation has read it; None if that is not worth waiting for."""
        if work.promotion is not None:
            return None
        shared = self._engine.align(work.prefix.shared_tokens(prefix))
        return (
            shared
            if self._worth_waiting(shared, resident_tokens, self._useless_tokens(work, shared))
            else None
        )

    def followers(self, work: Work) -> list[Work]:
        """Operations that wait for this one's read."""
        return [other for other in self._work.values() if other.leader is work]

    def _worth_waiting(self, shared_tokens: int, resident_tokens: int, useless_tokens: int) -> bool:
        """Whether to wait for a read for what is shared with it.

        Not for less than SGLang would read at all, and not if most of the time would be spent on what is
        of no use here.
        """
        gained_tokens = shared_tokens - resident_tokens
        # Where a read cannot be cut, it brings what its whole span ends with, or nothing.
        allowed_tokens = gained_tokens if self._engine.piecewise else 0
        return gained_tokens >= self._engine.prefetch_threshold_tokens and useless_tokens <= allowed_tokens

    def _useless_tokens(self, work: Work, shared_tokens: int) -> int:
        """What an operation reads beyond what is shared before that is resident: the rest of a piece at most."""
        rest_tokens = work.operation.aligned_tokens - shared_tokens
        return min(rest_tokens, self._piece_tokens) if self._engine.piecewise else rest_tokens
