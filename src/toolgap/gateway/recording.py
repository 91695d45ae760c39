"""Writes turns into a recording: one line of JSON each, in the form that :mod:`toolgap.gateway.record` describes.

For one thread. Every turn is one write of its own, so that a gateway that is killed has lost none that it saw.
"""

import fcntl
import logging
import os
import secrets
import stat
from pathlib import Path
from typing import Self

from toolgap.gateway.record import recorded
from toolgap.gateway.watch import Asked, Seen

logger = logging.getLogger("toolgap.gateway")

MODE = 0o600
"""Of the file: what it holds is for its owner only."""

_LINE = b'{"session":'
"""What every line begins with."""

_LOOK_BACK_BYTES = 1 << 16


class RecordingError(Exception):
    """The file cannot be recorded into; the text says why."""


class Recording:
    """A file that turns are added to.

    Args:
        path: Made if it is not there; turns are added to a recording that is.
        content: Whether what was said goes into it.

    Attributes:
        turns: How many were written.
        lost: How many could not be.

    Raises:
        RecordingError: the file cannot be opened, is another gateway's, or is no recording.
    """

    def __init__(self, path: Path, *, content: bool) -> None:
        self._path, self._content = path, content
        self._warned = False
        # A gateway's names of conversations begin anew with it, and the file may have others' already.
        self._run = secrets.token_hex(4)
        self.turns = self.lost = 0
        self._file = -1
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, MODE)
            self._claim()
        except OSError as error:
            self.close()
            raise RecordingError(f"{path} cannot be recorded into: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def turn(self, session: str, asked: Asked, seen: Seen, asked_s: float) -> None:
        """A turn is over. Never raises for the file's sake.

        Args:
            session: The conversation's key.
            asked: The request.
            seen: Its answer, with times on the clock of ``asked_s``.
            asked_s: When the request came, as Unix time.
        """
        line = recorded(f"{session}.{self._run}", asked, seen, asked_s=asked_s, content=self._content).line()
        try:
            self._write(line)
        except OSError as error:
            self.lost += 1
            if not self._warned:
                self._warned = True
                logger.warning("turns are lost: %s cannot be written: %s", self._path, error.strerror)
        else:
            self.turns += 1

    def close(self) -> None:
        """Nothing more is written."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _claim(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise RecordingError(f"{self._path} cannot be recorded into: it is no file")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RecordingError(
                f"{self._path} is being recorded into already: name a file for every gateway"
            ) from error
        self._repair()
        os.fchmod(self._file, MODE)

    def _repair(self) -> None:
        """Take away the last line if it is a part of one only, and nothing of what is no recording."""
        size = os.fstat(self._file).st_size
        if not size:
            return
        start = max(size - _LOOK_BACK_BYTES, 0)
        last = os.pread(self._file, size - start, start)
        whole = start + last.rfind(b"\n") + 1
        if os.pread(self._file, len(_LINE), 0) != _LINE:
            raise RecordingError(f"{self._path} is no recording: nothing is added to it")
        if whole == size:
            return
        while start and whole == start:
            size, start = start, max(start - _LOOK_BACK_BYTES, 0)
            whole = start + os.pread(self._file, size - start, start).rfind(b"\n") + 1
        os.ftruncate(self._file, whole)

    def _write(self, line: bytes) -> None:
        begin = os.fstat(self._file).st_size
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            # A part of a line would make the next one unreadable as well.
            os.ftruncate(self._file, begin)
            raise
