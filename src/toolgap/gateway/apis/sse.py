"""Server-sent events out of bytes as they pass, as the WHATWG's standard reads them. Pure: no I/O."""

from collections.abc import Iterator

_BOM = b"\xef\xbb\xbf"


class EventTooLongError(ValueError):
    """An event, or a line, is longer than may be kept."""


class Events:
    """Reads one stream. What it yields does not depend on how the stream is cut into chunks.

    Args:
        max_event_bytes: Of the data of one event, and of one line.
    """

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._line = bytearray()
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._after_cr = False
        self._begun = False

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The data of every event that ends in this chunk; the iterator has to be used up.

        Raises:
            EventTooLongError: the stream cannot be read on.
        """
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        if not chunk:
            return
        self._after_cr = chunk.endswith(b"\r")
        lines = chunk.splitlines()
        last = b"" if chunk.endswith((b"\r", b"\n")) else lines.pop()
        for line in lines:
            if self._line:
                line = bytes(self._line) + line
                self._line.clear()
            yield from self._read(line)
        self._line += last
        self._check(len(self._line))

    def _read(self, line: bytes) -> Iterator[bytes]:
        self._check(len(line))
        if not self._begun:
            self._begun, line = True, line.removeprefix(_BOM)
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
                # Every line counts for more than its text, so that many empty ones are not free.
                self._data_bytes += len(value) + 1
                self._check(self._data_bytes)
        elif self._data:
            data = b"\n".join(self._data)
            self._data.clear()
            self._data_bytes = 0
            yield data

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_event_bytes:
            raise EventTooLongError(f"an event of more than {self._max_event_bytes} bytes")
