"""Storage calls that operations left running when they ended, above all those that hang."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolgap.sglang.internals.engine import Engine
from toolgap.sglang.metrics import Metrics
from toolgap.sglang.storage_calls import StorageCalls

logger = logging.getLogger(__name__)


@dataclass
class LeftCall:
    """One of them. Equal on all ranks, but for its times."""

    operation: Any
    """SGLang's record of it."""
    tokens: int
    """Host memory that SGLang gives back when the call returns."""
    left_at: float
    hangs: bool
    """Whether it is taken for one that hangs: more work for the thread that makes it is refused."""
    replaced: bool = False
    """Whether another thread has taken that one's place."""
    counted: bool = False


class Stalls:
    """The calls left running in one scheduler."""

    def __init__(
        self, engine: Engine, calls: StorageCalls, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._metrics = metrics
        self._clock = clock
        self._left: dict[str, LeftCall] = {}

    def __len__(self) -> int:
        return len(self._left)

    @property
    def hanging(self) -> int:
        """Calls for whose return new operations have to wait."""
        return sum(call.hangs and not call.replaced for call in self._left.values())

    @property
    def given_up(self) -> int:
        """Calls that hang, whether or not their thread was replaced."""
        return sum(call.hangs for call in self._left.values())

    @property
    def quarantined_tokens(self) -> int:
        """Host memory that is given back when calls return."""
        return sum(call.tokens for call in self._left.values())

    def leave(self, key: str, operation: Any, tokens: int, *, hangs: bool) -> None:
        """An operation ended while its call, or one before it, may be running. On all ranks at the same step."""
        self._left[key] = LeftCall(self._calls.in_the_way_of(operation), tokens, self._clock(), hangs)

    def settle(self) -> None:
        """Drop calls that have returned on every rank. A collective, for the scheduler's step only."""
        if not self._left:
            return
        running = self._engine.any_rank([self._calls.running(call.operation) for call in self._left.values()])
        for (key, call), runs in zip(list(self._left.items()), running, strict=True):
            if not runs:
                del self._left[key]
                if call.counted and not call.replaced:
                    self._metrics.recovered()
            elif call.hangs and not call.counted:
                call.counted = True
                self._metrics.stalled()

    def due(self, stall_timeout_s: float, patience_s: float) -> tuple[list[str], list[str]]:
        """By this rank's clock: calls to take for hanging, and calls whose thread to replace."""
        now = self._clock()
        hang = [k for k, c in self._left.items() if not c.hangs and now - c.left_at >= stall_timeout_s]
        replace = [
            k for k, c in self._left.items() if c.hangs and not c.replaced and now - c.left_at >= patience_s
        ]
        return hang, [] if self._engine.has_several_ranks else replace

    def hang(self, keys: list[str]) -> None:
        """Take calls for hanging."""
        for key in keys:
            if key in self._left:
                self._left[key].hangs = True

    def replace(self, keys: list[str]) -> None:
        """Put another thread in the place of the one that hangs."""
        for key in keys:
            call = self._left.get(key)
            thread = None if call is None or call.replaced else self._calls.retire(call.operation)
            if call is not None and thread is not None:
                self._engine.replace_storage_thread(thread)
                call.replaced = True
                logger.warning(
                    "toolgap: a storage call has hung for long: another thread takes the next ones"
                )
                self._metrics.recovered()
