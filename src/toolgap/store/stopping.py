"""Lets a read that a thread makes know that nobody wants it any more.

HiCache's interface does not say for which operation a page is read. Who knows it says so around the call, in the
thread that makes it; the backend asks here.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_here = threading.local()


class Stopping(threading.Event):
    """An event that is set once somebody else's condition holds."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__()
        self._condition = condition

    def is_set(self) -> bool:
        """Whether the condition holds, or the event was set."""
        return super().is_set() or self._condition()


@contextmanager
def stops_when(condition: Callable[[], bool]) -> Iterator[None]:
    """While open: reads that this thread makes end once the condition holds.

    Args:
        condition: Asked often, and by other threads too.
    """
    before = current()
    _here.event = Stopping(condition)
    try:
        yield
    finally:
        _here.event = before


def current() -> threading.Event | None:
    """What ends the reads of this thread; None if nothing does."""
    found: threading.Event | None = getattr(_here, "event", None)
    return found
