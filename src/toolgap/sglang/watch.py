"""A clock that stands still while the scheduler takes no steps."""

_LONGEST_STEP_S = 0.25
"""What one step may add to it, however long it took."""


class Watch:
    """Time in which the scheduler took its steps: none passes during a pause or most of a long prefill.

    Args:
        now: By the monotonic clock, in seconds.
    """

    def __init__(self, now: float) -> None:
        self.elapsed_s = 0.0
        self._last_s = now

    def step(self, now: float, *, paused: bool) -> None:
        """The scheduler has begun a step; ``paused`` is whether generation is paused."""
        if not paused:
            self.elapsed_s += min(now - self._last_s, _LONGEST_STEP_S)
        self._last_s = now
