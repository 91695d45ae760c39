"""Single keys from a terminal, without Enter and without echo."""

import os
import select
import termios
import time
import tty
from types import TracebackType
from typing import Any, Self, TextIO


class Keys:
    """While open, keys are read as they are pressed. Where the input is closed or no terminal, there are none."""

    def __init__(self, source: TextIO | None) -> None:
        self._source = source
        self._before: list[Any] | None = None

    def __enter__(self) -> Self:
        if self._source is not None and self._source.isatty():
            self._before = termios.tcgetattr(self._source)
            tty.setcbreak(self._source)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._source is not None and self._before is not None:
            termios.tcsetattr(self._source, termios.TCSADRAIN, self._before)
            self._before = None

    def pressed(self, key: str, within_s: float) -> bool:
        """Wait for a key; False once the time is up, other keys or not."""
        end_s = time.monotonic() + within_s
        while (left_s := end_s - time.monotonic()) > 0:
            if self._source is None or self._before is None:
                time.sleep(left_s)
                continue
            ready, _, _ = select.select([self._source], [], [], left_s)
            if ready:
                read = os.read(self._source.fileno(), 1)
                if not read or read.decode(errors="replace").lower() == key:
                    return True
        return False
