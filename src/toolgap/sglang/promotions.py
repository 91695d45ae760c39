"""Promotions: what is in host memory is loaded to free device memory, one load after another."""

from typing import NamedTuple

from toolgap.protocol import Reason
from toolgap.sglang.internals.engine import Engine, Match
from toolgap.sglang.metrics import Metrics
from toolgap.sglang.work import Work


class Load(NamedTuple):
    """A load that was started."""

    match: Match
    counter: int
    """SGLang's, for batches that wait for it."""


class Promotions:
    """The promotions of one scheduler."""

    def __init__(self, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._load: Load | None = None
        """The last one: a batch that starts while it goes on waits for its layers."""

    def advance(self, work: Work) -> bool:
        """Wait for other loads, start an operation's own, or see that it is over.

        Returns:
            Whether it is over, or cannot be: the operation then ends, by its work's reason.
        """
        engine = self._engine
        if work.is_loading:
            assert work.promotion is not None
            if engine.is_loading(work.promotion):
                return False
            work.operation.promoted_tokens = work.promotion.host_tokens
            self._metrics.promoted(work.promotion.host_tokens)
        else:
            match = engine.match(work.prefix)
            if engine.loading and match.host_tokens:
                work.promotion = match
                return False
            # Asked on every rank at this step, whatever is free on this one.
            room_tokens = engine.device_room() if match.host_tokens else 0
            if match.host_tokens and match.host_tokens <= room_tokens:
                index = engine.promote(match)
                if index is not None:
                    self._load = Load(match, index)
                    work.promotion, work.is_loading = match, True
                    return False
            if match.host_tokens and work.reason in (Reason.COMPLETE, Reason.ALREADY_RESIDENT):
                work.reason = Reason.DEVICE_CAPACITY
        work.promotion = None
        return True

    def index_to_wait_for(self) -> int | None:
        """SGLang's index of a load under way: what it loads counts as being on the device already."""
        if self._load is not None and not self._engine.is_loading(self._load.match):
            self._load = None
        return None if self._load is None else self._load.counter

    def forget(self) -> None:
        """No load is waited for any more."""
        self._load = None
