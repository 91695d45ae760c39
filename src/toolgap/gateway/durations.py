"""How long gaps last, learned as they end: quantiles in bounded memory, the newer the more they count. No I/O."""

import math
from collections import OrderedDict
from collections.abc import Iterable

LEAST_S, MOST_S = 0.001, 86_400.0
"""Shorter and longer durations count as these."""

RATIO = 1.2
"""Between the bounds of a bucket: what a quantile is exact to."""

MEMORY = 256
"""Once so many durations are counted, each counts half, so that a change is learned."""

ENOUGH = 4
"""Of so many durations of a kind its own quantiles are believed."""

MAX_KINDS = 256


class Sketch:
    """A histogram with buckets of equal ratio."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self.total = 0.0
        """Durations counted, older ones in part."""

    def add(self, seconds: float) -> None:
        """A duration; negative ones count as the least."""
        bucket = math.ceil(math.log(min(max(seconds, LEAST_S), MOST_S) / LEAST_S, RATIO))
        self._counts[bucket] = self._counts.get(bucket, 0.0) + 1
        self.total += 1
        if self.total > MEMORY:
            self._counts = {bucket: n / 2 for bucket, n in self._counts.items() if n > 0.1}
            self.total = sum(self._counts.values())

    def quantile(self, share: float, over_s: float = 0.0) -> float | None:
        """The duration that this share of those over ``over_s`` does not exceed; None if none is over it."""
        over = sorted((bucket, n) for bucket, n in self._counts.items() if LEAST_S * RATIO**bucket > over_s)
        left = share * sum(n for _, n in over)
        for bucket, n in over:
            left -= n
            if left <= 1e-9:
                return LEAST_S * RATIO**bucket
        return None


class Durations:
    """Sketches by kind, the one that was quiet longest forgotten first; and one of all."""

    def __init__(self) -> None:
        self._of_kind: OrderedDict[str, Sketch] = OrderedDict()
        self._all = Sketch()

    def add(self, kind: str, seconds: float) -> None:
        """A gap of this kind has ended."""
        self._all.add(seconds)
        self._of_kind.setdefault(kind, Sketch()).add(seconds)
        self._of_kind.move_to_end(kind)
        if len(self._of_kind) > MAX_KINDS:
            self._of_kind.popitem(last=False)

    def quantile(self, kind: str, share: float, over_s: float = 0.0) -> float | None:
        """Of this kind, or of all while too few of it are known; None if nothing says.

        Args:
            kind: Of the gap.
            share: Between 0 and 1.
            over_s: How long the gap lasts already.
        """
        own = self._of_kind.get(kind)
        sketches = [own, self._all] if own is not None and own.total >= ENOUGH else [self._all]
        known = (sketch.quantile(share, over_s) for sketch in sketches if sketch.total >= ENOUGH)
        return next((seconds for seconds in known if seconds is not None), None)


def kind_of(tools: Iterable[str]) -> str:
    """The kind of a gap: the tools that run in it, whose durations are only seen together."""
    return "+".join(sorted(set(tools)))
