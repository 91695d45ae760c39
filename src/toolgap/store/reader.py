"""Reads in flight: strips are taken in turns from all requests by a few threads."""

import logging
import mmap
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from toolgap.store.landing import SCRATCH_BYTES, Fault, Landing
from toolgap.store.options import ReadPath
from toolgap.store.strips import Strip

_logger = logging.getLogger(__name__)


class _Request:
    def __init__(self, made: Iterable[Strip], cancel: threading.Event | None) -> None:
        self.strips = deque(made)
        self.cancel = cancel
        self.running = 0
        self.faults: dict[int, str] = {}
        self.done = threading.Event()

    def drop(self) -> None:
        """Let what was not begun be cancelled."""
        for strip in self.strips:
            self.faults.update((page.number, Fault.CANCELLED) for page in strip.wanted)
        self.strips.clear()


class Reader:
    """The threads that read. A request's strips run side by side; between requests they alternate."""

    def __init__(self, folder: Path, namespace: bytes, path: ReadPath, threads: int) -> None:
        self.landing = Landing(folder, namespace, path)
        self._threads = threads
        self._started: list[threading.Thread] = []
        self._requests: deque[_Request] = deque()
        self._work = threading.Condition()
        self._active = 0
        self._closed = False
        self.idle = threading.Event()
        """Set while there is nothing to read."""
        self.idle.set()

    def read(self, made: Sequence[Strip], cancel: threading.Event | None) -> dict[int, str]:
        """Read them; returns the faults by the pages' numbers."""
        request = _Request(made, cancel)
        with self._work:
            if self._closed:
                request.drop()
            if not request.strips:
                return request.faults
            while len(self._started) < min(self._threads, len(made) + self._active):
                thread = threading.Thread(target=self._run, name="toolgap-store-read", daemon=True)
                thread.start()
                self._started.append(thread)
            self._active += 1
            self.idle.clear()
            self._requests.append(request)
            self._work.notify_all()
        request.done.wait()
        with self._work:
            self._active -= 1
            if not self._active:
                self.idle.set()
        return request.faults

    def _run(self) -> None:
        scratch = memoryview(mmap.mmap(-1, SCRATCH_BYTES))
        while True:
            with self._work:
                while not self._requests:
                    if self._closed:
                        return
                    self._work.wait()
                request = self._requests.popleft()
                if self._closed or (request.cancel is not None and request.cancel.is_set()):
                    request.drop()
                if not request.strips:
                    if not request.running:
                        request.done.set()
                    continue
                strip = request.strips.popleft()
                request.running += 1
                if request.strips:
                    self._requests.append(request)
            try:
                faults = self.landing.land(strip, scratch)
            except Exception:
                # Memory that cannot be written, say. The thread goes on, and nobody waits for ever.
                _logger.exception("toolgap store: %d pages were not read", len(strip.wanted))
                faults = {page.number: Fault.FAILED for page in strip.wanted}
            with self._work:
                request.faults.update(faults)
                request.running -= 1
                if not request.strips and not request.running:
                    request.done.set()
            # The caller's memory is the caller's again.
            del request, strip

    def close(self) -> None:
        """End the threads; what was not begun is cancelled."""
        with self._work:
            self._closed = True
            for request in self._requests:
                request.drop()
            self._work.notify_all()
        for thread in self._started:
            thread.join()
