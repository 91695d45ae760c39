"""How fast storage is read and prompts are computed here, from what this process sees.

Pure but for the clock. Samples come from SGLang's storage threads and from the scheduler's thread; only the
rank whose clock decides makes rates of them, and broadcasts those to all.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

from toolgap.admission import PrefillCost, Rates, RestoreCost

_KEPT_SAMPLES = 32
_HALF_LIFE_SAMPLES = 4
"""So many newer samples outweigh all before them: a change of storage's speed is found out with as many."""

_FORGETTING = 0.97
"""Weight that a prefill's measurement keeps with each that follows it."""

_PENALTY = 4.0
_NOISE = 0.05
"""Of a prefill's time, relative: a term that explains no more than this is not worth having."""

_CHANGE = 0.1
"""Relative change of a rate that is worth telling all ranks."""

_FRESHNESS_S = 5.0
"""How much older than the last measurement the time may be that ranks know of it."""


_EVERY_BATCH_UNTIL = 16
_EVERY_SO_MANY_BATCHES = 4
"""Prefill's rate is worked out after every batch at first, and then once in so many."""

_LOOKS = 200
_PATIENCE_S = 60.0
"""After so many scheduler steps and so long, a read that was not counted whole is taken to have failed: the
slowest of several ranks may be far behind."""


class Sample(NamedTuple):
    """One read of storage."""

    token_s: float
    at_ts: float


class _Uncounted:
    """A read that has returned, and of which it is not known yet whether it brought what it should."""

    def __init__(self, tokens: int, counted: Callable[[], int], began_s: float, ended_s: float) -> None:
        self.tokens, self.counted, self.began_s, self.ended_s = tokens, counted, began_s, ended_s
        self.looks = 0


def recent_median(values: Sequence[float]) -> float:
    """The median with weights that halve every few values into the past; the last value is the newest."""
    newest = len(values) - 1
    weighted = sorted(
        (value, 0.5 ** ((newest - index) / _HALF_LIFE_SAMPLES)) for index, value in enumerate(values)
    )
    half = sum(weight for _, weight in weighted) / 2
    total = 0.0
    for value, weight in weighted:
        total += weight
        if total >= half:
            return value
    return weighted[-1][0]


class PrefillFit:
    """A prefill's time as a sum of a constant, one part by tokens and one by pairs that attend.

    Recursive least squares of the relative error, with forgetting: relative to what was measured, so that a
    batch that took far too long (its kernels were compiled) counts for little. Time by tokens is what is
    assumed; another term is taken only if it explains what that does not, so that batches of about one size
    are read neither as attention nor as if their size did not matter.
    """

    _UNITS = (1.0, 1e-3, 1e-6)
    _MODELS = tuple(terms for count in (1, 2, 3) for terms in combinations((1, 0, 2), count))

    def __init__(self) -> None:
        self._moments = [[0.0] * 3 for _ in range(3)]
        self._sums = [0.0] * 3
        self._weight = 0.0
        self.longest_tokens = 0

    def add(self, tokens: int, pairs: float, seconds: float) -> None:
        """A batch was computed.

        Args:
            tokens: New ones.
            pairs: Of a new token and one that it attends to.
            seconds: More than 0.
        """
        row = [value * unit / seconds for value, unit in zip((1.0, tokens, pairs), self._UNITS, strict=True)]
        for i in range(3):
            self._sums[i] = _FORGETTING * self._sums[i] + row[i]
            for j in range(3):
                self._moments[i][j] = _FORGETTING * self._moments[i][j] + row[i] * row[j]
        self._weight = _FORGETTING * self._weight + 1
        self.longest_tokens = max(self.longest_tokens, tokens)

    def cost(self) -> PrefillCost | None:
        """What the batches so far say; None without any."""
        best: tuple[float, list[float]] | None = None
        for terms in self._MODELS:
            factors = _solve(
                [[self._moments[i][j] for j in terms] for i in terms], [self._sums[i] for i in terms]
            )
            if factors is None or min(factors) < 0:
                continue
            explained = sum(self._sums[i] * factor for i, factor in zip(terms, factors, strict=True))
            error = max(self._weight - explained, 0.0) / self._weight
            score = self._weight * math.log(error + _NOISE**2) + _PENALTY * len({1, *terms})
            if best is None or score < best[0]:
                full = [0.0] * 3
                for i, factor in zip(terms, factors, strict=True):
                    full[i] = factor * self._UNITS[i]
                best = score, full
        if best is None:
            return None
        batch_s, token_s, pair_s = best[1]
        return PrefillCost(
            batch_s=batch_s, token_s=token_s, pair_s=pair_s, longest_tokens=self.longest_tokens
        )


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small symmetric system by elimination; None if it says too little about its unknowns."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    count = len(rows)
    for i in range(count):
        if rows[i][i] <= 1e-9 * matrix[i][i] or rows[i][i] <= 0:
            return None
        for other in rows[i + 1 :]:
            factor = other[i] / rows[i][i]
            for j in range(i, count + 1):
                other[j] -= factor * rows[i][j]
    found = [0.0] * count
    for i in reversed(range(count)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, count))
        found[i] = (rows[i][count] - known) / rows[i][i]
    return found


class Meter:
    """What this process has seen of storage and prefills, and the rates that follow.

    Reads are noted by SGLang's storage threads: each step on what they share is one of a deque.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, unix_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._unix_clock = unix_clock
        self.has_several_ranks = False
        """Whether a read is over when the slowest of several ranks has made its part of it."""
        self._uncounted: deque[_Uncounted] = deque(maxlen=_KEPT_SAMPLES)
        self._reads: deque[Sample] = deque(maxlen=_KEPT_SAMPLES)
        self._queries_s: deque[float] = deque(maxlen=_KEPT_SAMPLES)
        self._prefill = PrefillFit()
        self._batches = 0
        self._last_batch_s = 0.0
        self._last_count_s = 0.0
        self._rates = Rates()
        self._has_new_reads = self._has_new_batches = False
        self.changed = False
        """Whether there is anything for :meth:`news` to look at."""

    def storage_asked(self, seconds: float) -> None:
        """A storage thread asked what storage holds."""
        self._queries_s.append(seconds)

    def storage_read(self, tokens: int, counted: Callable[[], int], began_s: float, ended_s: float) -> None:
        """A storage thread made a read; one that brings less than it should says nothing.

        Args:
            tokens: What it should bring.
            counted: Says what it has brought, in the scheduler's thread, now or some steps later.
            began_s: When this rank's part of it began, by the monotonic clock.
            ended_s: When that had been made.
        """
        if tokens > 0 and ended_s > began_s:
            self._uncounted.append(_Uncounted(tokens, counted, began_s, ended_s))
            self.changed = True

    def prefilled(self, tokens: int, pairs: float, launched_s: float, ended_s: float) -> None:
        """A prefill batch was computed: whole prompts, chunks of them, and decoding requests beside them.

        Args:
            tokens: New ones.
            pairs: Of a new token and one that it attends to.
            launched_s: When it was scheduled: before the one ahead of it had ended, perhaps.
            ended_s: When its result was there, by the same clock.
        """
        seconds = ended_s - max(launched_s, self._last_batch_s)
        self._last_batch_s = ended_s
        if tokens > 0 and seconds > 0:
            self._prefill.add(tokens, pairs, seconds)
            self._batches += 1
            if self._batches <= _EVERY_BATCH_UNTIL or self._batches % _EVERY_SO_MANY_BATCHES == 0:
                self._has_new_batches = self.changed = True

    def not_measured(self, ended_s: float) -> None:
        """A batch was computed that says nothing, but which the next one may have waited for."""
        self._last_batch_s = ended_s

    def forget_storage(self) -> None:
        """Another storage backend is attached, or none."""
        self._uncounted.clear()
        self._reads.clear()
        self._queries_s.clear()
        self._has_new_reads = True

    def rates(self) -> Rates:
        """What follows from what was seen."""
        restore, prefill = self._rates.restore, self._rates.prefill
        if self._has_new_reads:
            reads, queries_s = list(self._reads), list(self._queries_s)
            restore = (
                None
                if not reads
                else RestoreCost(
                    latency_s=recent_median(queries_s) if queries_s else 0.0,
                    token_s=recent_median([read.token_s for read in reads]),
                    measured_ts=reads[-1].at_ts,
                )
            )
        if self._has_new_batches:
            prefill = self._prefill.cost()
        self._has_new_reads = self._has_new_batches = False
        self._rates = Rates(restore=restore, prefill=prefill)
        return self._rates

    def _count(self) -> None:
        for _ in range(len(self._uncounted)):
            read = self._uncounted.popleft()
            if read.counted() >= read.tokens:
                began_s, ended_s = read.began_s, read.ended_s
                if self.has_several_ranks:
                    began_s, ended_s = max(began_s, self._last_count_s), self._clock()
                    self._last_count_s = ended_s
                if ended_s > began_s:
                    self._has_new_reads = True
                    self._reads.append(Sample((ended_s - began_s) / read.tokens, self._unix_clock()))
            elif read.looks < _LOOKS or self._clock() - read.ended_s < _PATIENCE_S:
                read.looks += 1
                self._uncounted.append(read)
                self.changed = True

    def news(self, known: Rates) -> Rates | None:
        """The rates, if they differ from what all ranks know by so much that it matters."""
        self.changed = False
        self._count()
        rates = self.rates()
        return (
            rates
            if _differs(rates.restore, known.restore) or _differs(rates.prefill, known.prefill)
            else None
        )


def _differs(one: RestoreCost | PrefillCost | None, other: RestoreCost | PrefillCost | None) -> bool:
    match one, other:
        case RestoreCost(), RestoreCost():
            return (
                abs(one.measured_ts - other.measured_ts) > _FRESHNESS_S
                or _far(one.token_s, other.token_s)
                or _far(one.latency_s, other.latency_s)
            )
        case PrefillCost(), PrefillCost():
            return (
                one.longest_tokens > other.longest_tokens * (1 + _CHANGE)
                or _far(one.batch_s, other.batch_s)
                or _far(one.token_s, other.token_s)
                or _far(one.pair_s, other.pair_s)
            )
        case _:
            return one is not other


def _far(one: float, other: float) -> bool:
    return abs(one - other) > _CHANGE * max(one, other)
