"""Medians with their spread, and ratios of medians. No I/O."""

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple


class Spread(NamedTuple):
    """Median and range of a few values, and how many there are."""

    p50: float
    low: float
    high: float
    trials: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread | None":
        """None if there are no values."""
        known = list(values)
        return cls(median(known), min(known), max(known), len(known)) if known else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed (nearest rank).

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]
