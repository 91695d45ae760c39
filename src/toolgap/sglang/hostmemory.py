"""Host memory: how much of it operations and leases may take, and what they do not evict for it."""

import contextlib
from collections.abc import Iterator

from toolgap.settings import Settings
from toolgap.sglang.internals.engine import Engine, Hold


class HostMemory:
    """The host memory of one scheduler."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._settings = settings
        self.guarding = False
        """Whether it is being allocated for an operation: leases do not give way to those."""

    @property
    def budget_tokens(self) -> int:
        """What active operations may read into."""
        return self._engine.align(int(self._engine.host_total_tokens * self._settings.host_share))

    @property
    def max_operation_tokens(self) -> int:
        """Longest span that one operation may read."""
        return min(self._settings.max_operation_tokens or self.budget_tokens, self.budget_tokens)

    @property
    def max_leased_tokens(self) -> int:
        """What leases may hold."""
        return self._engine.align(int(self._engine.host_total_tokens * self._settings.lease_share))

    @contextlib.contextmanager
    def guard(self, tokens: int) -> Iterator[None]:
        """While it is allocated for an operation: evict nothing that a waiting request found there.

        What a running request has is on the device as well, and SGLang evicts no host copy of that; what
        operations have restored so far, and leases, are held anyhow.
        """
        holds: list[Hold] = []
        self.guarding = True
        try:
            if self._engine.needs_eviction(tokens):
                self._engine.hold_waiting(holds)
            yield
        finally:
            self.guarding = False
            for hold in holds:
                self._engine.release(hold)
