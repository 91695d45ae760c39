"""Signals that ask a command to stop, turned into an exception that unwinds everything it holds."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self


class Stopped(BaseException):
    """A signal asks to stop. No Exception, so that nothing on the way takes it for a fault."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class StopSignals:
    """While open, SIGINT, SIGTERM and SIGHUP raise :class:`Stopped`, save where they are held back.

    Held back they wait for the end of the block: what must not be left half done is started and ended there.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}
        self._held = 0
        self._pending: int | None = None

    def __enter__(self) -> Self:
        for number in self.NUMBERS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold signals back; one that came meanwhile is raised at the end, unless an exception is on its way."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
        if not self._held and self._pending is not None:
            number, self._pending = self._pending, None
            raise Stopped(number)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._held:
            self._pending = number
            return
        raise Stopped(number)
