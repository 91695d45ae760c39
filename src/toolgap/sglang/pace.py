"""How often the threads of the scheduler's process take turns in Python's interpreter.

SGLang's storage threads run Python in it. At Python's own interval, 5 ms, each step of the scheduler may
wait as long for the interpreter, and each step of a read for the scheduler.
"""

import sys


class Pace:
    """Shortens Python's switch interval while operations are active.

    Args:
        interval_s: The interval then; 0 leaves it as it is.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._before_s: float | None = None

    def quicken(self, *, active: bool) -> None:
        """Set the interval for whether operations are active."""
        if active and self._before_s is None and self._interval_s:
            self._before_s = sys.getswitchinterval()
            sys.setswitchinterval(min(self._before_s, self._interval_s))
        elif not active and self._before_s is not None:
            sys.setswitchinterval(self._before_s)
            self._before_s = None
