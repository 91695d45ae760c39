"""When to try a submit again: backoff with jitter, from what the server says, until a time limit.

Pure: the clock and the randomness are passed in, and nothing sleeps here.
"""

from collections.abc import Callable

SHORTEST_PAUSE_S = 0.1
LONGEST_JITTER_S = 8.0


class Retries:
    """The attempts of one call. The time limit runs from construction.

    Args:
        limit_s: No attempt begins later than this; 0 allows the first one only.
        clock: Monotonic, in seconds.
        jitter: A number from 0 to 1 at random, so that callers that were refused together do not come
            back together.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float], jitter: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._jitter = jitter
        self._started_s = clock()
        self._spread_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Since the first attempt."""
        return self._clock() - self._started_s

    @property
    def left_s(self) -> float:
        """Until the limit; 0 or less when it is over."""
        return self._limit_s - self.elapsed_s

    def pause_s(self, after_s: float) -> float | None:
        """How long to wait before the next attempt; None if it would come too late.

        Never shorter than ``after_s``. What is added at random may be as long as that, then twice as long
        with every attempt, up to a cap; it never makes the attempt late.
        """
        least_s = max(after_s, SHORTEST_PAUSE_S)
        room_s = self.left_s - least_s
        if room_s <= 0:
            return None
        self._spread_s = min(max(2 * self._spread_s, least_s), LONGEST_JITTER_S)
        return least_s + self._jitter() * min(self._spread_s, room_s)
